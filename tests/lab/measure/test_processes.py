"""`skein bench --processes`: real processes, what they measure, and what is said where one fails."""

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="needs the extra `lab`")

from rich.console import Console

from skeinformer.lab.commands.bench import Bench, run_bench, tables
from skeinformer.lab.contender import parse_all
from skeinformer.lab.measure import pool
from skeinformer.lab.measure.processes import GATHERED, OfProcess, process_records
from skeinformer.lab.records import Record, read

TINY: dict[str, Any] = {
    "processes": (1, 2),
    "lengths": (64,),
    "methods": ("cluster", "vmean"),
    "budget": 4,
    "batch": 1,
    "heads": 1,
    "head_dim": 8,
    "rounds": 1,
}


@pytest.mark.slow
def test_it_measures_shares_and_the_whole_and_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    screen = Console(file=io.StringIO(), width=80, highlight=False)
    run_bench(Bench(**TINY, records=file), screen)
    rows = read(file)
    points = [(1, 64), (2, 128), (2, 64)]
    assert [(r["processes"], r["n"], r["mode"], r["method"]) for r in rows] == [
        (*point, mode, method)
        for point in points
        for mode in ("forward", "both")
        for method in (GATHERED, "cluster", "vmean")
    ]
    for r in rows:
        assert r["kind"] == "bench_processes"
        assert r["threads"] == 1
        assert r["n_each"] == r["n"] // r["processes"]
        assert r["seconds_per_token"] == r["seconds"] / r["n"] > 0
        assert r["peak_bytes"] > 0
        assert (r["received_bytes"] > 0) == (r["processes"] > 1)
    run_bench(Bench(**TINY, records=file), screen)
    assert "Nothing was measured" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert read(file) == rows


@pytest.mark.slow
def test_a_process_that_fails_or_dies_is_named() -> None:
    with pool.started(2, 1) as started, pytest.raises(ChildProcessError, match="process 1 of 2 raised ValueError: no"):
        started.run(raises)
    with (
        pool.started(2, 1) as started,
        pytest.raises(ChildProcessError, match="process 1 of 2 was ended by SIGKILL; the"),
    ):
        started.run(dies)


def raises(tell: object) -> None:
    if torch.distributed.get_rank() == 1:
        raise ValueError("no")
    torch.distributed.barrier()


def dies(tell: object) -> None:
    if torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"processes": (1, 3)}, "n = 64 is not a multiple of 3, and all of 1, 3 processes must have equal shares"),
        ({"methods": ("softmax",)}, "'softmax' takes no group.* cluster take one"),
        ({"processes": (0,)}, "processes must be at least 1, got 0"),
        ({"peers": True}, "give one of --peers, --step and --processes"),
        ({"rounds": 0}, "rounds must be at least 1"),
    ],
)
def test_wrong_options(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        run_bench(Bench(**{**TINY, **change}, records=tmp_path / "r.jsonl"), Console(file=io.StringIO()))


def test_exact_attention_is_left_out_where_it_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started here: the pool is one that answers."""
    asked = []

    found_by_all = OfProcess([2.0], 10, 0)

    class Started:
        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def run(self, function: object, task: Any, on_message: object) -> list[Any]:
            asked.append((task.sizes.n, task.exact))
            return [dict.fromkeys([GATHERED] * task.exact + ["vmean"], found_by_all)]

    monkeypatch.setattr("skeinformer.lab.measure.processes.started", lambda ranks, threads: Started())
    monkeypatch.setattr("skeinformer.lab.measure.processes.matmul_peak", lambda dtype: 1e6)
    said: list[str] = []
    found = list(
        process_records(
            parse_all(["vmean"]),
            [1],
            [64, 1024],
            batch=1,
            heads=1,
            head_dim=8,
            budget=4,
            modes=["forward"],
            max_seconds=1.0,
            on_skip=lambda what, reason: said.append(f"{what}: {reason}"),
        )
    )
    assert asked == [(64, True), (1024, False)]
    assert [(r["method"], r["n"]) for r in found] == [(GATHERED, 64), ("vmean", 64), ("vmean", 1024)]
    (line,) = said
    assert line.startswith("all-gather, SDPA, 1 process, n = 1,024, forward: a call would take about 33.6 s")


def test_the_table_has_80_columns() -> None:
    record: Record = {
        "kind": "bench_processes",
        "method": "skeinformer",
        "label": "Skeinformer, 32 pilots",
        "mode": "forward",
        "processes": 4,
        "n": 1_048_576,
        "n_each": 262_144,
        "seconds": 0.1234,
        "seconds_per_token": 1.234e-6,
        "peak_bytes": 2**27 + 12345,
    }
    screen = Console(file=io.StringIO(), width=80, highlight=False)
    for table in tables([record]):
        screen.print(table)
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    for part in ("processes", "n in all", "per token", "1,048,576", "262,144", "123 ms", "1.23 us", "128 MiB"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 80
