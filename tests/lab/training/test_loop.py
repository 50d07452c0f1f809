"""A run learns, is divided without a difference, and after a kill goes on to the same numbers."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from studies.soak_kills import without_times

from skeinformer.attention import METHODS
from skeinformer.lab.files import lock_folder, seal, unseal
from skeinformer.lab.lra.listops import ListOpsSettings, generate
from skeinformer.lab.lra.store import SPLITS, TASKS, write_store
from skeinformer.lab.records import Record, read
from skeinformer.lab.training import checkpoint, loop
from skeinformer.lab.training.job import Job, method_of
from skeinformer.lab.training.loop import train
from skeinformer.lab.training.model import Classifier
from skeinformer.lab.training.observer import Observer
from skeinformer.lab.training.recipes import RECIPES, recipe
from skeinformer.lab.training.spent import Spent
from tests.distributed.pool import Pool
from tests.lab.training.tiny import tiny_recipe, write_tiny

ROOT = Path(__file__).parents[3]
LOSSES = {"loss", "valid_loss", "test_loss", "valid_accuracy", "test_accuracy", "test_examples"}


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("stores")
    return {task: write_tiny(folder / task, task) for task in TASKS}


def job(store: Path, out: Path, method: str = "softmax", task: str = "text", **changes: Any) -> Job:
    options = {
        name: changes.pop(name) for name in ("seed", "resume", "micro_batch", "memory_budget") if name in changes
    }
    return Job(tiny_recipe(task, **changes), method_of(method), store, out, **options)


def numbers(records: list[Record]) -> list[Record]:
    """The records without what a clock or a process decides."""
    return [without_times(record) for record in records]


@pytest.mark.parametrize(
    "task", [pytest.param(task, marks=[] if task == "listops" else [pytest.mark.slow]) for task in TASKS]
)
def test_a_task_is_learned_that_a_bag_cannot(stores: dict[str, Path], tmp_path: Path, task: str) -> None:
    longer: dict[str, Any] = {
        "steps": 160,
        "check_every": 40,
        "learning_rate": 5e-3,
        "dropout": 0.0,
        "budget": 16,
        "dim": 32,
    }
    accuracy = {
        method: train(job(stores[task], tmp_path / method, method, task, **longer))["test_accuracy"]
        for method in ("bag_of_tokens", "skeinformer")
    }
    bag, ours = (float(str(accuracy[name])) for name in ("bag_of_tokens", "skeinformer"))
    assert ours > 0.9
    assert bag < ours - 0.15


def test_compilation_is_apart_and_processor_time_is_that_of_all_processes(
    stores: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "spent", lambda *, compiled: nullcontext(Spent(2.0, 3.0, 50.0)))
    monkeypatch.setattr(loop.Run, "sum_of", lambda run, value: 4 * value)  # four processes that take as long
    result = train(job(stores["text"], tmp_path, steps=4, check_every=2))
    checks = [record for record in read(tmp_path / "records.jsonl") if record["kind"] == "lra_check"]
    for record, blocks in ((checks[0], 1), (checks[1], 2), (result, 2)):
        assert [record[name] for name in ("seconds", "cpu_seconds", "compile_seconds")] == [
            blocks * seconds for seconds in (2.0, 12.0, 50.0)
        ]


def test_what_a_run_writes(stores: dict[str, Path], tmp_path: Path) -> None:
    result = train(job(stores["text"], tmp_path, "skeinformer", seed=4))
    *checks, last = read(tmp_path / "records.jsonl")
    assert last == result
    assert [check["step"] for check in checks] == [4, 8, 12]
    assert {"loss", "valid_loss", "valid_accuracy", "tokens_per_second", "peak_bytes", "error_layer_1"} <= set(
        checks[0]
    )
    assert (result["kind"], result["method"], result["seed"], result["budget"]) == ("lra_run", "skeinformer", 4, 8)
    assert (result["steps"], result["stopped"], result["examples_seen"]) == (12, "steps", 12 * 16)
    assert (result["batch"], result["micro_batch"], result["accumulation"]) == (16, 16, 1)
    assert result["test_examples"] == 64  # the whole test set
    assert result["overrides"]
    best = max(checks, key=lambda check: (check["valid_accuracy"], -float(str(check["valid_loss"]))))
    assert (result["best_step"], result["valid_accuracy"]) == (best["step"], best["valid_accuracy"])
    assert {path.name for path in tmp_path.iterdir()} == {"run.json", "records.jsonl", "model", "tensorboard"}
    assert isinstance(Classifier.from_pretrained(tmp_path / "model"), Classifier)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("valid_loss")] == [4, 8, 12]
    (test,) = events.Scalars("test_accuracy")
    assert (test.step, test.value) == (12, pytest.approx(result["test_accuracy"]))
    assert [event.step for event in events.Scalars("test_loss")] == [12]


def test_the_same_seed_gives_the_same_run_and_another_another(stores: dict[str, Path], tmp_path: Path) -> None:
    runs = []
    for number, seed in enumerate((1, 1, 2)):
        train(job(stores["text"], tmp_path / str(number), "skeinformer", seed=seed))
        runs.append(numbers(read(tmp_path / str(number) / "records.jsonl")))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_the_best_weights_are_tested_and_patience_ends_a_run(stores: dict[str, Path], tmp_path: Path) -> None:
    result = train(job(stores["text"], tmp_path, steps=400, check_every=2, patience=3, learning_rate=1e-12, warmup=0))
    checks = [record for record in read(tmp_path / "records.jsonl") if record["kind"] == "lra_check"]
    assert result["stopped"] == "patience"
    assert result["steps"] == int(str(result["best_step"])) + 3 * 2 == checks[-1]["step"]


@pytest.mark.parametrize("task", ["text", "retrieval"])
def test_a_divided_batch_gives_the_same_run(stores: dict[str, Path], tmp_path: Path, task: str) -> None:
    runs = []
    for micro in (16, 5, 1):
        made = job(
            stores[task], tmp_path / str(micro), task=task, micro_batch=micro, dropout=0.0, steps=6, check_every=3
        )
        result = train(made)
        assert (result["micro_batch"], result["accumulation"]) == (micro, -(-16 // micro))
        runs.append([r for r in read(made.out / "records.jsonl") if r["kind"] == "lra_check"])
    for other in runs[1:]:
        for name in ("loss", "valid_loss"):
            left, right = (torch.tensor([check[name] for check in checks]) for checks in (runs[0], other))
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_a_memory_budget_divides_the_batch(stores: dict[str, Path], tmp_path: Path) -> None:
    ample = train(job(stores["text"], tmp_path / "ample", memory_budget=2**30))
    tight = train(job(stores["text"], tmp_path / "tight", memory_budget=400_000))
    assert (ample["micro_batch"], ample["accumulation"]) == (16, 1)
    assert 1 <= int(str(tight["micro_batch"])) < 16
    assert tight["memory_budget"] == 400_000
    with pytest.raises(ValueError, match=r"one example needs .* more than the memory budget"):
        train(job(stores["text"], tmp_path / "none", memory_budget=1000))


class Kill(Observer):
    """Ends the process as `kill -9` does, at a step."""

    def __init__(self, at: int) -> None:
        self.at = at

    def step(self, step: int) -> None:
        if step == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("method", ["skeinformer", "performer"])
def test_after_a_kill_a_run_goes_on_to_the_same_numbers(stores: dict[str, Path], tmp_path: Path, method: str) -> None:
    whole, killed = (job(stores["text"], tmp_path / name, method) for name in ("whole", "killed"))
    expected = train(whole)
    for at in (2, 7, 11):  # before the first checkpoint, and after each of the next
        child = os.fork()
        if child == 0:
            try:
                train(Job(**{**vars(killed), "resume": True}), Kill(at))
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGKILL
    with pytest.raises(ValueError, match="holds an unfinished run; --resume continues it"):
        train(killed)
    result = train(Job(**{**vars(killed), "resume": True}))
    assert numbers([result]) == numbers([expected])
    assert numbers(read(killed.out / "records.jsonl")) == numbers(read(whole.out / "records.jsonl"))
    states = [(path / "model" / "model.safetensors").read_bytes() for path in (whole.out, killed.out)]
    assert states[0] == states[1]


def stopped(store: Path, out: Path) -> Job:
    """A run that was stopped after its first checkpoint, and is to be resumed."""

    class Stop(Observer):
        def step(self, step: int) -> None:
            if step == 5:
                raise KeyboardInterrupt

    made = job(store, out, "vmean", resume=True)
    with pytest.raises(KeyboardInterrupt):
        train(made, Stop())
    assert checkpoint.newest_whole(out) == out / "checkpoint-4"
    return made


def test_a_flipped_bit_is_refused_when_a_run_is_resumed(tmp_path: Path) -> None:
    store = write_tiny(tmp_path / "store", "text")
    made = stopped(store, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoint-4"
    way_out = {**dict.fromkeys(folder.iterdir(), f"; remove the folder {folder} to start this run anew")}
    way_out |= dict.fromkeys(store.iterdir(), ": prepare the data again with skein data")
    for path, message in way_out.items():
        content = path.read_bytes()
        path.write_bytes(content[:-9] + bytes([content[-9] ^ 4]) + content[-8:])
        with pytest.raises(ValueError, match=rf"{path.name} .*{message}"):
            train(made)
        path.write_bytes(content)
    shutil.rmtree(folder)  # as the message says
    assert numbers([train(made)]) == numbers([train(job(store, tmp_path / "other", "vmean"))])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": "4"}, "field 'step' is the text '4', expected a whole number"),
        ({"step": 10**9}, "field 'step' is 1000000000, expected 1 to 12"),
        ({"step": 5}, "field 'step' is 5, which is not that of its folder"),
        ({"micro_batch": 0}, "field 'micro_batch' is 0, expected 1 to 16"),
        ({"records": [{"loss": []}]}, "field 'records', item 0, 'loss' is a list"),
        ({"records": {}}, "field 'records' is an object, expected a list"),
        ({"more": 1}, "has a field 'more', which is not known"),
        (None, "has no object 'progress'"),
    ],
)
def test_progress_that_cannot_be_is_named(
    stores: dict[str, Path], tmp_path: Path, change: dict[str, object] | None, message: str
) -> None:
    made = stopped(stores["text"], tmp_path)
    path = tmp_path / "checkpoint-4" / "state.json"
    state = unseal(path.read_bytes(), path)
    state["progress"] = None if change is None else {**state["progress"], **change}
    path.write_bytes(seal(state))
    with pytest.raises(ValueError, match=rf"state\.json,? {message}.*; remove the folder .* to start this run anew"):
        train(made)


def test_a_list_where_the_run_is_described_is_named(stores: dict[str, Path], tmp_path: Path) -> None:
    made = stopped(stores["text"], tmp_path)
    (tmp_path / "run.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"run\.json holds a JSON list, expected an object; remove the folder"):
        train(made)


def test_a_finished_run_is_not_run_again_and_another_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    result = train(job(stores["text"], tmp_path))
    assert train(job(stores["text"], tmp_path)) == result
    with pytest.raises(ValueError, match="holds a run with batch=16, not 8; give another --out"):
        train(job(stores["text"], tmp_path, batch=8))


def test_a_folder_in_use_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    with lock_folder(tmp_path), pytest.raises(ValueError, match="is in use: another process trains there"):
        train(job(stores["text"], tmp_path))
    train(job(stores["text"], tmp_path))


def test_generated_data_of_another_recipe_is_refused(tmp_path: Path) -> None:
    short = [next(generate(1, seed=seed, settings=ListOpsSettings(min_len=8, max_len=16))) for seed in range(4)]
    facts: dict[str, Any] = {"vocab_size": 15, "num_classes": 10, "sequences": 1, "max_len": 16}
    facts |= {"task": "listops", "source": "generator", "options": {"min_len": 8, "max_depth": 10, "max_args": 10}}
    write_store(tmp_path / "data", dict.fromkeys(SPLITS, short), **facts)
    with pytest.raises(ValueError, match="was generated with min_len=8, the recipe paper has 500: prepare another"):
        train(Job(recipe("paper", "listops"), method_of("vmean"), tmp_path / "data", tmp_path / "run"))


def test_wrong_data_is_refused(stores: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds the task text, not image"):
        train(job(stores["text"], tmp_path, task="image"))
    with pytest.raises(ValueError, match=r"has sequences of 7 tokens, but this recipe reads 5: .* give --max-len 7"):
        train(job(stores["listops"], tmp_path, task="listops", max_len=5))
    with pytest.raises(FileNotFoundError, match="prepare it with skein data"):
        train(job(tmp_path / "nothing", tmp_path))
    train(job(stores["text"], tmp_path / "cut", max_len=6, steps=1, check_every=1))  # text may be cut


@pytest.mark.parametrize("check_every", [1, 4])
def test_a_loss_that_is_not_finite_ends_the_run(stores: dict[str, Path], tmp_path: Path, check_every: int) -> None:
    with pytest.raises(ValueError, match=r"the (training|validation) loss is (nan|inf) at step .*; lower the learning"):
        train(job(stores["text"], tmp_path, learning_rate=1e30, check_every=check_every))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x == "cpu" else [pytest.mark.slow]) for x in RECIPES])
def test_every_method_takes_a_step_in_every_recipe(
    stores: dict[str, Path], tmp_path: Path, name: str, method: str
) -> None:
    task = TASKS[(list(METHODS).index(method) + list(RECIPES).index(name)) % len(TASKS)]
    made = recipe(name, task, max_len=16, batch=2, steps=1, check_every=1, valid_examples=2, test_examples=2)
    result = train(Job(made, method_of(method), stores[task], tmp_path, micro_batch=1))
    assert result["accumulation"] == 2


def test_a_sequence_divided_between_two_processes_trains_as_on_one(stores: dict[str, Path], tmp_path: Path) -> None:
    """With dropout and noise, which are drawn alike; `test_several_processes_equal_one` starts torchrun itself."""
    pool = Pool(tmp_path, 2)
    try:
        one = job(stores["text"], tmp_path / "one", "cluster", steps=4, check_every=2, budget=8, dropout=0.1)
        both = replace(one, out=tmp_path / "both", sequence_parallel=2)
        pool.start("trained", 2, both, of="models")
        train(one)
        for result in pool.results(2):
            assert result is None, result
    finally:
        pool.stop()
    alone, divided = (read(x.out / "records.jsonl") for x in (one, both))
    assert [x["step"] for x in alone[:-1]] == [2, 4]
    assert (divided[-1]["processes"], divided[-1]["sequence_parallel"]) == (2, 2)
    for left, right in zip(alone, divided, strict=True):
        for name in LOSSES & set(left):
            assert left[name] == pytest.approx(right[name], rel=1e-6)


@pytest.mark.parametrize(
    ("method", "processes", "options"),
    [
        pytest.param("softmax", 2, "--dropout 0", marks=pytest.mark.slow),
        pytest.param("vmean", 2, "--dropout 0", marks=pytest.mark.slow),  # leaves parameters without a gradient
        # each sequence divided: also what is drawn is the same
        pytest.param("cluster", 2, "--budget 8 --sequence-parallel 2", marks=pytest.mark.slow),
        # and the batch too: what is drawn is then another
        pytest.param("vmean", 4, "--dropout 0 --sequence-parallel 2", marks=pytest.mark.slow),
    ],
)
def test_several_processes_equal_one(
    stores: dict[str, Path], tmp_path: Path, method: str, processes: int, options: str
) -> None:
    common = f"--task text --method {method} --max-len 16 --steps 6 --check-every 2 --batch 16 --dim 16"
    common += f" --micro-batch 3 --threads 1 --data {stores['text']}"
    torchrun = f"torch.distributed.run --nproc-per-node {processes} --master-port {free_port()} -m"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    alone = options.partition(" --sequence-parallel")[0]
    degree = 1 if alone == options else 2
    records = []
    for count, launcher, given in ((1, "", alone), (processes, torchrun, options)):
        out = tmp_path / str(count)
        command = [sys.executable, "-m", *f"{launcher} skeinformer train {common} {given} --out {out}".split()]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=200)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("test accuracy") == 1  # one process speaks for all
        records.append(read(out / "records.jsonl"))
    # each of them has at least what one had at its first check, its imports
    assert int(str(records[1][-1]["peak_bytes"])) > 0.75 * processes * int(str(records[0][0]["peak_bytes"]))
    rows = processes // degree
    for found, expected in zip(records, ((1, 1, 6), (processes, degree, -(-16 // rows // 3))), strict=True):
        assert tuple(found[-1][name] for name in ("processes", "sequence_parallel", "accumulation")) == expected
    for left, right in zip(*records, strict=True):
        for name in LOSSES & set(left):
            assert left[name] == pytest.approx(right[name], rel=1e-4)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
