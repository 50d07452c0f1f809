"""`python -m lra run`: what has a result is skipped, what fails is recorded, and an interrupt ends all processes."""

import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import lra.run
from lra.__main__ import main, read_options
from lra.job import job_of
from lra.options import Run, Train, default_methods
from lra.run import ProcessPool, has_result, named, run_all, sigterm_as_interrupt, train_arguments, trainings
from lra.train import train
from skeinformer.attention import METHODS
from skeinformer.cli.records import read
from tests.lra.tiny import write_tiny

ROOT = Path(__file__).parents[2]
SMALL: dict[str, Any] = {"steps": 2, "check_every": 1, "batch": 4, "dim": 8, "max_len": 16, "threads": 1}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    for task in ("text", "image"):
        write_tiny(folder / task, task, sizes={"train": 16, "valid": 4, "test": 4})
    return folder


def start_in_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let runs be trained by this process, which has all modules; return the command lines."""
    commands: list[list[str]] = []

    class Started:
        def __init__(self, command: list[str], stdout: Any, **_: Any) -> None:
            commands.append(command)
            try:
                options = read_options(command[3:])
                train(job_of(options))
                self.status = 0
            except ValueError as error:
                stdout.write(f"lra: {error}\n".encode())
                self.status = 2

        def wait(self) -> int:
            return self.status

        def terminate(self) -> None: ...

    monkeypatch.setattr(lra.run, "subprocess", SimpleNamespace(Popen=Started, STDOUT=None))
    return commands


def test_what_is_done_is_skipped_and_what_failed_is_tried_again(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = start_in_process(monkeypatch)
    methods = ("vmean", "linformer:budget=3")
    options = Run(tasks=("text", "image"), methods=methods, data=data, out=tmp_path / "a", **SMALL)
    failing = replace(options, learning_rate=1e30)
    path, complete = run_all(failing, Console(quiet=True))
    kinds = [record["kind"] for record in read(path)]
    assert (complete, len(commands), "lra_failure" in kinds) == (False, 6, True)
    (reason,) = {r["error"].partition(" is ")[0] for r in read(path) if r["kind"] == "lra_failure"} - {""}
    assert reason.endswith("loss")
    path, complete = run_all(options, Console(quiet=True))
    assert (complete, len(commands)) == (True, 12)
    assert run_all(options, Console(quiet=True))[1]
    assert len(commands) == 12
    # of another folder: known results are gathered and not run again
    other = replace(options, out=tmp_path / "b", known=(path,), seeds=(0, 1), tasks=("text",), baseline=False)
    path, complete = run_all(other, Console(quiet=True))
    assert (complete, len(commands)) == (True, 14)
    results = [
        (r["task"], r["seed"]) for r in read(path) if r["kind"] == "lra_run" and not r["overrides"].count("1e+30")
    ]
    assert sorted(results) == [("image", 0)] * 2 + [("text", 0)] * 2 + [("text", 1)] * 2


def test_a_result_of_other_numbers_or_data_is_not_the_same(data: Path, tmp_path: Path) -> None:
    options = Train(task="text", method="cluster", data=data, out=tmp_path / "run", **SMALL)
    record = train(job_of(options))
    elsewhere = replace(options, out=tmp_path / "elsewhere")
    assert has_result(job_of(elsewhere), [record])
    for change in ({"data_sha256": "0"}, {"batch": 8}, {"budget": 7}, {"precision": "bfloat16"}, {"kind": "lra_check"}):
        assert not has_result(job_of(elsewhere), [{**record, **change}])
    assert has_result(job_of(elsewhere), [{**record, "budget": None}])  # of a method without one


def test_processes_end_when_the_pool_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        wait = "import signal; signal.pause()" if command[-1].endswith("waits") else ""
        started.append(subprocess.Popen([sys.executable, "-c", wait], **options))
        return started[-1]

    monkeypatch.setattr(lra.run, "train_arguments", lambda each: [str(each.out)])
    monkeypatch.setattr(lra.run, "subprocess", SimpleNamespace(Popen=start, STDOUT=None))
    runs = [Train(task="text", out=tmp_path / name) for name in ("waits", "ends", "also waits", "never starts")]
    with closing(ProcessPool(2).run(runs)) as endings:
        ended, status = next(endings)
    assert (ended.out, status) == (tmp_path / "ends", 0)
    assert {process.poll() for process in started} <= {0, -signal.SIGTERM}
    assert not (tmp_path / "never starts").exists()


def test_sigterm_is_an_interrupt() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_the_command_runs_processes_and_generates_data(tmp_path: Path) -> None:
    words = "run --tasks listops --methods vmean --seeds 0 1 --jobs 2 --max-len 70 --steps 2 --check-every 1 --batch 2"
    words += (
        f" --no-baseline --threads 1 --valid-examples 2 --test-examples 2 --data {tmp_path}/data --out {tmp_path}/out"
    )
    command = [sys.executable, "-m", "lra", *words.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"python -m lra report --records {tmp_path}/out/records.jsonl" in done.stdout
    assert {r["seed"] for r in read(tmp_path / "out" / "records.jsonl") if r["kind"] == "lra_run"} == {0, 1}


def test_runs_come_by_seed_and_have_folders_of_their_own(data: Path, tmp_path: Path) -> None:
    options = Run(tasks=("text",), methods=("vmean", "skeinformer:num_pilots=4"), seeds=(0, 1), data=data, **SMALL)
    runs = [named(each, tmp_path) for each in trainings(options)]
    assert [(run.seed, run.method) for run in runs[:3]] == [(0, "bag_of_tokens"), (0, "vmean"), (0, options.methods[1])]
    assert len({run.out for run in runs}) == 6
    for run in runs:
        assert read_options(["train", *train_arguments(run)]) == run
    longer = named(replace(runs[0], dropout=0.123456789, weight_decay=0.1, classifier_dim=9, num_heads=1), tmp_path)
    assert longer.out is not None
    assert len(longer.out.name) <= 200


def test_a_new_method_of_this_library_is_run_without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "cluster_new", replace(METHODS["cluster"], options={"num_pilots": 4}))
    methods = default_methods()
    assert {name for name, row in METHODS.items() if row.in_table_1} | {
        "cluster",
        "cluster_window",
        "cluster_new",
    } == set(methods)
    assert len(methods) == len(set(methods))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train --task txt", "unknown task 'txt'; did you mean 'text'?"),
        ("train --task text --method cluter", "unknown attention 'cluter'; did you mean 'cluster'?"),
        ("train --task text --method cluster:pilots=3", "has no option 'pilots'; did you mean 'num_pilots'?"),
        ("train --task text --method cluster:seed=1", "'seed' in 'cluster:seed=1' is set for all methods"),
        ("train --task text --memory-budget 1GiB --micro-batch 2", "give --micro-batch or --memory-budget, not both"),
        ("train --task text --method informer --sequence-parallel 2", "attention 'informer' takes no group"),
        ("train --task text --method cluster --sequence-parallel 2 --data {data}", "start them by torchrun"),
        ("train --task text --batch 0", "batch must be at least 1, got 0"),
        ("train --task text --data {out}", "there is no store at {out}/text: prepare it with python -m lra data"),
        ("report --records {data}/text/meta.json", "meta.json, line 1: not a record"),
    ],
)
def test_wrong_options_are_one_line(
    words: str, message: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"data": data, "out": tmp_path / "none"}
    assert main(words.format(**places).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lra: ")
    assert message.format(**places) in line
