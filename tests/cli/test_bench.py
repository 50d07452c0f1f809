"""`skein bench` end to end: what it measures, that it goes on, methods of the user, page and figure."""

from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from skeinformer.attention import METHODS
from skeinformer.cli import bench_runs
from skeinformer.cli.bench import Bench, default_methods, result_tables
from skeinformer.cli.bench_runs import errors_of, too_slow
from skeinformer.cli.measure import exact_attention
from skeinformer.cli.pretrained import minilm_folder, pretrained_qkv
from skeinformer.cli.records import read
from skeinformer.cli.specs import parse
from tests.cli.conftest import printed

TINY: dict[str, Any] = {"lengths": (32, 64), "budgets": (4,), "rounds": 1, "heads": 1, "head_dim": 8, "batch": 2}


def has_weights() -> bool:
    try:
        return minilm_folder().is_dir()
    except FileNotFoundError:
        return False


needs_weights = pytest.mark.skipif(not has_weights(), reason="the pretrained weights are not installed")


def test_every_method_at_every_length_and_mode(tmp_path: Path, console: Console, my_module: str) -> None:
    mine = f"{my_module}:MyMethod"
    options = Bench(**TINY, methods=("cluster", "vmean", mine), long_from=64, records=tmp_path / "x" / "r.jsonl")
    assert options.run(console) == options.records
    records = read(options.records)
    methods = ["sdpa", "cluster", "vmean", mine]
    modes = ("forward", "both")
    assert [(r["n"], r["mode"], r["method"]) for r in records] == [
        (n, mode, method) for n in (32, 64) for mode in modes for method in methods
    ]
    for r in records:
        assert (r["kind"], r["batch"]) == ("bench", 2 if r["n"] == 32 else 1)
        assert 0 < r["seconds_q25"] <= r["seconds"] <= r["seconds_q75"]  # type: ignore[operator]
        assert r["peak_bytes"] > 0  # type: ignore[operator]
        assert r["budget"] == (4 if r["method"] in ("cluster", mine) else None)
    assert [r["ratio"] for r in records if r["method"] == "sdpa"] == [1.0] * 4
    assert records[0]["flops"] == 2 * 2 * 32 * 32 * 8 * 2  # two products, two operations, a batch of 2
    text = printed(console)
    assert "V-mean (baseline)" in text
    assert "MyMethod, d = 4" in text


def test_a_second_run_measures_what_is_new(tmp_path: Path, console: Console) -> None:
    options = Bench(**{**TINY, "lengths": (32,)}, methods=("vmean",), modes=("forward",), records=tmp_path / "r.jsonl")
    options.run(console)
    first = read(options.records)
    options.run(console)
    assert read(options.records) == first
    Bench(**{**TINY, "methods": ("vmean", "cluster")}, modes=("forward",), records=options.records).run(console)
    added = [(r["n"], r["method"]) for r in read(options.records)[len(first) :]]
    assert added == [(32, "sdpa"), (32, "cluster"), (64, "sdpa"), (64, "vmean"), (64, "cluster")]


@needs_weights
def test_pretrained_inputs_have_errors_a_page_and_figure_1(tmp_path: Path, console: Console) -> None:
    options = Bench(
        inputs="pretrained",
        lengths=(64,),
        budgets=(4, 16),
        methods=("cluster", "vmean", "reformer"),
        trials=2,
        layers=(0, 3),
        modes=("forward",),
        rounds=1,
        records=tmp_path / "r.jsonl",
        html=tmp_path / "page.html",
        figure=tmp_path / "figure1.svg",
    )
    options.run(console)
    records = [r for r in read(options.records) if r["method"] != "sdpa"]
    assert {(r["method"], r["budget"], r["layer"]) for r in records} == {
        (method, budget, layer)
        for method, budget in (("cluster", 4), ("cluster", 16), ("vmean", None))
        for layer in (0, 3)
    }
    error = {(r["method"], r["budget"], r["layer"]): r["error"] for r in records}
    assert all(error["cluster", 16, layer] < error["cluster", 4, layer] for layer in (0, 3))  # type: ignore[operator]
    assert all(r["error_se"] > 0 and r["spectral"] > 0 for r in records)  # type: ignore[operator]
    assert "Reformer shares queries and keys" in printed(console)
    html = options.html.read_text() if options.html else ""
    assert "<script" not in html
    assert "V-mean (baseline)" in html
    assert (tmp_path / "figure1.svg").read_text().startswith("<svg")
    for table in result_tables(records):
        assert list(table.headings)[:4] == ["method", "n", "error", "time"]


@needs_weights
def test_errors_alone_need_no_rounds(tmp_path: Path, console: Console) -> None:
    options = Bench(inputs="pretrained", lengths=(64,), budgets=(4,), methods=("vmean",), rounds=0, trials=1)
    Bench(**{**vars(options), "records": tmp_path / "r.jsonl"}).run(console)
    (record,) = read(tmp_path / "r.jsonl")
    assert record["error"] > 0  # type: ignore[operator]
    assert "seconds" not in record


@needs_weights
def test_the_error_is_that_of_the_call_with_these_draws() -> None:
    qkv, (spec,) = pretrained_qkv(100, layer=2), parse("cluster").at((8,))
    exact = exact_attention(*qkv)
    errors = errors_of(spec, qkv, exact, 3)
    output = spec.build(32, 100, 3)(*qkv, generator=torch.Generator().manual_seed(3)).double()
    expected = [(output - exact)[0, h].norm() / exact[0, h].norm() for h in range(12)]
    assert float(errors["error"]) == pytest.approx(float(sum(expected)) / 12, rel=1e-5)
    assert 0.3 < float(errors["estimate"] / errors["error"]) < 3
    assert errors["bound"] > errors["estimate"]


def test_busy_has_thirty_calls_and_the_worst(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    original = bench_runs.interleaved
    monkeypatch.setattr(bench_runs, "interleaved", lambda runs, n, **more: rounds.append(n) or original(runs, 3))
    options = Bench(**{**TINY, "lengths": (32,)}, methods=("vmean",), busy=True, records=tmp_path / "r.jsonl")
    options.run(console)
    assert rounds == [30, 30]
    assert all(r["busy"] and r["seconds_worst"] >= r["seconds"] for r in read(options.records))  # type: ignore[operator]


def test_calls_that_take_too_long_are_left_out() -> None:
    row = {"n": 200, "batch": 1, "flops": 4e9}
    assert too_slow(row, [], lambda: 1e9, 3.0).startswith("a call would take about 4 s")
    assert too_slow(row, [], lambda: 1e9, 5.0) == ""
    before = {"n": 100, "batch": 1, "flops": 1e9, "seconds": 2.0}
    assert too_slow(row, [before], lambda: 1e9, 7.9).startswith("a call would take about 8 s")
    assert too_slow({**row, "flops": 1e9}, [before], lambda: 1e9, 3.9).startswith("a call would take about 4 s")


def test_the_default_is_all_methods_that_differ() -> None:
    names = default_methods()
    assert {name.partition(":")[0] for name in names} == {name for name, e in METHODS.items() if e.same_as is None}
    assert names[names.index("skeinformer") + 1] == "skeinformer:num_pilots=32"
