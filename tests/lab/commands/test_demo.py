"""`skein demo` end to end, on real weights at small lengths."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")
pytest.importorskip("rich", reason="needs the extra `lab`")
pytest.importorskip("matplotlib", reason="needs the extra `lab`")

from rich.console import Console

from skeinformer.compare.measure import exact_attention
from skeinformer.lab.commands.demo import Demo, run_demo
from skeinformer.lab.measure.demo import contenders, demo_records
from skeinformer.lab.measure.pretrained import minilm_folder
from skeinformer.lab.records import read

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")

TINY: dict[str, Any] = {"lengths": (128, 64), "rounds": 2, "budget": 16, "pilots": (16, 4)}


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_the_demo_writes_records_and_page(tmp_path: Path, terminal: bool) -> None:
    out = tmp_path / "demo"
    screen = console(terminal)
    page = run_demo(Demo(**TINY, out=out), screen)
    assert page == out / "report.html"
    assert sorted(file.name for file in out.iterdir()) == ["figure.svg", "records.jsonl", "report.html"]
    rows = read(out / "records.jsonl")
    assert [(r["n"], r["method"], r["pilots"]) for r in rows] == [
        (n, method, pilots)
        for n in (64, 128)
        for method, pilots in (("softmax", None), ("vmean", None), ("skeinformer", 16), ("skeinformer", 4))
    ]
    text = written(screen)
    for row in rows:
        assert str(row["label"]) in text
        assert f"<td>{row['label']}</td>" in page.read_text(encoding="utf-8")
    assert "At n = 128, exact attention takes" in " ".join(text.split())
    assert ("\x1b[" in text) == terminal


def test_a_second_run_replaces_the_records_of_the_first(tmp_path: Path) -> None:
    options = Demo(**{**TINY, "lengths": (64,)}, out=tmp_path)
    for _ in range(2):
        run_demo(options, console(False))
    assert len(read(tmp_path / "records.jsonl")) == 4


def test_what_the_records_hold() -> None:
    steps: list[float] = []
    rows: list[Any] = list(demo_records(**TINY, seed=3, on_step=lambda detail, done: steps.append(done)))
    drafts = [r for r in rows if r["seconds"] is None]
    complete = [r for r in rows if r["seconds"] is not None]
    times = {"seconds", "seconds_q25", "seconds_q75", "ratio", "ratio_q25", "ratio_q75"}
    assert [{k: v for k, v in r.items() if k not in times} for r in drafts] == [
        {k: v for k, v in r.items() if k not in times} for r in complete
    ]
    assert steps == sorted(steps)
    assert steps[0] == 0
    assert steps[-1] < 1
    for row in complete:
        assert row["seconds_q25"] <= row["seconds"] <= row["seconds_q75"]
        assert row["peak_bytes"] > 0
        assert (row["heads"], row["head_dim"], row["layer"], row["seed"]) == (12, 32, 3, 3)
        if row["method"] == "softmax":
            assert row["ratio"] == row["ratio_q25"] == row["ratio_q75"] == 1.0
            assert 0 < row["error"] < 1e-6
        else:
            assert 0.01 < row["error"] < 1.5
        assert (row["estimate"] is None) == (row["method"] != "skeinformer")


def test_the_estimate_agrees_with_the_truth_within_its_standard_error() -> None:
    (row,) = [
        r
        for r in demo_records(lengths=(512,), rounds=1, budget=64, pilots=(32,))
        if r["seconds"] and r["method"] == "skeinformer"
    ]
    error, estimate, estimate_se = (float(row[name] or 0) for name in ("error", "estimate", "estimate_se"))
    assert estimate_se > 0
    assert abs(estimate - error) < 4 * estimate_se
    assert estimate_se < error / 10


def test_the_same_seed_gives_the_same_errors() -> None:
    def errors(seed: int) -> list[object]:
        return [r["error"] for r in demo_records(**{**TINY, "lengths": (64,)}, seed=seed) if r["seconds"]]

    assert errors(0) == errors(0)
    assert errors(0)[:2] == errors(1)[:2]
    assert errors(0)[2:] != errors(1)[2:]


def test_the_reference_is_softmax_attention_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (3 * torch.randn(1, 2, 50, 8, generator=generator) for _ in range(3))
    expected = (q.double() @ k.double().mT / 8**0.5).softmax(-1) @ v.double()
    torch.testing.assert_close(exact_attention(q, k, v), expected, rtol=1e-12, atol=1e-12)


def test_a_text_that_is_too_short_is_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("word " * 100)
    with pytest.raises(ValueError, match="the text has 100 tokens, 128 are needed"):
        next(demo_records(**TINY, text=path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (0,)}, "length must be at least 1"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"budget": 0}, "budget must be at least 1"),
        ({"pilots": (8, -1)}, "pilots must be at least 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(demo_records(**{**TINY, **options}))


def test_contenders_have_distinct_labels() -> None:
    labels = [contender.label for contender in contenders(256, (256, 32))]
    assert len(set(labels)) == len(labels) == 4
