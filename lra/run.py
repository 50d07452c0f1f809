"""The runs of tasks x methods x seeds, each `python -m lra train --resume` in a process of its own.

What has a result is skipped, what was stopped continues from its checkpoint, and a run that fails is recorded while
the others go on. So the same command, called again, finishes what an earlier one left.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rich.console import Console

from lra.data.listops import ListOpsSettings
from lra.data.prepare import ListOps, Pathfinder, prepare_store
from lra.data.snakes import PathfinderSettings
from lra.data.store import META, TASKS, open_store
from lra.job import BAG_OF_TOKENS, RECORDS, Job, data_checksum, job_of, recipe_of, result_of, run_fields, store_folder
from lra.options import Common, Run, Train, default_methods
from lra.recipes import Recipe, generator_options
from lra.records import RESULT_KINDS, RUN_KEYS, Record
from skeinformer.checks import check_count
from skeinformer.cli.progress import progress_bar
from skeinformer.cli.records import append, key_of, read, to_line, write_file

# the tasks that can be generated: the options of `python -m lra data`, and those of the generator
GENERATED: dict[str, tuple[Any, Any]] = {
    "listops": (ListOps, ListOpsSettings),
    "pathfinder": (Pathfinder, PathfinderSettings),
}
FAILURE, LOG = "failure.jsonl", "log.txt"
STUDIED_BATCHES, STUDIED_RATES = (0.5, 1, 2), (0.25, 1, 4)  # times the recipe's: nine runs, of which one is its own
LONGEST_NAME = 180  # of a run's folder; file systems end at 255
# what a result of another folder must agree in besides the fields of its run: its fields, and those of the recipe
SAME = {"n": "max_len", "batch": "batch", "learning_rate": "learning_rate", "max_steps": "steps"}
# glibc then keeps freed tensors of up to 32 MiB for the next step, which else faults in every page again
MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}


def run_all(options: Run, console: Console) -> tuple[Path, bool]:
    """Run all that has no result yet; return the file of all records, and whether every run has a result."""
    check_count("jobs", options.jobs)
    options = as_study(options) if options.study else options
    runs = [named(train, options.out) for train in trainings(options)]
    prepare_data(options, console)
    known = read(*options.known)
    waiting = [train for train in runs if not has_result(job_of(train), known)]
    failed = 0
    with (
        progress_bar(console) as bar,
        sigterm_as_interrupt(),
        closing(ProcessPool(options.jobs).run(waiting)) as endings,  # ends all processes, whatever happens
    ):
        task = bar.add_task("runs", total=len(runs), completed=len(runs) - len(waiting))
        for train, status in endings:
            result = result_of(job_of(train)) if status == 0 else None
            if result is None:
                failed += 1
                outcome = f"failed: {record_failure(train, status)}"
            else:
                outcome = f"test accuracy {result['test_accuracy']:.3f} after {result['steps']:,} steps"
            console.print(f"{folder_of(train).name}: {outcome}", markup=False, highlight=False, soft_wrap=True)
            bar.advance(task)
            gather_records(options.out, known)
    if failed:
        console.print(f"{failed} of {len(runs)} runs failed; their {LOG} says why", highlight=False)
    return gather_records(options.out, known), not failed


class ProcessPool:
    """Runs trainings in processes of their own, some at a time, and ends all of them when it is interrupted."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.processes: set[subprocess.Popen[bytes]] = set()
        self.lock, self.stopped = threading.Lock(), False

    def run(self, trainings: Sequence[Train]) -> Generator[tuple[Train, int], None, None]:
        """Yield each training with its exit status as it ends."""
        with ThreadPoolExecutor(self.jobs) as threads:
            futures = {threads.submit(self._run_one, train): train for train in trainings}
            try:
                for future in as_completed(futures):
                    yield futures[future], future.result()
            finally:  # also where the caller stops early
                with self.lock:
                    self.stopped = True
                    for process in self.processes:
                        process.terminate()
                threads.shutdown(cancel_futures=True)

    def _run_one(self, train: Train) -> int:
        folder = folder_of(train)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FAILURE).unlink(missing_ok=True)
        environment = {**MALLOC, **os.environ}
        if train.threads is not None:
            environment["OMP_NUM_THREADS"] = str(train.threads)
        command = [sys.executable, "-m", "lra", "train", *train_arguments(train)]
        with (folder / LOG).open("wb") as log:
            with self.lock:
                if self.stopped:
                    return -signal.SIGTERM
                process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                self.processes.add(process)
            status = process.wait()
        with self.lock:
            self.processes.discard(process)
        return status


