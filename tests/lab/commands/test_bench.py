"""`skein bench` end to end, at small sizes."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("rich", reason="needs the extra `lab`")
pytest.importorskip("tyro", reason="needs the extra `lab`")

from rich.console import Console

from skeinformer.attention import METHODS
from skeinformer.lab import cli
from skeinformer.lab.commands.bench import COLUMNS, Bench, growth_rows, run_bench, tables
from skeinformer.lab.contender import parse
from skeinformer.lab.measure.crossing import faster_from
from skeinformer.lab.measure.speed import IDENTITY
from skeinformer.lab.records import Record, append, key_of, read
from skeinformer.sketch import SKETCHES

TINY: dict[str, Any] = {
    "lengths": (32, 64),
    "methods": ("skeinformer", "vmean"),
    "pilots": (4, 2),
    "budget": 8,
    "batch": 1,
    "heads": 1,
    "head_dim": 8,
    "rounds": 1,
}
ROWS = [("sdpa", ""), ("skeinformer", "num_pilots=4"), ("skeinformer", "num_pilots=2"), ("vmean", "")]


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of a millisecond and a small product for the peak: what is tested here is no time."""
    monkeypatch.setattr("skeinformer.lab.measure.speed.SHORTEST", 0.001)
    monkeypatch.setattr("skeinformer.lab.measure.speed.PEAK_SIZE", 64)


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_bench_writes_records_and_shows_them(tmp_path: Path, terminal: bool) -> None:
    file = tmp_path / "bench" / "records.jsonl"
    screen = console(terminal)
    assert run_bench(Bench(**TINY, records=file), screen) == file
    rows = read(file)
    assert [(r["n"], r["mode"], r["method"], r["options"]) for r in rows] == [
        (n, mode, *row) for n in (32, 64) for mode in ("forward", "both") for row in ROWS
    ]
    text = written(screen)
    assert ("\x1b[" in text) == terminal
    for expected in (
        "Skeinformer, 4 pilots",
        "Skeinformer, 2 pilots",
        "V-mean",
        "SDPA",
        "faster than SDPA",
        "exponent",
    ):
        assert expected in text


