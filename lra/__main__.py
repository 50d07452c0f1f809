"""The command line: `python -m lra data | train | run | report`."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from tyro.conf import OmitArgPrefixes, OmitSubcommandPrefixes, subcommand

from lra.data.prepare import Image, ListOps, Pathfinder, Retrieval, Text, prepare_store
from lra.options import Run, Train
from skeinformer.cli.app import guard
from skeinformer.cli.records import read, write_file


@dataclass(frozen=True)
class Data:
    """Prepare the data of a task: one folder that training reads."""

    task: (
        Annotated[ListOps, subcommand("listops")]
        | Annotated[Text, subcommand("text")]
        | Annotated[Retrieval, subcommand("retrieval")]
        | Annotated[Pathfinder, subcommand("pathfinder")]
        | Annotated[Image, subcommand("image")]
    )


@dataclass(frozen=True)
class Report:
    """Write the paper's tables, what of its claims holds, and the figures, from records."""

    records: tuple[Path, ...]
    """Files of records, one JSON object a line."""
    out: Path = Path("lra.md")
    """The Markdown file of the tables."""
    figures: Path | None = None
    """A folder for lra-loss and lra-study as .svg and .png. Default: no figures."""


def prepare(options: Data) -> None:
    print(prepare_store(options.task, Console(highlight=False, stderr=True)))


def train(options: Train) -> None:
    import torch

    from lra.data.store import open_store
    from lra.job import job_of
    from lra.train import train

    if options.threads is not None:
        torch.set_num_threads(options.threads)
    job = job_of(options)
    if options.verify:
        open_store(job.data, verify=True)
    is_main = os.environ.get("RANK", "0") == "0"  # under torchrun only the first process prints
    record = train(job, Console(stderr=True, quiet=not is_main))
    shown = {
        name: record[name] for name in ("test_accuracy", "majority", "steps", "stopped", "micro_batch", "processes")
    }
    line = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in shown.items())
    Console(highlight=False, quiet=not is_main).print(line, soft_wrap=True)


def run(options: Run) -> None:
    from lra.run import run_all

    records, complete = run_all(options, Console(stderr=True))
    print(f"For tables of this: python -m lra report --records {records}")
    if not complete:
        raise SystemExit(1)


def report(options: Report) -> None:
    from lra.figures import write_figures
    from lra.tables import markdown

    records = read(*options.records)
    print(write_file(options.out, markdown(records)))
    for path in [] if options.figures is None else write_figures(records, options.figures):
        print(path)


COMMANDS: dict[type, Callable[[Any], None]] = {Data: prepare, Train: train, Run: run, Report: report}
Command = (
    Annotated[Data, subcommand("data")]
    | Annotated[Train, subcommand("train")]
    | Annotated[Run, subcommand("run")]
    | Annotated[Report, subcommand("report")]
)


def read_options(arguments: Sequence[str] | None) -> Any:
    """Read a command line as one of the keys of COMMANDS; options that do not exist end the process with status 2."""
    return tyro.cli(
        Command,
        prog="python -m lra",
        description="Data, training and tables of the Long Range Arena.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff, OmitSubcommandPrefixes, OmitArgPrefixes),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status: 0 done, 1 runs failed, 2 wrong input, 130 interrupted.

    What a user can correct is one line that begins with `lra:`.
    """

    def work() -> None:
        options = read_options(arguments)
        COMMANDS[type(options)](options)

    return guard(work, "lra")


if __name__ == "__main__":
    sys.exit(main())