def as_study(options: Run) -> Run:
    """Return the options for Skeinformer on Text: batches and learning rates around the recipe's."""
    if (options.tasks, options.methods) != (TASKS, default_methods()):
        raise ValueError("--study is of Skeinformer on Text; leave out --tasks and --methods")
    recipe = recipe_of(options, options.recipe, "text")
    batches = options.batches or tuple(max(1, round(factor * recipe.batch)) for factor in STUDIED_BATCHES)
    rates = options.learning_rates or tuple(float(f"{factor * recipe.learning_rate:.6g}") for factor in STUDIED_RATES)
    return replace(
        options, tasks=("text",), methods=("skeinformer",), baseline=False, batches=batches, learning_rates=rates
    )


def trainings(options: Run) -> Iterator[Train]:
    """Yield the options of every run: a seed of all methods before the next seed."""
    common = {field.name: getattr(options, field.name) for field in fields(Common)}
    methods = (*([BAG_OF_TOKENS.method] if options.baseline else []), *options.methods)
    sizes, rates = options.batches or (options.batch,), options.learning_rates or (options.learning_rate,)
    for seed, task, method, batch, rate in itertools.product(options.seeds, options.tasks, methods, sizes, rates):
        studied = {"batch": batch, "learning_rate": rate}
        yield Train(**{**common, **studied, "task": task, "method": method, "seed": seed, "resume": True})


def named(train: Train, out: Path) -> Train:
    """Return the options with a folder in `out`; an option that is wrong is a ValueError here, before anything runs."""
    run = run_fields(job_of(train))
    parts = [str(run[name]) for name in ("recipe", "task", "method", "options", "overrides")]
    parts += [train.memory_budget or "", "" if train.precision == "float32" else train.precision]
    name = "-".join(part for part in (*parts, f"seed{train.seed}") if part)
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in name.replace(", ", "-"))
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{blake2b(name.encode(), digest_size=6).hexdigest()}"
    return replace(train, out=out / name)


def folder_of(train: Train) -> Path:
    assert train.out is not None
    return train.out


def prepare_data(options: Run, console: Console) -> None:
    """Check that there is a store for each task; generate those that can be."""
    for task in options.tasks:
        recipe = recipe_of(options, options.recipe, task)
        folder = store_folder(options.data, task)
        if task in GENERATED and not (folder / META).is_file():
            console.print(f"generating {task}")
            generate(recipe, folder, console)
        open_store(folder)


def generate(recipe: Recipe, folder: Path, console: Console) -> None:
    """Write the store of a task by our own generator, as the recipe says."""
    kind, settings_kind = GENERATED[recipe.task]
    options = generator_options(recipe)
    names = {field.name for field in fields(settings_kind)}
    settings = settings_kind(**{name: value for name, value in options.items() if name in names})
    sizes = {name: value for name, value in options.items() if name not in names}
    prepare_store(kind(out=folder, settings=settings, **sizes), console)


def train_arguments(train: Train) -> list[str]:
    """Return the command line that `python -m lra train` reads as `train`."""
    words = []
    for option in fields(Train):
        value = getattr(train, option.name)
        name = "--" + option.name.replace("_", "-")
        if isinstance(value, bool) and option.default is not None:  # a flag
            words += [name] if value else []
        elif value is not None:
            words += [name, str(value)]
    return words


def has_result(job: Job, known: Sequence[Record]) -> bool:
    """Return whether the job's folder, or one of the known records, has a result of the same settings and data."""
    if result_of(job) is not None:
        return True
    wanted = {**run_fields(job), **{name: getattr(job.recipe, field) for name, field in SAME.items()}}
    wanted |= {"precision": job.precision, "data_sha256": data_checksum(open_store(job.data))}
    return any(
        record.get("kind") in RESULT_KINDS
        # no budget: the method has none, or an option sets it
        and record.get("budget") in (None, job.recipe.budget)
        and all(record.get(name) == value for name, value in wanted.items())
        for record in known
    )


def record_failure(train: Train, status: int) -> str:
    """Record a run that ended without a result, and return the reason: the last line that it wrote, or the signal."""
    folder = folder_of(train)
    lines = (folder / LOG).read_text(errors="replace").splitlines()
    written = [line.strip("│ ") for line in lines if any(map(str.isalpha, line))]
    if status < 0:
        reason = f"ended by signal {-status}" + ("; the system does this when memory runs out" if status == -9 else "")
    else:
        reason = written[-1].removeprefix("lra: ") if written else f"exit status {status} without a message"
    append(folder / FAILURE, {"kind": "lra_failure", **run_fields(job_of(train)), "error": reason})
    return reason


def gather_records(out: Path, known: Sequence[Record] = ()) -> Path:
    """Write all records of all runs in `out`, and before them those of other runs, into one file."""
    own = read(*sorted([*out.glob(f"*/{RECORDS}"), *out.glob(f"*/{FAILURE}")]))
    finished = {key_of(record, RUN_KEYS) for record in own if record["kind"] in RESULT_KINDS}
    others = [record for record in known if key_of(record, RUN_KEYS) not in finished]
    return write_file(out / RECORDS, "".join(map(to_line, (*others, *own))))


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Let a request to end (SIGTERM) end the runs too, as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
