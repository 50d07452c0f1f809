"""Each benchmark end to end at tiny sizes: its records, a second call that measures nothing, errors of the user."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from rich.console import Console

from benchmarks import coverage
from benchmarks.approximation import Approximation
from benchmarks.common import start, switch, write_tables
from benchmarks.coverage import Coverage
from benchmarks.embeddings import Embeddings, nearness, ranks_of
from benchmarks.finetune import Finetune
from benchmarks.never_slower import NeverSlower
from benchmarks.peers import PEERS, Peers
from benchmarks.processes import GATHERED, Processes
from benchmarks.robustness import Robustness, join_heads
from benchmarks.steps import TrainingSteps
from benchmarks.summaries import summarize
from skeinformer.attention.budget import NUM_DRAWS
from skeinformer.cli.pretrained import load_model, minilm_folder
from skeinformer.cli.records import Record, check, read
from skeinformer.cli.specs import parse
from tests.models.hf_models import WORDS, save_bert

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")


def run_twice(options: Any) -> list[Record]:
    """The records of a benchmark, of which a second call measures none again."""
    options.run(quiet()) if "console" in type(options).run.__annotations__ else options.run()
    records = read(options.records)
    assert records
    assert all(check(record) for record in records)
    options.run(quiet()) if "console" in type(options).run.__annotations__ else options.run()
    assert read(options.records) == records
    return records


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_approximation(tmp_path: Path) -> None:
    options = Approximation(
        lengths=(64,),
        budgets=(4, 16),
        methods=("cluster", "vmean", "reformer", "benchmarks.rivals:thinformer"),
        trials=2,
        gradient_trials=1,
        time_rounds=1,
        records=tmp_path / "r.jsonl",
        summary=tmp_path / "s.jsonl",
        figures=tmp_path / "figures",
        markdown=tmp_path / "page.md",
    )
    records = run_twice(options)
    assert {r["kind"] for r in records} == {"approx", "approx_time", "approx_skipped"}
    trials = [r for r in records if r["kind"] == "approx" and r["method"] == "cluster" and r["budget"] == 4]
    assert [(r["trial"], r["weights"], r["grad_key"] is None) for r in trials] == [
        (0, "pretrained", False), (0, "initialized", False), (1, "pretrained", True), (1, "initialized", True)
    ]  # fmt: skip
    (mean,) = [r for r in summarize(trials) if r["weights"] == "pretrained"]
    values = [float(r["spectral"] or 0) for r in trials if r["weights"] == "pretrained"]
    assert mean["spectral"] == pytest.approx(np.mean(values))
    assert mean["spectral_se"] == pytest.approx(np.std(values, ddof=1) / 2**0.5)
    small = read(tmp_path / "s.jsonl")
    assert {r["kind"] for r in small} == {"approx_summary", "approx_time", "approx_skipped"}
    assert (tmp_path / "page.md").read_text().count("| exact (SDPA) |") == 4
    assert len(list((tmp_path / "figures").iterdir())) == 8
    page = (tmp_path / "page.md").read_text()
    replace(options, from_records=True, records=tmp_path / "s.jsonl", summary=None, methods=()).run(quiet())
    shown = [line for line in page.splitlines() if line.startswith("|")]
    assert [x for x in (tmp_path / "page.md").read_text().splitlines() if x.startswith("|")] == shown


def test_the_ratio_to_v_mean_is_taken_trial_by_trial() -> None:
    common: Record = {"kind": "approx", "n": 8}
    records = [
        {**common, "method": method, "trial": trial, "spectral": value}
        for method, values in (("vmean", (1.0, 4.0)), ("cluster", (0.5, 1.0)))
        for trial, value in enumerate(values)
    ]
    found = {r["method"]: r["spectral_to_vmean"] for r in summarize(records)}
    assert found == {"vmean": 1.0, "cluster": (0.5 + 0.25) / 2}


def test_robustness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "words.txt").write_text(" ".join(WORDS) * 40)
    options = Robustness(
        texts=(tmp_path / "words.txt",), lengths=(300,), trials=1, rows=32, time_rounds=1, records=tmp_path / "r.jsonl"
    )
    records = run_twice(options)
    assert len([r for r in records if r["kind"] == "robustness"]) == 7 * 2 * 4  # inputs, widths, methods
    assert "| words | 300 | 64 |" in capsys.readouterr().out
    x = torch.randn(1, 4, 5, 3)
    torch.testing.assert_close(join_heads(x, 2)[0, 1, :, 3:], x[0, 3])


@pytest.fixture
def small_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs of few rows: one of them with a budget to be chosen."""
    for name, value in {"ROWS": 64, "HEADS": 2, "REFERENCE": 8}.items():
        monkeypatch.setattr(coverage, name, value)
    made = [
        coverage.Case(group, name, 64, lambda change=change: coverage.changed(change, 0))
        for group, name, change in (
            ("ten odd rows", "shifted", coverage.shifted),
            ("rows no guess can find", "ten, a key each", coverage.hidden),
        )
    ]
    monkeypatch.setattr(coverage, "inputs_of", lambda options: iter(made))