def test_a_second_run_measures_what_is_missing(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    other: Record = {"kind": "demo", "n": 32}
    append(file, other)
    run_bench(Bench(**{**TINY, "lengths": (32,), "modes": ("forward",)}, records=file), console())
    first = read(file)
    screen = console()
    run_bench(Bench(**{**TINY, "lengths": (32,), "modes": ("forward",)}, records=file), screen)
    assert read(file) == first
    assert "Nothing was measured" in written(screen)
    run_bench(Bench(**{**TINY, "modes": ("forward",), "methods": ("vmean", "blockbert")}, records=file), console())
    rows = read(file)
    assert rows[: len(first)] == first
    assert [(r["n"], r["method"]) for r in rows[len(first) :]] == [
        (32, "blockbert"),
        (64, "sdpa"),
        (64, "vmean"),
        (64, "blockbert"),
    ]


def test_again_replaces_what_it_measures(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    options: dict[str, Any] = {**TINY, "lengths": (32,), "modes": ("forward",)}
    run_bench(Bench(**options, records=file), console())
    first = read(file)
    run_bench(Bench(**{**options, "methods": ("vmean",)}, again=True, records=file), console())
    rows = read(file)
    assert len(rows) == len(first)
    assert {key_of(r, IDENTITY) for r in rows} == {key_of(r, IDENTITY) for r in first}
    assert [r for r in rows if r["method"] == "skeinformer"] == [r for r in first if r["method"] == "skeinformer"]
    assert [r for r in rows if r["method"] == "vmean"] != [r for r in first if r["method"] == "vmean"]


def test_an_interrupted_run_keeps_the_lengths_that_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "records.jsonl"
    options = Bench(**{**TINY, "modes": ("forward",)}, records=file)

    def interrupt(self: object, detail: str, done: float) -> None:
        if detail.startswith("n = 64"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("skeinformer.lab.progress.Filling.step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_bench(options, console())
    first = read(file)
    assert [r["n"] for r in first] == [32] * 4
    run_bench(options, console())
    rows = read(file)
    assert rows[:4] == first
    assert [r["n"] for r in rows] == [32] * 4 + [64] * 4


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    screen = console()
    options = {**TINY, "methods": ("vmean",), "modes": ("forward",)}
    run_bench(Bench(**options, max_seconds=1e-9, records=tmp_path / "records.jsonl"), screen)
    assert "Left out: V-mean at n = 64, forward: a call would take about" in written(screen)


def test_threads_are_recorded_and_restored(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    options = {**TINY, "lengths": (32,), "methods": ("vmean",), "modes": ("forward",), "threads": 2}
    run_bench(Bench(**options, records=tmp_path / "records.jsonl"), console())
    assert torch.get_num_threads() == before
    assert {r["threads"] for r in read(tmp_path / "records.jsonl")} == {2}


def test_steps(tmp_path: Path) -> None:
    file, screen = tmp_path / "records.jsonl", console()
    run_bench(Bench(**{**TINY, "lengths": (32,)}, step=True, records=file), screen)
    assert [(r["kind"], r["method"]) for r in read(file)] == [
        ("bench_step", method) for method in ("softmax", "skeinformer", "skeinformer", "vmean")
    ]
    assert "Standard / its time" in written(screen)


@pytest.mark.peers
def test_peers(tmp_path: Path) -> None:
    pytest.importorskip("linformer")
    file, screen = tmp_path / "records.jsonl", console()
    run_bench(Bench(**{**TINY, "methods": ("linformer",)}, peers=True, records=file), screen)
    assert [(r["kind"], r["n"], r["method"]) for r in read(file)] == [("bench_peer", n, "linformer") for n in (32, 64)]
    assert "peer / ours" in written(screen)


def test_growth_rows_are_per_example() -> None:
    common: Record = {"kind": "bench", "mode": "forward", "heads": 1}
    rows: list[Record] = [
        {**common, "method": "x", "label": "X", "n": n, "batch": batch, "seconds": seconds, "ratio": ratio}
        for n, batch, seconds, ratio in ((4096, 1, 16.0, 2.0), (1024, 4, 4.0, 0.5), (256, 4, 1.0, 0.1))
    ]
    slow: Record = {**common, "method": "y", "label": "Y", "n": 1024, "batch": 4, "seconds": 9.0, "ratio": 0.2}
    fast: Record = {**slow, "method": "z", "label": "Z", "ratio": 3.0}
    alone: Record = {**slow, "method": "sdpa", "label": "SDPA", "ratio": 1.0}
    assert list(growth_rows([*rows, slow, fast, alone])) == [
        ("forward", "X", "from n = 2,048", "2.00"),
        ("forward", "Y", "not at n = 1,024", ""),
        ("forward", "Z", "at n = 1,024", ""),
        ("forward", "SDPA", "", ""),
    ]


WIDE: Record = {
    **{"n": 1048576, "n_each": 131072, "batch": 4, "mode": "forward", "processes": 1024, "heads": 2, "budget": 256},
    **{"seconds": 0.000123, "peer_seconds": 0.000123, "peak_bytes": 1023 * 2**20, "peer_peak_bytes": 1023 * 2**20},
    **{"ratio": 0.0123, "ratio_q25": 0.0123, "ratio_q75": 0.0123, "peak_fraction": 0.999, "seconds_per_token": 1.23e-7},
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_tables_fit_80_columns_and_break_no_word_or_number(kind: str) -> None:
    specs = [*METHODS, "skeinformer:num_pilots=32", *(f"sketched:sketch={name}" for name in SKETCHES)]
    labels = [parse(spec).label for spec in (*specs, "cluster:quality=accurate")]
    peers = ("nystrom-attention", "performer-pytorch", "reformer-pytorch", "linformer", "transformers")
    rows: list[Record] = [
        {"kind": kind, "method": "x", "label": name, "peer": peers[i % len(peers)], **WIDE}
        for i, name in enumerate(labels)
    ]
    screen = Console(file=io.StringIO(), width=80, highlight=False, _environ={})
    for table in tables(rows):
        screen.print(table)
    text = written(screen)
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    shown = text.split()
    for name in labels:
        assert set(name.split()) <= set(shown)
    expected = {word for show in COLUMNS[kind].values() for word in show(rows[0]).split()}
    assert expected - set(labels[0].split()) <= {*shown, *(word.rstrip(",") for word in shown)}


def test_faster_from_needs_a_shorter_length_that_was_slower() -> None:
    assert faster_from([1024, 4096], [0.5, 2.0]) == "from n = 2,048"
    assert faster_from([1024, 4096], [1.5, 2.0]) == "at all n measured"
    assert faster_from([4096], [2.0]) == "at n = 4,096"
    assert faster_from([1024, 4096], [2.0, 0.5]) == "not at n = 4,096"
    assert faster_from([1024], [0.5]) == "not at n = 1,024"
    assert faster_from([256, 1024, 4096], [2.0, 0.5, 2.0]) == "from n = 2,048"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "records.jsonl"
    few = ["--lengths", "32", "--methods", "vmean", "--modes", "forward", "--rounds", "1", "--batch", "1"]
    assert cli.main(["bench", *few, "--records", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"For a page of this: skein report --records {file}"
    assert len(read(file)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "skienformer"], "did you mean 'skeinformer'"),
        (["--methods", "skeinformer:pilots=3"], "did you mean 'num_pilots'"),
        (["--lengths", "0"], "length must be at least 1"),
        (["--budget", "0"], "budget must be at least 1"),
        (["--pilots", "0"], "pilots must be at least 1"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--rounds", "0"], "rounds must be at least 1"),
        (["--peers", "--methods", "vmean"], "vmean"),
        (["--records", "."], "Is a directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_arguments_are_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]
