"""`skein demo` end to end, on real weights at small lengths."""

import io
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")
pytest.importorskip("rich", reason="needs the extra `lab`")
pytest.importorskip("matplotlib", reason="needs the extra `lab`")

from rich.console import Console

from skeinformer.lab.commands.demo import Demo, run_demo
from skeinformer.lab.measure.demo import attention_records, contenders
from skeinformer.lab.measure.demo_model import embedding_records, layer_records, spread_passages
from skeinformer.lab.measure.errors import exact_attention
from skeinformer.lab.measure.pretrained import load_model, minilm_folder
from skeinformer.lab.records import read

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")

TINY: dict[str, Any] = {"lengths": (128, 64), "rounds": 2, "budget": 16, "pilots": 4}
WHOLE: dict[str, Any] = {**TINY, "passages": 3, "passage_length": 160, "compare_length": 160}
METHODS = ["softmax", "skeinformer", "cluster", "cluster", "vmean"]


def console(terminal: bool, width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_the_demo_writes_records_and_page(tmp_path: Path, terminal: bool) -> None:
    out = tmp_path / "demo"
    screen = console(terminal)
    page = run_demo(Demo(**WHOLE, out=out), screen)
    assert page == out / "report.html"
    assert sorted(file.name for file in out.iterdir()) == ["figure.svg", "records.jsonl", "report.html"]
    rows = read(out / "records.jsonl")
    attention = [r for r in rows if r["kind"] == "demo"]
    assert [(r["n"], r["method"]) for r in attention] == [(n, method) for n in (64, 128) for method in METHODS]
    assert Counter(r["kind"] for r in rows) == {
        "demo": 10,
        "embeddings": 3,
        "compare_layer": 6 * 13,
        "compare_model": 1,
    }
    text, html = written(screen), page.read_text(encoding="utf-8")
    for name in {str(row["label"]) for row in attention}:
        assert name in text
        assert f"{name}</td>" in html
    assert "Over 128 tokens, the cluster sketch" in " ".join(text.split())
    for part in ("1 of 3: attention", "2 of 3: the whole model", "3 of 3: compare"):
        assert part in text
    assert "class='heat'" in html
    assert "<script" not in html
    assert ("\x1b[" in text) == terminal
    if terminal:
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", text).splitlines()
        assert max(map(len, lines)) <= 80
        assert "…" not in text


def test_parts_can_be_left_out_and_a_second_run_replaces_the_records_of_the_first(tmp_path: Path) -> None:
    options = Demo(**{**TINY, "lengths": (64,)}, passages=0, compare_length=0, out=tmp_path)
    for _ in range(2):
        screen = console(False)
        run_demo(options, screen)
    assert len(read(tmp_path / "records.jsonl")) == 5
    assert "1 of 1: attention" in written(screen)


def test_what_the_records_of_attention_hold() -> None:
    steps: list[float] = []
    rows: list[Any] = list(attention_records(**TINY, seed=3, on_step=lambda detail, done: steps.append(done)))
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
        elif row["budget"] != 128:  # which is exact at these lengths
            assert 0.01 < row["error"] < 1.5
        assert (row["estimate"] is None) == (row["method"] in ("softmax", "vmean"))
        assert (row["bound"] is None) == (row["estimate"] is None)


@pytest.mark.parametrize("method", ["skeinformer", "cluster"])
def test_the_estimate_agrees_with_the_truth_within_its_standard_error(method: str) -> None:
    row = next(
        r
        for r in attention_records(lengths=(512,), rounds=1, budget=64, pilots=32)
        if r["seconds"] and r["method"] == method
    )
    error, estimate, estimate_se = (float(row[name] or 0) for name in ("error", "estimate", "estimate_se"))
    assert estimate_se > 0
    assert abs(estimate - error) < 4 * estimate_se
    assert estimate_se < error / 10


def test_the_same_seed_gives_the_same_errors() -> None:
    def errors(seed: int) -> list[object]:
        return [r["error"] for r in attention_records(**{**TINY, "lengths": (64,)}, seed=seed) if r["seconds"]]

    assert errors(0) == errors(0)
    assert [errors(0)[i] for i in (0, 4)] == [errors(1)[i] for i in (0, 4)]
    assert errors(0)[1:3] != errors(1)[1:3]


def test_embeddings_of_passages() -> None:
    steps: list[float] = []
    rows = list(embedding_records(passages=3, length=150, on_step=lambda detail, done: steps.append(done)))
    assert [r["label"] for r in rows] == ["Exact attention", "Cluster sketch, fast", "Cluster sketch, accurate"]
    assert steps == sorted(steps)
    exact, fast, accurate = (float(r["cosine"] or 0) for r in rows)
    assert exact == pytest.approx(1)
    assert fast < accurate < 1
    assert rows[0]["recall_1"] == 1
    assert "recall_3" not in rows[0]  # of three passages
    assert rows[0]["ratio"] == 1
    assert load_model(None).model.config._attn_implementation == "sdpa"


def test_passages_are_spread_over_the_text() -> None:
    tokenizer = load_model(None).tokenizer
    text = " ".join(f"{i}" for i in range(1000))
    rows = spread_passages(text, tokenizer, 3, 52)
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    assert rows.shape == (3, 52)
    assert torch.equal(rows[0, 1:-1], tokens[:50])
    assert torch.equal(rows[-1, 1:-1], tokens[-50:])
    assert set(rows[:, 0].tolist()) == {tokenizer.cls_token_id}
    with pytest.raises(ValueError, match="tokens, 100 passages of 52 need 5,000; give a longer text"):
        spread_passages(text, tokenizer, 100, 52)


def test_layers_are_compared() -> None:
    rows = layer_records(length=160, tolerance=0.3, rounds=1)
    assert {r["label"] for r in rows} == {"Cluster sketch, accurate"}
    assert [r["index"] for r in rows if r["kind"] == "compare_layer" and r["head"] is None] == list(range(6))


def test_the_reference_is_softmax_attention_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (3 * torch.randn(1, 2, 50, 8, generator=generator) for _ in range(3))
    expected = (q.double() @ k.double().mT / 8**0.5).softmax(-1) @ v.double()
    torch.testing.assert_close(exact_attention(q, k, v), expected, rtol=1e-12, atol=1e-12)


def test_a_text_that_is_too_short_is_an_error_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("word " * 100)
    with pytest.raises(ValueError, match="the text has 100 tokens, 128 are needed"):
        next(attention_records(**TINY, text=path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (0,)}, "length must be at least 1"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"budget": 0}, "budget must be at least 1"),
        ({"pilots": -1}, "pilots must be at least 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        next(attention_records(**{**TINY, **options}))


def test_contenders_have_distinct_labels() -> None:
    labels = [contender.label for contender in contenders(256, 32)]
    assert len(set(labels)) == len(labels) == 5
