"""`skein train`: one run of a recipe, from a store of `skein data`."""

import os

from rich.console import Console
from rich.progress import TaskID
from rich.table import Table

from skeinformer.checks import check_count
from skeinformer.lab.lra.store import open_store
from skeinformer.lab.progress import Lines, bars, say
from skeinformer.lab.records import Record
from skeinformer.lab.threads import use_threads
from skeinformer.lab.training.children import end_with_parent
from skeinformer.lab.training.job import job_of
from skeinformer.lab.training.memory import keep_freed_memory
from skeinformer.lab.training.observer import Observer, place_line, stage_text
from skeinformer.lab.training.options import Train

__all__ = ["Train", "command", "run_train"]


def command(options: Train) -> None:
    """Train, and print the result."""
    end_with_parent()
    keep_freed_memory()
    print_result(run_train(options))


def run_train(options: Train, console: Console | None = None) -> Record:
    """Train, show the progress, and return the record of the result."""
    from skeinformer.lab.training.loop import train

    use_threads(options.threads)
    check_count("seed", options.seed, 0)
    job = job_of(options)
    if job.out.exists() and not job.out.is_dir():
        raise ValueError(f"{job.out} is a file; give the name of a folder with --out")
    if options.verify:
        open_store(job.data, verify=True)
    console = console or Console(stderr=True, highlight=False, quiet=not is_main_process())
    with Display(console) as display:
        return train(job, display)


class Display(Observer):
    """A bar in a terminal, else now and then a line that says where the run is; and a line for each check."""

    def __init__(self, console: Console) -> None:
        self.console = console
        columns = ("stage", "count", "remaining", "short bar", "title")
        self.bar = bars(console, *columns, disable=not console.is_terminal)
        self.task: TaskID | None = None
        self.steps = self.done = 0
        self.lines = Lines(console)

    def __enter__(self) -> "Display":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def begin(self, title: str, steps: int, done: int) -> None:
        self.steps, self.done, self.lines = steps, done, Lines(self.console)
        self.task = self.bar.add_task(title, total=steps, completed=done, stage="")
        if done:
            say(self.console, f"{title}: goes on from step {done:,}")

    def step(self, step: int) -> None:
        self.done = step
        self.show("training")

    def stage(self, text: str, done: int = 0, total: int = 0) -> None:
        if self.task is None:
            self.console.print(stage_text(text, done, total), markup=False)
        else:
            self.show(stage_text(text, done, total))

    def show(self, stage: str) -> None:
        """What is under way: in the bar, or in a line if the last one was some time ago."""
        if self.console.is_terminal:
            assert self.task is not None
            self.bar.update(self.task, completed=self.done, stage=stage)
        else:
            self.lines.say(place_line(self.done, self.steps, stage))

    def check(self, record: Record) -> None:
        say(self.console, check_line(record))


def check_line(record: Record) -> str:
    """A check in one line."""
    errors = [f"{value:.2f}" for name, value in record.items() if name.startswith("error_layer_")]
    error = f", attention error {' '.join(errors)}" if errors else ""
    return (
        f"step {record['step']:,}: loss {record['loss']:.4f}, validation {record['valid_loss']:.4f},"
        f" accuracy {record['valid_accuracy']:.4f}{error}; {record['seconds']:.0f} s,"
        f" {record['tokens_per_second']:,.0f} tokens/s"
    )


def is_main_process() -> bool:
    """Under torchrun only the first process speaks."""
    return os.environ.get("RANK", "0") == "0"


def divided_text(record: Record) -> str:
    """Of a run whose sequences are divided."""
    degree = record.get("sequence_parallel", 1)
    return f", each sequence divided among {degree}" if degree != 1 else ""


def print_result(record: Record) -> None:
    """Print a run's result, a row for each number that a reader asks for."""
    if not is_main_process():
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rows = {
        "test accuracy": f"{record['test_accuracy']:.4f} on {record['test_examples']:,} examples",
        "most frequent label": f"{record['majority']:.4f}",
        "validation accuracy": f"{record['valid_accuracy']:.4f} at step {record['best_step']:,}",
        "steps": f"{record['steps']:,}, ended by {record['stopped']}",
        "batch": f"{record['batch']}, in micro-batches of {record['micro_batch']}",
        "processes": f"{record['processes']}{divided_text(record)}",
        "training": f"{record['seconds']:.0f} s, {record['seconds_per_thousand_steps']:.0f} s per thousand steps",
    }
    if record.get("compile_seconds"):
        rows["compilation"] = f"{record['compile_seconds']:.0f} s, beside the training"
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False).print(table)
