"""`skein lra`: the runs of tasks x methods x seeds, each in a process of its own, and their records in one file.

What is done is skipped, what was stopped goes on from its checkpoint, and a run that fails is recorded while the others
go on. So the same command, called again, finishes what an earlier one left.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skeinformer.checks import check_count
from skeinformer.lab.console import hyphenated
from skeinformer.lab.files import write_whole
from skeinformer.lab.lra.listops import ListOpsSettings
from skeinformer.lab.lra.prepare import ListOps, Pathfinder, prepare_store
from skeinformer.lab.lra.snakes import PathfinderSettings
from skeinformer.lab.lra.store import META, TASKS, open_store
from skeinformer.lab.progress import redrawn
from skeinformer.lab.records import RUN_KEYS, Record, Value, append, key_of, read, read_known
from skeinformer.lab.training.children import start_child
from skeinformer.lab.training.job import (
    BAG_OF_TOKENS,
    ENDS,
    RECORDS,
    Job,
    job_of,
    recipe_of,
    result_of,
    run_fields,
    store_of,
    tokens_checksum,
)
from skeinformer.lab.training.observer import Place, read_place
from skeinformer.lab.training.options import Lra, Overrides, Train, table_1_methods
from skeinformer.lab.training.recipes import generator_options

# the tasks that `skein data` can generate: its options, and those of the generator
GENERATED: dict[str, tuple[Any, Any]] = {
    "listops": (ListOps, ListOpsSettings),
    "pathfinder": (Pathfinder, PathfinderSettings),
}
POLL_SECONDS = 0.5
FAILURE, LOG = "failure.jsonl", "log.txt"
STUDIED_BATCHES, STUDIED_RATES = (0.5, 1, 2), (0.25, 1, 4)  # times the recipe's: nine runs, of which one is its own
NOWHERE = Place("", "")
LEAST = 24  # letters in a line of a name, at least
LONGEST_NAME = 180  # of a cell's folder; file systems end at 255
# what a result of another folder must agree in beside the names of its run: its fields, and those of the recipe
ALIKE = {"n": "max_len", "batch": "batch", "learning_rate": "learning_rate", "max_steps": "steps"}


@dataclass
class Cell:
    """One run of the matrix and what is known of it."""

    train: Train
    folder: Path
    state: str = "waiting"
    detail: str = ""
    """Of a cell that has ended: its result in words, or why it failed."""
    place: Place = NOWHERE
    accuracy: str = ""
    process: "subprocess.Popen[bytes] | None" = None
    log: IO[bytes] | None = None

    @property
    def title(self) -> str:
        return self.folder.name


@dataclass
class Matrix:
    """All cells, in the order in which they run."""

    cells: list[Cell] = field(default_factory=list)

    def table(self, width: int) -> Table:
        """A row for each cell that has begun. Names that do not fit go on in the next line, behind a hyphen."""
        table = Table(box=None, padding=(0, 2, 0, 0))
        titles = ("state", "done", "accuracy")
        for title in titles:
            table.add_column(title, no_wrap=True, justify="right" if title == "done" else "left")
        table.add_column("run", overflow="fold")
        rows = []
        for cell in [cell for cell in self.cells if cell.state != "waiting"][-30:]:
            state = cell.place.stage if cell.state == "running" and cell.place.stage else cell.state
            rows.append((cell, (state, cell.place.done, cell.accuracy)))
        wide = [max(len(text) for text in column) for column in zip(titles, *(cells for _, cells in rows), strict=True)]
        left = max(LEAST, width - sum(wide) - 2 * (len(wide) + 1))
        for cell, cells in rows:
            name = hyphenated(cell.title, left)
            name += "\n" + textwrap.fill(cell.detail, left, break_on_hyphens=False) if cell.state == "failed" else ""
            table.add_row(*map(Text, (*cells, name)))
        counts = {state: sum(cell.state == state for cell in self.cells) for state in ("done", "failed", "waiting")}
        table.caption = ", ".join(f"{count} {state}" for state, count in counts.items())
        return table


def command(options: Lra) -> None:
    """Run, say what to do next, and end with status 1 where a run has no result."""
    path, whole = run_lra(options)
    print(f"For a page of this: skein report --records {path}", flush=True)
    if not whole:
        raise SystemExit(1)


def run_lra(options: Lra, console: Console | None = None) -> tuple[Path, bool]:
    """Run all cells; return the file of their records, and whether all of them have a result."""
    console = console or Console(stderr=True, highlight=False)
    check_count("jobs", options.jobs)
    options = as_study(options) if options.study else options
    matrix = Matrix([make_cell(train, options.out) for train in trainings(options)])
    prepare_data(options, console)
    known = read(options.known)
    for cell in matrix.cells:
        find_result(cell, known)
    with show(matrix, console) as refresh, stopped_like_by_keyboard():
        try:
            while any(cell.state in ("waiting", "running") for cell in matrix.cells):
                start_some(matrix, options.jobs)
                for cell in matrix.cells:
                    if cell.state == "running" and look(cell):
                        gather_records(options.out, known)
                refresh()
                time.sleep(POLL_SECONDS)
        finally:
            stop_all(matrix)
    path = gather_records(options.out, known)
    failed = [cell.title for cell in matrix.cells if cell.state == "failed"]
    if failed:
        console.print(f"{len(failed)} of {len(matrix.cells)} runs failed:", markup=False)
        for title in failed:
            console.print(hyphenated(title, console.width - 2), markup=False, soft_wrap=True)
    return path, not failed


def as_study(options: Lra) -> Lra:
    """Skeinformer on Text: batches and learning rates around the recipe's, where none are given."""
    if (options.tasks, options.methods) != (TASKS, table_1_methods()):
        raise ValueError("--study is of Skeinformer on Text; leave out --tasks and --methods")
    chosen = recipe_of(options, options.recipe, "text")
    batches = options.batches or tuple(max(1, round(factor * chosen.batch)) for factor in STUDIED_BATCHES)
    rates = options.learning_rates or tuple(float(f"{factor * chosen.learning_rate:.6g}") for factor in STUDIED_RATES)
    alone = {"tasks": ("text",), "methods": ("skeinformer",), "baseline": False}
    return replace(options, **alone, batches=batches, learning_rates=rates)  # type: ignore[arg-type]


