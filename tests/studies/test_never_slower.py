"""Time over exact of drop-ins: records, a table, and what is measured is not measured again."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from skeinformer.lab.records import read
from studies.never_slower import PADDED, NeverSlower, run_never_slower


@pytest.mark.parametrize("subject", ["layer", PADDED])
def test_a_layer_is_measured_once_and_short_ones_are_exact(
    subject: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("studies.never_slower.TOKENS", 64)
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- never slower, {name} -->\n<!-- end -->\n" for name in ("cluster", "in all")))
    options = NeverSlower(
        lengths=(32,),
        methods=("cluster",),
        subjects=(subject,),
        rounds=1,
        records=tmp_path / "records.jsonl",
        page=page,
    )
    for _ in range(2):
        console = Console(file=StringIO(), width=120)
        forward, training = read(run_never_slower(options, console))
        assert (forward["training"], training["training"]) == (False, True)
        assert not forward["sketched"]
        assert "exact" in console.file.getvalue()  # type: ignore[attr-defined]
        assert f"| 32 | {forward['ratio']:.2f} | {training['ratio']:.2f} |" in page.read_text()
        assert " of 2 cells are at most 1.05" in page.read_text()


def test_an_unknown_subject_is_named() -> None:
    with pytest.raises(ValueError, match="known are layer; MiniLM"):
        run_never_slower(NeverSlower(subjects=("bert",)))
