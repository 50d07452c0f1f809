"""`skein lra`: a matrix of real processes that survives failures and goes on."""

import io
import json
import os
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
from skeinformer.lab.commands.lra import arguments, make_cell, run_lra, trainings
from skeinformer.lab.records import read
from skeinformer.lab.training.options import Lra, Train
from skeinformer.lab.training.recipes import RECIPES
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


def screen(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=160, highlight=False, _environ={})


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


def test_a_request_to_end_ends_the_runs_too(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "lra"
    options = (
        f"--tasks text --methods vmean --no-baseline --max-len 16 --batch 4 --steps 100000 --data {data} --out {out}"
    )
    command = [sys.executable, "-m", "skeinformer", "lra", *options.split(), "--check-every", "5", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, start_new_session=True) as process:
        while process.poll() is None and not list(out.glob("*/checkpoint-*")):
            time.sleep(0.05)
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)  # nobody is left


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
        assert tyro.cli(Train, args=arguments(made)) == made


def test_another_budget_is_another_run_and_long_names_are_cut(tmp_path: Path) -> None:
    asked = Lra(methods=("skeinformer",), tasks=("text",), baseline=False, data=tmp_path)
    changes = [{}, {"memory_budget": "1GiB"}, {"precision": "bfloat16"}, {"steps": 3}]
    cells = [make_cell(train, tmp_path) for change in changes for train in trainings(replace(asked, **change))]
    assert len({cell.folder for cell in cells}) == len(changes)
    every = dict.fromkeys(("max_len", "budget", "batch", "steps", "warmup", "check_every", "patience", "dim"), 7)
    every |= dict.fromkeys(("valid_examples", "test_examples", "num_heads", "feedforward_dim", "classifier_dim"), 7)
    (train,) = trainings(replace(asked, **every))
    assert len(make_cell(train, tmp_path).folder.name) <= 200


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
