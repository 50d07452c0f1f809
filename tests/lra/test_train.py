"""A run learns, is divided without a difference, and after a kill continues to the same bits."""

import io
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

from lra import checkpoint
from lra.data.listops import ListOpsSettings, generate
from lra.data.store import SPLITS, TASKS, write_store
from lra.files import exclusive
from lra.job import Job, parse_method
from lra.memory import largest_micro_batch, parse_bytes
from lra.model import Classifier
from lra.recipes import RECIPES, get_recipe, learning_rate
from lra.records import Record
from lra.timing import timed
from lra.train import train
from skeinformer.attention import METHODS
from skeinformer.cli.records import read
from tests.distributed.pool import Pool
from tests.lra.tiny import tiny_recipe, write_tiny

ROOT = Path(__file__).parents[2]
# what a clock, a process or the checkout decides
TIMES = {"seconds", "cpu_seconds", "seconds_total", "seconds_per_thousand_steps", "tokens_per_second", "peak_bytes"}
TIMES |= {"compile_seconds", "started", "command", "threads", "commit"}
LOSSES = {"loss", "valid_loss", "test_loss", "valid_accuracy", "test_accuracy", "test_examples"}


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    return {task: write_tiny(folder / task, task) for task in TASKS}


def job(store: Path, out: Path, method: str = "softmax", task: str = "text", **changes: Any) -> Job:
    names = ("seed", "resume", "micro_batch", "memory_budget", "precision", "compile")
    options = {name: changes.pop(name) for name in names if name in changes}
    return Job(tiny_recipe(task, **changes), parse_method(method), store, out, **options)


def numbers(records: list[Record]) -> list[Record]:
    return [{name: value for name, value in record.items() if name not in TIMES} for record in records]


def learned(stores: dict[str, Path], out: Path, task: str) -> dict[str, float]:
    longer: dict[str, Any] = {"steps": 160, "check_every": 40, "learning_rate": 5e-3, "dropout": 0.0, "budget": 16}
    return {
        method: train(job(stores[task], out / method, method, task, **longer, dim=32))["test_accuracy"]
        for method in ("bag_of_tokens", "skeinformer")
    }


@pytest.mark.parametrize("task", [TASKS[0], *(pytest.param(task, marks=pytest.mark.slow) for task in TASKS[1:])])
def test_a_task_is_learned_that_a_bag_of_tokens_cannot_learn(
    stores: dict[str, Path], tmp_path: Path, task: str
) -> None:
    accuracy = learned(stores, tmp_path, task)
    assert accuracy["skeinformer"] > max(0.9, accuracy["bag_of_tokens"] + 0.15)


def test_what_a_run_writes(stores: dict[str, Path], tmp_path: Path) -> None:
    result = train(job(stores["text"], tmp_path, "skeinformer", seed=4))
    *checks, last = read(tmp_path / "records.jsonl")
    assert last == result
    assert [check["step"] for check in checks] == [4, 8, 12]
    assert {"loss", "valid_loss", "tokens_per_second", "peak_bytes", "error_layer_1"} <= set(checks[0])
    assert (result["kind"], result["method"], result["seed"], result["budget"]) == ("lra_run", "skeinformer", 4, 8)
    assert (result["steps"], result["stopped"], result["examples_seen"]) == (12, "steps", 12 * 16)
    assert (result["batch"], result["micro_batch"], result["accumulation"]) == (16, 16, 1)
    assert result["overrides"]
    best = max(checks, key=lambda check: (check["valid_accuracy"], -check["valid_loss"]))
    assert (result["best_step"], result["valid_accuracy"]) == (best["step"], best["valid_accuracy"])
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "records.jsonl", "model", "tensorboard"}
    model = Classifier.from_pretrained(tmp_path / "model")
    assert (model.config.method, model.training) == ("skeinformer", False)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("valid_loss")] == [4, 8, 12]


