"""`skein lra`: a matrix of real processes that survives failures and goes on."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tyro
from rich.console import Console

from skeinformer.lab import cli
from skeinformer.lab.commands.lra import Cell, Matrix, as_study, make_cell, run_lra, train_arguments, trainings
from skeinformer.lab.records import read
from skeinformer.lab.report.published import PUBLISHED
from skeinformer.lab.training.observer import Place, place_line, read_place, stage_text
from skeinformer.lab.training.options import Lra, Train
from skeinformer.lab.training.recipes import RECIPES, generator_options, recipe
from tests.lab.training.tiny import write_tiny

ROOT = Path(__file__).parents[3]
SMALL: dict[str, Any] = {
    "tasks": ("text",),
    "max_len": 16,
    "batch": 4,
    "steps": 4,
    "check_every": 2,
    "dim": 16,
    "valid_examples": 8,
    "test_examples": 8,
    "threads": 1,
}


@pytest.fixture(scope="module", autouse=True)
def _import_this_package() -> None:
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tiny(tmp_path / "data" / "text", "text")
    return tmp_path / "data"


def screen(terminal: bool = False, width: int = 160) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, _environ={})


def test_cells_run_fail_and_are_skipped(data: Path, tmp_path: Path) -> None:
    console = screen()
    # a width of 16 has no 3 heads: only the cells with attention fail
    options = Lra(**SMALL, methods=("vmean",), num_heads=3, data=data, out=tmp_path / "lra")
    records = read(run_lra(options, console)[0])
    assert [record["kind"] for record in records if record["kind"] != "lra_check"] == ["lra_baseline", "lra_failure"]
    (failure,) = (record for record in records if record["kind"] == "lra_failure")
    assert failure["method"] == "vmean"
    assert "dim=16 is not a multiple of num_heads=3" in str(failure["error"])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "1 of 2 runs failed" in text
    assert "bag_of_tokens" in text

    again = screen()
    records = read(run_lra(Lra(**SMALL, methods=("vmean",), num_heads=3, data=data, out=tmp_path / "lra"), again)[0])
    text = again.file.getvalue()  # type: ignore[attr-defined]
    assert "bag_of_tokens-max_len-16-batch-4-steps-4" in text
    assert text.count(" running") == 1  # what failed is tried again, what is done is not
    assert sum(record["kind"] == "lra_failure" for record in records) == 1


def test_results_of_another_folder_are_not_run_again(data: Path, tmp_path: Path) -> None:
    first = run_lra(Lra(**SMALL, methods=(), data=data, out=tmp_path / "lra"), screen())[0]
    console = screen()
    options = Lra(**SMALL, methods=(), data=data, out=tmp_path / "other", known=(first,))
    path, whole = run_lra(options, console)
    assert whole
    assert "running" not in console.file.getvalue()  # type: ignore[attr-defined]
    assert read(path) == read(first)

    changed = [{**record, "max_steps": 5} for record in read(first)]  # of another recipe
    older = tmp_path / "older.jsonl"
    older.write_text("".join(json.dumps(record) + "\n" for record in changed))
    console = screen()
    path, _ = run_lra(replace(options, known=(older,)), console)
    assert console.file.getvalue().count(" running") == 1  # type: ignore[attr-defined]
    assert [record["max_steps"] for record in read(path) if record["kind"] == "lra_baseline"] == [4]


@pytest.mark.slow  # two runs in processes of their own, twice; test_loop kills and continues a run
def test_a_killed_matrix_goes_on(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "lra"
    options = "--tasks text --methods softmax vmean --no-baseline --max-len 16 --batch 4 --steps 120 --check-every 5"
    options += f" --dim 16 --valid-examples 8 --test-examples 8 --threads 1 --jobs 2 --data {data} --out {out}"
    command = [sys.executable, "-m", "skeinformer", "lra", *options.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        while process.poll() is None and len(list(out.glob("*/checkpoint-*"))) < 2:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (out / "records.jsonl").exists()
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "skein report --records" in done.stdout
    results = [record for record in read(out / "records.jsonl") if record["kind"] == "lra_run"]
    assert {record["method"] for record in results} == {"softmax", "vmean"}
    logs = [path.read_text() for path in out.glob("*/log.txt")]
    assert any("goes on from step" in log for log in logs)


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGTERM, 130, id="terminated"),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, id="killed", marks=pytest.mark.slow),  # test_children is the core
    ],
)
def test_the_runs_end_with_the_command(data: Path, tmp_path: Path, number: signal.Signals, status: int) -> None:
    out = tmp_path / "lra"
    options = "--tasks text --methods vmean --no-baseline --max-len 16 --batch 4 --steps 100000 --patience 100000"
    options += f" --check-every 5 --threads 1 --data {data} --out {out}"  # a run that would not end by itself
    command = [sys.executable, "-m", "skeinformer", "lra", *options.split()]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        while process.poll() is None and not list(out.glob("*/checkpoint-*")):
            time.sleep(0.05)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)  # waits for the runs too where they hold the pipe
    assert process.returncode == status, error
    for _ in range(600):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return  # nobody is left
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail("a run goes on without the command that started it")


def test_missing_data_is_named_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lra", "--tasks", "text", "--data", str(tmp_path), "--out", str(tmp_path / "lra")]) == 2
    assert "text: prepare it with skein data" in capsys.readouterr().err
    assert not (tmp_path / "lra").exists()


def test_what_can_be_generated_is(tmp_path: Path) -> None:
    options = Lra(
        **{**SMALL, "tasks": ("listops",), "max_len": 256}, methods=(), data=tmp_path / "data", out=tmp_path / "lra"
    )
    small: dict[str, Any] = {"min_len": 8, "max_len": 16, "train": 20, "valid": 5, "test": 5}
    before = RECIPES["cpu"]["listops"]
    RECIPES["cpu"]["listops"] = replace(before, data=small)
    try:
        run_lra(options, screen(terminal=True))
    finally:
        RECIPES["cpu"]["listops"] = before
    meta = json.loads((tmp_path / "data" / "listops" / "meta.json").read_text())
    assert (meta["source"], meta["max_len"], meta["splits"]) == ("generator", 16, {"train": 20, "valid": 5, "test": 5})


def test_the_command_line_of_a_run_is_read_as_the_same_run(tmp_path: Path) -> None:
    asked = Lra(
        methods=("skeinformer",), tasks=("text",), baseline=False, bucket=True, dropout=0.0, memory_budget="1GiB"
    )
    (train,) = trainings(asked)
    for made in (train, replace(train, bucket=False, compile=True, resume=False, out=tmp_path)):
        assert tyro.cli(Train, args=train_arguments(made)) == made


def test_another_budget_is_another_run_and_long_names_are_cut(tmp_path: Path) -> None:
    asked = Lra(methods=("skeinformer",), tasks=("text",), baseline=False, data=tmp_path)
    changes = [{}, {"memory_budget": "1GiB"}, {"precision": "bfloat16"}, {"steps": 3}]
    cells = [make_cell(train, tmp_path) for change in changes for train in trainings(replace(asked, **change))]
    assert len({cell.folder for cell in cells}) == len(changes)
    every = dict.fromkeys(("max_len", "budget", "batch", "steps", "warmup", "check_every", "patience", "dim"), 7)
    every |= dict.fromkeys(("valid_examples", "test_examples", "num_heads", "feedforward_dim", "classifier_dim"), 7)
    (train,) = trainings(replace(asked, **every))
    assert len(make_cell(train, tmp_path).folder.name) <= 200


def test_at_80_columns_no_accuracy_is_cut(tmp_path: Path) -> None:
    names = "softmax_dropout", "skeinformer_simple_norm", "skeinformer_no_reuse"
    cells = [
        make_cell(train, tmp_path) for train in trainings(Lra(methods=names, tasks=("pathfinder",), baseline=False))
    ]
    cells[0].state, cells[0].place, cells[0].accuracy = "done", Place("done", "4,000"), "0.933 test"
    cells[1].state, cells[1].place = "running", Place("validation", "12,500 of 25,000")
    cells[1].accuracy = "0.501 valid"
    cells[2].state, cells[2].detail = "failed", "the training loss is nan at step 1,200; lower the learning rate"
    console = screen(terminal=True, width=80)
    console.print(Matrix(cells).table(80))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    for word in ("0.933 test", "0.501 valid", "12,500 of 25,000", "4,000"):
        assert word in text
    joined = "".join(line[43:].rstrip() for line in text.splitlines())  # names go on in the next line
    assert all(cell.title in joined for cell in cells)


def test_the_place_of_a_run_is_read_from_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("a warning\nstep 1,320 of 4,000: training\nstep 1,3")
    assert read_place(log) == Place("training", "1,320 of 4,000")
    log.write_text(place_line(1500, 1500, stage_text("test", 96, 25_000)) + "\n")
    assert read_place(log) == Place("test", "96 of 25,000")
    log.write_text("step 150: loss 2.2780, validation 2.2963, accuracy 0.1660; 3 s, 2,000 tokens/s\n")
    assert read_place(log) == Place("training", "150")
    log.write_text("")
    assert read_place(log) is None


def test_shorter_expressions_are_generated_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = "--min-len 64 --train 8 --valid 4 --test 4 --workers 1"
    data, out = tmp_path / "data", tmp_path / "run"
    assert cli.main(["data", "listops", "--max-len", "200", *small.split(), "--out", str(data / "listops")]) == 0
    train_arguments = f"train --task listops --method vmean --steps 1 --batch 2 --data {data} --out {out}".split()
    assert cli.main([*train_arguments, "--max-len", "200"]) == 0
    capsys.readouterr()
    assert cli.main(train_arguments) == 2
    assert "was generated with max_len=200, the recipe cpu has 256" in (error := capsys.readouterr().err)
    assert "give --max-len 200" in error
    shorter, chosen = recipe("cpu", "listops", max_len=200), recipe("cpu", "listops")
    assert generator_options(shorter) == {**generator_options(chosen), "max_len": 200}
    assert generator_options(recipe("cpu", "listops", max_len=300)) == generator_options(chosen) == chosen.data


def test_the_default_is_table_1_and_the_cluster_sketch() -> None:
    assert {*Lra().methods} == {*PUBLISHED, "cluster"}
    assert len(Lra().methods) == 17
    assert Lra().methods[0] == "softmax"


def test_the_study_is_one_command() -> None:
    chosen = recipe("cpu", "text")
    runs = list(trainings(as_study(Lra(study=True, seeds=(0, 1)))))
    assert {(run.task, run.method) for run in runs} == {("text", "skeinformer")}
    assert len({(run.batch, run.learning_rate, run.seed) for run in runs}) == len(runs) == 18
    folders = [make_cell(run, Path("lra")).folder.name for run in runs]
    assert "cpu-text-skeinformer-seed0" in folders  # the recipe's own run is not run again
    assert f"cpu-text-skeinformer-batch-{2 * chosen.batch}-seed0" in folders
    one = list(trainings(as_study(Lra(study=True, batches=(4,), learning_rates=(1e-3,)))))
    assert [(run.batch, run.learning_rate) for run in one] == [(4, 1e-3)]
    with pytest.raises(ValueError, match="--study is of Skeinformer on Text; leave out --tasks and --methods"):
        run_lra(Lra(study=True, tasks=("image",)), screen())


def test_a_study_has_a_run_for_each_batch_and_rate() -> None:
    options = Lra(
        tasks=("text",), methods=("skeinformer",), batches=(64, 128), learning_rates=(1e-3, 1e-4), baseline=False
    )
    assert [(train.batch, train.learning_rate) for train in trainings(options)] == [
        (64, 1e-3),
        (64, 1e-4),
        (128, 1e-3),
        (128, 1e-4),
    ]


def test_the_table_fits_80_columns_and_breaks_names_only_behind_hyphens() -> None:
    long = "cpu-text-skeinformer_simple_norm-num_pilots-32-batch-16-learning_rate-0.0001-max_steps-100000-seed0"
    train = Train(task="text")
    cells = [
        Cell(train, Path(long), "running", "", Place("validation", "100,000 of 100,000"), "0.123 valid"),
        Cell(train, Path("cpu-listops-cluster-seed0"), "done", "", Place("done", "100,000"), "0.456 test"),
        Cell(train, Path(long), "failed", "killed by signal 9; the system does this when memory runs out"),
    ]
    screen = Console(file=io.StringIO(), width=80, highlight=False, _environ={})
    screen.print(Matrix(cells).table(80))
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    column = lines[0].index("run")
    names = [line[column:].strip() for line in lines[1:]]
    assert "".join(names[: names.index("cpu-listops-cluster-seed0")]) == long
    parts = {part for name in (long, "cpu-listops-cluster-seed0") for part in re.split(r"(?<=-)", name)}
    assert all(set(re.split(r"(?<=-)", name)) - {""} <= parts for name in names if "-" in name and " " not in name)
    assert "killed by signal 9; the system does this when memory runs out" in " ".join(names)
    assert "100,000 of 100,000" in lines[1]