@pytest.mark.usefixtures("small_inputs")
def test_coverage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = run_twice(Coverage(sketches=2, draws=2, trials=4, threads=1, records=tmp_path / "r.jsonl"))
    assert [r["kind"] for r in records] == ["coverage"] * 3 + ["coverage_budget"] * 2 + ["coverage"] * 3
    assert {r["intervals"] for r in records[:3]} == {2 * 2 * 2}
    assert {r.get("num_draws") for r in records} == {None, NUM_DRAWS}
    text = capsys.readouterr().out
    assert "| ten odd rows, shifted | 64 |" in text
    assert "of 4 |" in text
    assert start(Coverage, ["--groups", "odd rows", "--records", str(tmp_path / "r.jsonl")]) == 2
    assert "did you mean 'ten odd rows'" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("group", list(coverage.PROMISED))
def test_the_certificate_holds_as_often_as_it_promises(group: str, tmp_path: Path) -> None:
    """As docs/certificate.md says; MiniLM at one length only."""
    trials = 0 if group == "MiniLM" else 40
    sizes: dict[str, Any] = {"lengths": (512,), "sketches": 5, "draws": 5, "trials": trials}
    options = Coverage(**sizes, groups=(group,), records=tmp_path / "r.jsonl")
    options.run()
    for r in read(options.records):
        if r["kind"] == "coverage":
            for name, least in coverage.PROMISED[group].items():
                assert float(r[name] or 0) >= least - 0.03, (r["input"], r["method"], name)  # 200 intervals or more
        else:
            assert int(r["above"] or 0) <= 0.15 * trials  # 5 % are promised, of 40


def test_embeddings(tmp_path: Path) -> None:
    options = Embeddings(
        passages=3, length=100, methods=("cluster",), budgets=(4,), rounds=1, records=tmp_path / "r.jsonl",
        figure=tmp_path / "figure",
    )  # fmt: skip
    exact, cluster = run_twice(options)
    assert (exact["cosine"], exact["recall_1"], exact["ratio"]) == (pytest.approx(1), 1.0, 1.0)
    assert 0.3 < float(cluster["cosine_min"] or 0) < float(cluster["cosine"] or 0) < 1
    assert (tmp_path / "figure.svg").exists()
    screen = quiet()
    replace(options, search=True).run(screen)
    assert "whole, Cluster sketch, d = 4" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert load_model(None).model.config._attn_implementation == "sdpa"


def test_nearness_and_ranks() -> None:
    exact = np.eye(4, 8, dtype=np.float32) + 0.1
    exact /= np.linalg.norm(exact, axis=1, keepdims=True)
    same = nearness(exact, exact, (1,))
    assert (same["cosine"], same["cosine_min"], same["recall_1"]) == (pytest.approx(1), pytest.approx(1), 1.0)
    assert nearness(exact[::-1], exact, (3,))["recall_3"] == 1.0
    assert nearness(np.roll(exact, 1, axis=0), exact, (1,))["cosine"] < 0.9  # type: ignore[operator]
    halves = torch.stack([torch.eye(3), torch.eye(3)[[0, 2, 1]]], 1)
    assert ranks_of(halves).tolist() == [1, 2, 2]


@pytest.fixture
def reviews(tmp_path: Path) -> Finetune:
    """Reviews of 60 or 130 words, of the first half of the words where they are positive."""
    source = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"split": [], "label": [], "text": []}
    for number in range(120):
        words = source.choice(WORDS[:45] if number % 2 else WORDS[45:], 60 if number % 3 == 0 else 130)
        rows["split"].append("train" if number < 80 else "test")
        rows["label"].append(number % 2)
        rows["text"].append(" ".join(words))
    parquet.write_table(pyarrow.table(rows), tmp_path / "reviews.parquet")
    (tmp_path / "model").mkdir()
    model = str(save_bert(tmp_path / "model"))
    sizes: dict[str, Any] = {"budgets": (16,), "length": 100, "min_tokens": 80, "steps": 20, "batch": 4, "rounds": 1}
    options = Finetune(data=tmp_path / "reviews.parquet", model=model, records=tmp_path / "r.jsonl", **sizes)
    return replace(options, test_examples=20, learning_rate=5e-4, methods=("softmax", "cluster", "mixed:output=exact"))