def test_the_same_seed_gives_the_same_run_and_another_seed_another(stores: dict[str, Path], tmp_path: Path) -> None:
    runs = []
    for number, seed in enumerate((1, 1, 2)):
        train(job(stores["text"], tmp_path / str(number), "skeinformer", seed=seed))
        runs.append(numbers(read(tmp_path / str(number) / "records.jsonl")))
    assert runs[0] == runs[1] != runs[2]


def test_patience_ends_a_run(stores: dict[str, Path], tmp_path: Path) -> None:
    result = train(job(stores["text"], tmp_path, steps=400, check_every=2, patience=3, learning_rate=1e-12, warmup=0))
    assert (result["stopped"], result["steps"]) == ("patience", result["best_step"] + 3 * 2)


@pytest.mark.parametrize("task", ["text", "retrieval"])
def test_a_divided_batch_gives_the_same_run(stores: dict[str, Path], tmp_path: Path, task: str) -> None:
    runs = []
    for micro in (16, 5, 1):
        out = tmp_path / str(micro)
        result = train(job(stores[task], out, task=task, micro_batch=micro, dropout=0.0, steps=6, check_every=3))
        assert (result["micro_batch"], result["accumulation"]) == (micro, -(-16 // micro))
        runs.append([[check["loss"], check["valid_loss"]] for check in read(out / "records.jsonl")[:-1]])
    for other in runs[1:]:
        torch.testing.assert_close(other, runs[0], rtol=1e-4, atol=1e-5)


def test_a_memory_budget_divides_the_batch(stores: dict[str, Path], tmp_path: Path) -> None:
    ample = train(job(stores["text"], tmp_path / "ample", memory_budget=2**30))
    tight = train(job(stores["text"], tmp_path / "tight", memory_budget=400_000))
    assert (ample["micro_batch"], ample["accumulation"]) == (16, 1)
    assert 1 <= tight["micro_batch"] < 16
    with pytest.raises(ValueError, match=r"one example needs .* more than the memory budget"):
        train(job(stores["text"], tmp_path / "none", memory_budget=1000))


def test_the_largest_micro_batch_is_found() -> None:
    for budget in range(110, 1200, 30):
        assert largest_micro_batch(lambda examples: 10 * examples, 100, budget, 100) == min(100, (budget - 100) // 10)
    assert [parse_bytes(text) for text in ("16GiB", "1.5 kB", "7")] == [16 * 2**30, 1500, 7]
    with pytest.raises(ValueError, match="a size of memory is a number with one of"):
        parse_bytes("16 apples")


def kill_at(step: int) -> Callable[[int], None]:
    """As `kill -9`."""
    return lambda now: os.kill(os.getpid(), signal.SIGKILL) if now == step else None


@pytest.mark.parametrize("method", ["skeinformer", "performer"])
def test_after_kills_a_run_continues_to_the_same_bits(stores: dict[str, Path], tmp_path: Path, method: str) -> None:
    complete, killed = (job(stores["text"], tmp_path / name, method, resume=True) for name in ("complete", "killed"))
    expected = train(complete)
    for step in (2, 7, 11):  # before the first checkpoint, and after each of the next
        child = os.fork()
        if child == 0:
            try:
                train(killed, on_step=kill_at(step))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
    with pytest.raises(ValueError, match="holds an unfinished run; --resume continues it"):
        train(Job(**{**vars(killed), "resume": False}))
    assert numbers([train(killed)]) == numbers([expected])
    assert numbers(read(killed.out / "records.jsonl")) == numbers(read(complete.out / "records.jsonl"))
    weights = [(path / "model" / "model.safetensors").read_bytes() for path in (complete.out, killed.out)]
    assert weights[0] == weights[1]


def stopped(store: Path, out: Path) -> Job:
    """Start a run and stop it after its first checkpoint."""

    def stop(step: int) -> None:
        if step == 5:
            raise KeyboardInterrupt

    stopping = job(store, out, "vmean", resume=True)
    with pytest.raises(KeyboardInterrupt):
        train(stopping, on_step=stop)
    return stopping


def test_damaged_files_of_a_stopped_run_are_named(tmp_path: Path) -> None:
    store = write_tiny(tmp_path / "store", "text")
    stopping = stopped(store, tmp_path / "run")
    path = tmp_path / "run" / checkpoint.FILE
    content = path.read_bytes()
    for bad, message in ((content[:1000], "cannot be read"), (b"text", "cannot be read")):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=rf"{checkpoint.FILE} {message} .*; remove it to start this run"):
            train(stopping)
    torch.save({"progress": {}, "random": [], "weights": print}, path)  # a pickle that names a function
    with pytest.raises(ValueError, match=rf"{checkpoint.FILE} cannot be read"):
        train(stopping)
    saved = torch.load(io.BytesIO(content), weights_only=True)
    for change, message in (({"random": []}, "was written by 0 processes"), ({"weights": {}}, "does not fit this run")):
        torch.save({**saved, **change}, path)
        with pytest.raises(ValueError, match=rf"{checkpoint.FILE} {message}"):
            train(stopping)
    path.write_bytes(content)
    (tmp_path / "run" / "run.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"run\.json cannot be read .*; remove .* to start this run from step 0"):
        train(stopping)
    (tmp_path / "run" / "run.json").unlink()
    tokens = store / "train.tokens.npy"
    tokens.write_bytes(tokens.read_bytes()[:-1] + b"\xff")
    with pytest.raises(ValueError, match=r"train\.tokens\.npy was altered"):
        train(stopping)


def test_a_finished_run_is_not_run_again_and_another_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    result = train(job(stores["text"], tmp_path))
    assert train(job(stores["text"], tmp_path)) == result
    with pytest.raises(ValueError, match="holds a run with batch=16, not 8; give another --out"):
        train(job(stores["text"], tmp_path, batch=8))


def test_a_folder_in_use_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    with exclusive(tmp_path), pytest.raises(ValueError, match="is in use: another process trains there"):
        train(job(stores["text"], tmp_path))


def test_wrong_data_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds the task text, not image"):
        train(job(stores["text"], tmp_path, task="image"))
    with pytest.raises(ValueError, match=r"has sequences of 7 tokens, but this recipe reads 5: .* give --max-len 7"):
        train(job(stores["listops"], tmp_path, task="listops", max_len=5))
    with pytest.raises(FileNotFoundError, match="prepare it with python -m lra data"):
        train(job(tmp_path / "nothing", tmp_path))
    train(job(stores["text"], tmp_path / "cut", max_len=6, steps=1, check_every=1))  # text may be cut
    short = [next(generate(1, seed=seed, settings=ListOpsSettings(min_len=8, max_len=16))) for seed in range(4)]
    facts: dict[str, Any] = {"vocab_size": 15, "num_classes": 10, "sequences": 1, "max_len": 16}
    facts |= {"task": "listops", "source": "generator", "options": {"min_len": 8, "max_depth": 10, "max_args": 10}}
    write_store(tmp_path / "data", dict.fromkeys(SPLITS, short), **facts)
    with pytest.raises(ValueError, match="was generated with min_len=8, the recipe paper has 500: prepare another"):
        train(Job(get_recipe("paper", "listops"), parse_method("vmean"), tmp_path / "data", tmp_path / "run"))


@pytest.mark.parametrize("check_every", [1, 4])
def test_a_loss_that_is_not_finite_ends_the_run(stores: dict[str, Path], tmp_path: Path, check_every: int) -> None:
    with pytest.raises(ValueError, match=r"the (training|validation) loss is (nan|inf) at step .*; lower the learning"):
        train(job(stores["text"], tmp_path, learning_rate=1e30, check_every=check_every))


@pytest.mark.parametrize("method", METHODS)
def test_every_method_takes_a_step(stores: dict[str, Path], tmp_path: Path, method: str) -> None:
    task = TASKS[list(METHODS).index(method) % len(TASKS)]
    for name in RECIPES:
        recipe = get_recipe(name, task, max_len=16, batch=2, steps=1, check_every=1, valid_examples=2, test_examples=2)
        result = train(Job(recipe, parse_method(method), stores[task], tmp_path / name, micro_batch=1))
        assert result["accumulation"] == 2


def test_mixed_precision_and_compilation(stores: dict[str, Path], tmp_path: Path) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)  # else it keeps the precision of other tests
    try:
        result = train(job(stores["text"], tmp_path / "mixed", precision="bfloat16", steps=2, check_every=1))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
    assert result["precision"] == "bfloat16"
    with timed(compiled=True) as spent:
        torch.compile(lambda x: x + 1, backend="eager", fullgraph=True)(torch.ones(2))
    assert spent.compile_seconds > 0
    assert spent.seconds >= 0


def test_the_learning_rate_rises_and_falls() -> None:
    recipe = tiny_recipe("text", learning_rate=1.0, warmup=4, steps=20)
    rates = [learning_rate(recipe, step) for step in range(20)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(before > after for before, after in pairwise(rates[4:]))
    assert learning_rate(recipe, 20) == 0
    with pytest.raises(ValueError, match="learning_rate must be above 0"):
        tiny_recipe("text", learning_rate=0.0)


def test_a_sequence_divided_between_two_processes_trains_as_in_one(stores: dict[str, Path], tmp_path: Path) -> None:
    """With dropout and noise, which are drawn alike."""
    pool = Pool(tmp_path, 2)
    try:
        one = job(stores["text"], tmp_path / "one", "cluster", steps=4, check_every=2, micro_batch=3)
        both = Job(**{**vars(one), "out": tmp_path / "both", "sequence_parallel": 2})
        pool.start("trained", 2, both, of="models")
        train(one)
        assert pool.results(2) == [None, None]
    finally:
        pool.stop()
    records = [read(run.out / "records.jsonl") for run in (one, both)]
    assert (records[1][-1]["processes"], records[1][-1]["sequence_parallel"]) == (2, 2)
    for left, right in zip(*records, strict=True):
        for name in LOSSES & set(left):
            assert left[name] == pytest.approx(right[name], rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "processes", "options"),
    [
        # each sequence divided: also what is drawn is the same
        ("cluster", 2, "--budget 8 --sequence-parallel 2"),
        # the batch divided; V-mean leaves parameters without a gradient
        ("vmean", 2, "--dropout 0"),
        # both: what is drawn is then different
        ("vmean", 4, "--dropout 0 --sequence-parallel 2"),
    ],
)
def test_several_processes_equal_one(
    stores: dict[str, Path], tmp_path: Path, method: str, processes: int, options: str
) -> None:
    common = f"--task text --method {method} --max-len 16 --steps 4 --check-every 2 --batch 16 --dim 16"
    common += f" --micro-batch 3 --threads 1 --data {stores['text']}"
    torchrun = f"torch.distributed.run --nproc-per-node {processes} --master-port {free_port()} -m"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    one = options.partition(" --sequence-parallel")[0]
    degree = 1 if one == options else 2
    records = []
    for count, launcher, given in ((1, "", one), (processes, torchrun, options)):
        out = tmp_path / str(count)
        command = [sys.executable, "-m", *f"{launcher} lra train {common} {given} --out {out}".split()]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=200)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("test accuracy") == 1  # one process speaks for all
        records.append(read(out / "records.jsonl"))
    groups = processes // degree
    for run, expected in zip(records, ((1, 1, 6), (processes, degree, -(-16 // groups // 3))), strict=True):
        assert tuple(run[-1][name] for name in ("processes", "sequence_parallel", "accumulation")) == expected
    for left, right in zip(*records, strict=True):
        for name in LOSSES & set(left):
            assert left[name] == pytest.approx(right[name], rel=1e-4)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
