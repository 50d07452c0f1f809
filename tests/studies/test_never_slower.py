"""Time over exact of drop-ins: records, a table, and what is measured is not measured again."""

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from skeinformer.lab.records import read
from studies.never_slower import NeverSlower, run_never_slower


def test_a_layer_is_measured_once_and_short_ones_are_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("studies.never_slower.TOKENS", 64)
    options = NeverSlower(
        lengths=(32,), methods=("cluster",), subjects=("layer",), rounds=1, records=tmp_path / "records.jsonl"
    )
    for _ in range(2):
        console = Console(file=StringIO(), width=120)
        forward, training = read(run_never_slower(options, console))
        assert (forward["training"], training["training"]) == (False, True)
        assert not forward["sketched"]
        assert "exact" in console.file.getvalue()  # type: ignore[attr-defined]


def test_an_unknown_subject_is_named() -> None:
    with pytest.raises(ValueError, match="known are layer, MiniLM"):
        run_never_slower(NeverSlower(subjects=("bert",)))
