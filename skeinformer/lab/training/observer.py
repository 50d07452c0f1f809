"""What is told of a run while it goes on, and the line in which a run without a terminal says where it is."""

import re
from pathlib import Path
from typing import NamedTuple

from skeinformer.lab.records import Record

CHECK = re.compile(r"step ([\d,]+): loss .*")
LINE = re.compile(r"step ([\d,]+ of [\d,]+): (\w+)(?: ([\d,]+ of [\d,]+))?")
TAIL = 4096  # bytes of a log in which its last line is looked for


class Observer:
    """What is told of a run while it goes on; this one does nothing."""

    def begin(self, title: str, steps: int, done: int) -> None: ...
    def step(self, step: int) -> None: ...

    def stage(self, text: str, done: int = 0, total: int = 0) -> None:
        """What is under way beside training; with `total`, how many of its examples are done."""

    def check(self, record: Record) -> None: ...


class Place(NamedTuple):
    """Where a run is: "training" and "320 of 1,500" steps, or "test" and "96 of 2,000" examples."""

    stage: str
    done: str


def stage_text(text: str, done: int, total: int) -> str:
    """A stage, and how many of its examples are done."""
    return f"{text} {done:,} of {total:,}" if total else text


def place_line(step: int, steps: int, stage: str) -> str:
    """The line that `read_place` understands."""
    return f"step {step:,} of {steps:,}: {stage}"


def read_place(log: Path) -> Place | None:
    """Where the run is that writes this log, if the last whole line says so; after a check it trains."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    last = whole[-1].strip() if whole else ""
    if match := LINE.fullmatch(last):
        return Place(match[2], match[3] or match[1])
    match = CHECK.fullmatch(last)
    return None if match is None else Place("training", match[1])