def trainings(options: Lra) -> Iterator[Train]:
    """The options of every run: a seed of all methods before the next seed."""
    common = {field.name: getattr(options, field.name) for field in fields(Overrides)}
    common |= {name: getattr(options, name) for name in ("recipe", "data", "threads", "memory_budget", "precision")}
    methods = (*([BAG_OF_TOKENS] if options.baseline else []), *options.methods)
    sizes, rates = options.batches or (options.batch,), options.learning_rates or (options.learning_rate,)
    for seed, task, method, batch, rate in itertools.product(options.seeds, options.tasks, methods, sizes, rates):
        studied = {"batch": batch, "learning_rate": rate}
        yield Train(**{**common, **studied, "task": task, "method": method, "seed": seed, "resume": True})


def make_cell(train: Train, out: Path) -> Cell:
    """A cell with its folder; an option that is wrong is a ValueError here, before anything runs."""
    known = run_fields(job_of(train))
    parts = [str(known[name]) for name in ("recipe", "task", "method", "options", "overrides")]
    parts += [train.memory_budget or "", "" if train.precision == "float32" else train.precision]
    name = "-".join(part for part in (*parts, f"seed{train.seed}") if part)
    name = "".join(c if c.isalnum() or c in "-._" else "-" for c in name.replace(", ", "-"))
    if len(name) > LONGEST_NAME:
        name = f"{name[:LONGEST_NAME]}-{blake2b(name.encode(), digest_size=6).hexdigest()}"
    folder = out / name
    return Cell(replace(train, out=folder), folder)


def prepare_data(options: Lra, console: Console) -> None:
    """Check that there is a store for each task; generate those that can be."""
    for task in options.tasks:
        recipe = recipe_of(options, options.recipe, task)
        folder = store_of(options.data, task)
        if task in GENERATED and not (folder / META).is_file():
            generate(task, folder, generator_options(recipe), console)
        open_store(folder)


def generate(task: str, folder: Path, options: Mapping[str, Value], console: Console) -> None:
    """Write the store of a task by our own generator, as the recipe says."""
    kind, settings = GENERATED[task]
    known = {field.name for field in fields(settings)}
    made = settings(**{name: value for name, value in options.items() if name in known})
    rest = {name: value for name, value in options.items() if name not in known}
    console.print(f"generating {task}", markup=False)
    prepare_store(kind(out=folder, settings=made, **rest), console)


def start_some(matrix: Matrix, jobs: int) -> None:
    """Start waiting cells until `jobs` of them run."""
    running = sum(cell.state == "running" for cell in matrix.cells)
    for cell in matrix.cells:
        if running >= jobs:
            return
        if cell.state == "waiting":
            start(cell)
            running += 1


def start(cell: Cell) -> None:
    cell.folder.mkdir(parents=True, exist_ok=True)
    (cell.folder / FAILURE).unlink(missing_ok=True)
    environment = dict(os.environ)
    if cell.train.threads is not None:
        environment["OMP_NUM_THREADS"] = str(cell.train.threads)
    cell.log = (cell.folder / LOG).open("wb")
    command = [sys.executable, "-m", "skeinformer", "train", *train_arguments(cell.train)]
    cell.process = start_child(command, cell.log, environment)
    cell.state, cell.detail = "running", ""


