"""`skein train` end to end, at small sizes."""

import io
import math
import re
from pathlib import Path

import pytest
from rich.console import Console

from skeinformer.attention import METHODS
from skeinformer.lab import cli
from skeinformer.lab.commands.train import Display, run_train
from skeinformer.lab.contender import OFFERED
from skeinformer.lab.records import read
from skeinformer.lab.training.job import job_of
from skeinformer.lab.training.options import Train
from tests.lab.training.tiny import write_tiny

SMALL = {"max_len": 16, "batch": 4, "steps": 4, "check_every": 2, "dim": 16, "valid_examples": 8, "test_examples": 8}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_tiny(folder / "text", "text")
    return folder


def words(**options: object) -> list[str]:
    return [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_the_command_trains_and_prints_the_result(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skeinformer.lab.progress.SECONDS_BETWEEN_LINES", math.inf)
    arguments = [
        "train",
        *words(**SMALL, task="text", method="skeinformer:num_pilots=4", data=data, out=tmp_path / "run"),
    ]
    assert cli.main(arguments) == 0
    output, progress = capsys.readouterr()
    assert "test accuracy" in output
    assert "4, ended by steps" in output
    assert [line.partition(":")[0] for line in progress.splitlines()] == ["step 2", "step 4"]
    assert "attention error 0." in progress
    (result,) = (record for record in read(tmp_path / "run" / "records.jsonl") if record["kind"] == "lra_run")
    assert (result["options"], result["label"]) == ("num_pilots=4", "Skeinformer, 4 pilots")
    assert str(tmp_path) not in str(result)  # a record may be published


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_shown(data: Path, tmp_path: Path, terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=140, highlight=False, _environ={})
    options = Train(task="text", method="vmean", data=data / "text", out=tmp_path, memory_budget="1GiB", **SMALL)  # type: ignore[arg-type]
    run_train(options, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert ("text, V-mean, seed 0" in text) == terminal
    assert "step 2: loss" in text
    assert "memory of 4 examples" in text


def test_where_a_run_is_is_said_during_validation_and_test(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skeinformer.lab.progress.SECONDS_BETWEEN_LINES", 0.0)
    console = Console(file=io.StringIO(), width=80, highlight=False, _environ={})
    run_train(Train(task="text", method="vmean", data=data, out=tmp_path, **SMALL), console)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    for line in ("step 1 of 4: training", "step 2 of 4: validation 4 of 8", "step 4 of 4: test 8 of 8"):
        assert line in lines


def test_a_bar_of_80_columns_shows_where_the_run_is() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False, _environ={})
    with Display(console) as display:
        display.begin("pathfinder, Skeinformer, simple row normalization, seed 0", 100_000, 50_000)
        display.stage("validation", 12_500, 25_000)
        shown = display.bar.make_tasks_table(display.bar.tasks)
        console.print(shown)
    assert isinstance(console.file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue())
    assert "validation 12,500 of 25,000  50000/100000 " in text
    assert "…" not in text.splitlines()[-1]


def test_a_run_in_bfloat16(data: Path, tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        result = run_train(
            Train(task="text", data=data, out=tmp_path, precision="bfloat16", **SMALL),  # type: ignore[arg-type]
            Console(file=io.StringIO()),
        )
        assert result["precision"] == "bfloat16"
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_where_a_run_goes_by_default(data: Path) -> None:
    job = job_of(Train(task="text", method="skeinformer:num_pilots=4,columns=uniform", data=data, seed=3))
    assert job.out == Path("runs/text-skeinformer-columns-uniform-num_pilots-4-3")
    assert job.data == data / "text"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "txt"}, "unknown task 'txt'; did you mean 'text'"),
        ({"method": "skienformer"}, "unknown attention 'skienformer'; did you mean 'skeinformer'"),
        ({"method": "bag_of_token"}, "did you mean 'bag_of_tokens'"),
        ({"method": "bag_of_tokens:budget=3"}, "bag_of_tokens has no options"),
        ({"recipe": "gpu"}, "unknown recipe 'gpu'"),
        ({"data": "nowhere"}, "there is no store at nowhere/text: prepare it with skein data"),
        ({"memory_budget": "lots"}, "a size of memory is a number"),
        ({"memory_budget": "1GiB", "micro_batch": 2}, "give --micro-batch or --memory-budget, not both"),
        ({"sequence_parallel": 0}, "sequence_parallel must be at least 1"),
        ({"sequence_parallel": 2, "method": "softmax"}, "--sequence-parallel 2: attention 'softmax' takes no group"),
        ({"sequence_parallel": 2, "method": "bag_of_tokens"}, "'bag_of_tokens' takes no group"),
        ({"sequence_parallel": 2}, "needs a multiple of 2 processes, and there is 1: start them by torchrun"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"dropout": 1.5}, "dropout must be at least 0 and below 1"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_bad_options_are_named(
    data: Path, tmp_path: Path, options: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert cli.main(["train", *words(**{"task": "text", "data": data, "out": out, **SMALL, **options})]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_only_methods_that_can_be_trained_are_named_as_known(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(OFFERED, "wildcat", OFFERED["vmean"])  # as `skein approx --contenders` does
    for method in ("wildkat", "wildcat"):
        assert cli.main(["train", *words(task="text", data=data, out=tmp_path / "run", method=method)]) == 2
        error = capsys.readouterr().err
        assert f"unknown attention '{method}'" in error
        known = error.partition("Known: ")[2].rstrip(".\n").split(", ")
        assert known == [*METHODS, "bag_of_tokens"]


def test_an_altered_store_is_found_on_request(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    altered = write_tiny(tmp_path / "altered", "text") / "train.tokens.npy"
    altered.write_bytes(altered.read_bytes()[:-1] + b"9")
    arguments = ["train", *words(**SMALL, task="text", data=tmp_path / "altered", out=tmp_path / "run"), "--verify"]
    assert cli.main(arguments) == 2
    assert "train.tokens.npy was altered" in " ".join(capsys.readouterr().err.split())