def test_finetuning(reviews: Finetune, capsys: pytest.CaptureFixture[str]) -> None:
    records = run_twice(replace(reviews, methods=(*reviews.methods, "policy:exact_layer=0")))
    assert [(r["method"], r["train_examples"], r["majority"]) for r in records] == [
        (method, 53, 0.5) for method in ("softmax", "cluster", "mixed", "policy")
    ] or all(0.5 <= float(r["majority"] or 0) < 0.7 for r in records)
    assert all(float(r["loss"] or 9) < 0.69 for r in records)  # they learn
    assert records[0]["test_accuracy"] == records[0]["exact_test_accuracy"]
    wrong = ["--data", str(reviews.data), "--methods", "policy:draws=fixed"]
    assert start(Finetune, wrong) == 2
    assert "are for training from scratch" in capsys.readouterr().err
    assert start(Finetune, ["--data", str(reviews.data), "--min-tokens", "500", "--length", "600"]) == 2
    assert "give a smaller min_tokens, batch or test_examples" in capsys.readouterr().err


def test_a_model_that_keeps_its_own_attention_is_refused() -> None:
    import transformers

    config = transformers.MPNetConfig(
        vocab_size=30, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    with pytest.raises(ValueError, match="MPNetModel does not choose its attention by name"):
        switch(transformers.MPNetModel(config), replace(parse("cluster"), budget=5))


def test_never_slower(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.never_slower.TOKENS", 64)
    page = tmp_path / "page.md"
    names = ("never slower, cluster", "never slower, in all")
    page.write_text("".join(f"<!-- {name} -->\n<!-- end -->\n" for name in names))
    options = NeverSlower(lengths=(32,), methods=("cluster",), subjects=("layer",), rounds=1, page=page)
    records = run_twice(replace(options, records=tmp_path / "r.jsonl"))
    assert [(r["training"], r["sketched"]) for r in records] == [(False, False), (True, False)]
    assert f"| 32 | {records[0]['ratio']:.2f} |" in page.read_text()
    assert " of 2 cells are at most 1.05" in page.read_text()


@pytest.mark.peers
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: f"{peer.package}-{peer.spec}")
def test_a_pair(peer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip(peer.module, reason=f"{peer.package} is not installed")
    monkeypatch.setattr("benchmarks.peers.PEERS", (peer,))
    options = Peers(lengths=(256,), heads=2, head_dim=8, batch=2, budget=16, rounds=1, records=tmp_path / "r.jsonl")
    (record,) = run_twice(options)
    assert (record["peer"], record["budget"]) == (peer.package, 16)
    assert min(float(record[name] or 0) for name in ("seconds", "peer_seconds", "ratio", "peer_peak_bytes")) > 0


def test_training_steps(tmp_path: Path) -> None:
    options = TrainingSteps(lengths=(32,), methods=("vmean", "cluster"), batch=1, budgets=(4,), rounds=1)
    records = run_twice(replace(options, records=tmp_path / "r.jsonl"))
    assert [(r["method"], r["budget"]) for r in records] == [("softmax", None), ("vmean", None), ("cluster", 4)]
    assert records[0]["ratio"] == 1.0


@pytest.mark.slow
def test_processes(tmp_path: Path) -> None:
    options = Processes(processes=(1, 2), lengths=(64,), methods=("cluster", "vmean"), budgets=(4,), rounds=1)
    rows = run_twice(replace(options, heads=1, head_dim=8, records=tmp_path / "r.jsonl"))
    assert [(r["processes"], r["n"], r["mode"], r["method"]) for r in rows] == [
        (ranks, n, mode, method)
        for ranks, n in ((1, 64), (2, 128), (2, 64))
        for mode in ("forward", "both")
        for method in (GATHERED, "cluster", "vmean")
    ]
    for r in rows:
        assert r["n_each"] == r["n"] // r["processes"]  # type: ignore[operator]
        assert (r["received_bytes"] > 0) == (r["processes"] > 1)  # type: ignore[operator]


def test_processes_have_equal_shares(capsys: pytest.CaptureFixture[str]) -> None:
    assert start(Processes, ["--processes", "2", "3", "--lengths", "64"]) == 2
    assert "n = 64 is not a multiple of 6" in capsys.readouterr().err
    assert start(Processes, ["--methods", "informer"]) == 2


def test_a_page_without_marks_is_named(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("<!-- one -->\nold\n<!-- end -->\nafter\n")
    write_tables(tmp_path / "page.md", {"one": "new"})
    assert (tmp_path / "page.md").read_text() == "<!-- one -->\nnew\n<!-- end -->\nafter\n"
    with pytest.raises(ValueError, match="has no <!-- two -->"):
        write_tables(tmp_path / "page.md", {"two": "x"})