def train_arguments(train: Train) -> list[str]:
    """The command line that `skein train` reads as `train`."""
    words = []
    for option in fields(Train):
        value = getattr(train, option.name)
        name = "--" + option.name.replace("_", "-")
        if isinstance(value, bool) and option.default is not None:  # a flag
            words += [name] if value else []
        elif value is not None:
            words += [name, str(value)]
    return words


def look(cell: Cell) -> bool:
    """See how a running cell is getting on; True when it has ended."""
    assert cell.process is not None
    status = cell.process.poll()
    if status is None:
        checks = [record for record in read_known(cell.folder / RECORDS) if record["kind"] == "lra_check"]
        if checks:
            cell.accuracy = f"{checks[-1]['valid_accuracy']:.3f} valid"
        cell.place = read_place(cell.folder / LOG) or cell.place
        return False
    close(cell)
    if status == 0:
        find_result(cell)
    if cell.state != "done":
        record_failure(cell, status)
    return True


def record_failure(cell: Cell, status: int) -> None:
    """Record a cell that ended without a result, with the last line that it wrote."""
    lines = (cell.folder / LOG).read_text(errors="replace").splitlines()
    said = [line.strip("│ ") for line in lines if any(map(str.isalpha, line))]
    if status < 0:
        reason = f"killed by signal {-status}; the system does this when memory runs out" if status == -9 else ""
        reason = reason or f"ended by signal {-status}"
    else:
        reason = said[-1].removeprefix("skein: ") if said else f"exit status {status} without a message"
    cell.state, cell.detail = "failed", reason
    record: Record = {"kind": "lra_failure", **run_fields(job_of(cell.train)), "error": cell.detail}
    append(cell.folder / FAILURE, record)


def find_result(cell: Cell, known: Sequence[Record] = ()) -> None:
    """Mark a cell as done if its folder, or what is known, holds a result of the same settings and data."""
    job = job_of(cell.train)
    result = result_of(job) or next((record for record in known if is_result_of(record, job)), None)
    if result is not None:
        cell.state = "done"
        cell.place, cell.accuracy = Place("done", f"{result['steps']:,}"), f"{result['test_accuracy']:.3f} test"
        cell.detail = f"test accuracy {result['test_accuracy']:.3f} after {result['steps']:,} steps"


def is_result_of(record: Record, job: Job) -> bool:
    """Whether a record of another folder is the result of this job: the same run, recipe and training data."""
    now = {**run_fields(job), **{name: getattr(job.recipe, field) for name, field in ALIKE.items()}}
    now |= {"precision": job.precision, "data_sha256": tokens_checksum(open_store(job.data))}
    sized_alike = record.get("budget") in (None, job.recipe.budget)  # None: the method has none, or an option sets it
    return record["kind"] in ENDS and sized_alike and all(record.get(name) == value for name, value in now.items())


def gather_records(out: Path, known: Sequence[Record] = ()) -> Path:
    """All records of all cells in `out`, and before them what is known of other runs, in one file."""
    files: Sequence[Path] = sorted([*out.glob(f"*/{RECORDS}"), *out.glob(f"*/{FAILURE}")])
    found = read(files)
    mine = {key_of(record, RUN_KEYS) for record in found if record["kind"] in ENDS}
    others = [record for record in known if key_of(record, RUN_KEYS) not in mine]
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in (*others, *found)]
    return write_whole("".join(lines), out / RECORDS)


def stop_all(matrix: Matrix) -> None:
    """End the processes that still run; their checkpoints stay."""
    for cell in matrix.cells:
        if cell.process is not None and cell.process.poll() is None:
            cell.process.terminate()
    for cell in matrix.cells:
        if cell.process is not None:
            cell.process.wait()
        close(cell)


@contextmanager
def stopped_like_by_keyboard() -> Iterator[None]:
    """A request to end (SIGTERM) ends the runs too, as Ctrl-C does; else they would go on alone."""
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


def close(cell: Cell) -> None:
    """Of a cell whose process has ended."""
    if cell.process is not None and cell.process.stdin is not None:
        cell.process.stdin.close()
    if cell.log is not None:
        cell.log.close()
        cell.log = None


@contextmanager
def show(matrix: Matrix, console: Console) -> Iterator[Callable[[], None]]:
    """A table that is kept up to date in a terminal, else a line when a cell starts or ends."""
    if console.is_terminal:
        with redrawn(console, lambda: matrix.table(console.width)) as redraw:
            yield redraw
    else:
        said: dict[str, str] = {}

        def refresh() -> None:
            for cell in matrix.cells:
                if cell.state != "waiting" and said.get(cell.title) != cell.state:
                    said[cell.title] = cell.state
                    detail = f": {cell.detail}" if cell.detail else ""
                    console.print(f"{cell.title} {cell.state}{detail}", markup=False, soft_wrap=True)

        yield refresh
        refresh()
