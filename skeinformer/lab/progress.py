"""How a long run shows what is under way: the one place that makes progress bars and displays that change.

In a terminal bars, a line or tables that are drawn anew; elsewhere lines.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from skeinformer.lab.records import Record
from skeinformer.lab.work import OnStep

SECONDS_BETWEEN_LINES = 10.0  # where there is no terminal
COLUMNS: dict[str, Callable[[], ProgressColumn]] = {
    # a narrow terminal breaks the title, and nothing else
    "title": lambda: TextColumn("{task.description}", markup=False, table_column=Column(overflow="fold")),
    "stage": lambda: TextColumn("{task.fields[stage]}", markup=False),
    "bar": BarColumn,
    "short bar": lambda: BarColumn(bar_width=12),
    "share": TaskProgressColumn,
    "count": MofNCompleteColumn,
    "elapsed": TimeElapsedColumn,
    "remaining": TimeRemainingColumn,
}
T = TypeVar("T")


def bars(console: Console, *columns: str, **options: Any) -> Progress:
    """Bars with these of COLUMNS."""
    return Progress(*(COLUMNS[name]() for name in columns), console=console, **options)


def say(console: Console, text: str) -> None:
    """Print a line as it is."""
    console.print(text, markup=False, soft_wrap=True)


class Lines:
    """Now and then a line, where there is no terminal."""

    def __init__(self, console: Console, *, at_once: bool = False) -> None:
        self.console = console
        self.said = -math.inf if at_once else time.monotonic()

    def say(self, text: str, *, anyway: bool = False) -> None:
        """Print it if the last line was some time ago, or anyway."""
        if anyway or time.monotonic() >= self.said + SECONDS_BETWEEN_LINES:
            self.said = time.monotonic()
            say(self.console, text)


@contextmanager
def status(console: Console, *, lines: bool = True) -> Iterator[Callable[[str], None]]:
    """A function that shows what is under way: in a terminal on a line that changes, elsewhere on a new one each.

    lines: whether there are any elsewhere.
    """
    if not console.is_terminal:
        yield lambda detail: say(console, detail) if lines else None
        return
    with console.status("") as shown:
        yield lambda detail: shown.update(Text(detail))


@contextmanager
def redrawn(console: Console, draw: Callable[[], RenderableType]) -> Iterator[Callable[[], None]]:
    """A function that draws anew, in a terminal; what was drawn last stays."""
    with Live(draw(), console=console, refresh_per_second=4) as live:
        yield lambda: live.update(draw())


def each(console: Console, items: Sequence[T], part: str) -> Iterator[T]:
    """The items, while a bar shows how many there have been."""
    with progress(console) as begin:
        step = begin(part)
        for done, item in enumerate(items):
            step(f"{done + 1} of {len(items)}", done / len(items))
            yield item


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], OnStep]]:
    """A function that begins a part of the run, and returns one that shows what is under way and the share done.

    In a terminal a bar, with the detail on a line of its own; elsewhere a line for every place.
    """
    if not console.is_terminal:
        yield lambda part: _lines(console, part)
        return
    with Live(console=console, transient=True) as live:

        def begin(part: str) -> OnStep:
            bar = bars(console, "title", "bar", "share", "elapsed", "remaining", speed_estimate_period=600)
            task = bar.add_task(part, total=1.0)

            def update(detail: str, done: float) -> None:
                bar.update(task, completed=done)
                live.update(Group(bar, Text(detail, no_wrap=True, overflow="ellipsis")))

            return update

        yield begin


def _lines(console: Console, part: str) -> OnStep:
    last = ""

    def line(detail: str, done: float) -> None:
        nonlocal last
        place = detail.partition(":")[0]
        if place != last:
            last = place
            say(console, f"{part} {done:4.0%} {place}".strip())

    return line


class Filling:
    """Records as they come. In a terminal: tables that fill row by row above a progress bar.

    `tables` shows all records so far; of two with the same `key` the later stays. Without a `live` display, in a pipe:
    a line at the start of every place, and `line` of each record where it has one.
    """

    def __init__(
        self,
        console: Console,
        tables: Callable[[Sequence[Record]], Iterable[Table]],
        line: Callable[[Record], str],
        key: Callable[[Record], object],
        live: Live | None = None,
    ) -> None:
        self.console, self.tables, self.line, self.key, self.live = console, tables, line, key, live
        self.rows: dict[object, Record] = {}
        self.place = ""
        self.progress = bars(console, "bar", "share", "elapsed", "title")
        self.task = self.progress.add_task("", total=1.0)

    def step(self, detail: str, done: float) -> None:
        """What is under way, and the share done."""
        place = detail.partition(":")[0]
        self.progress.update(self.task, description=detail, completed=done)
        if self.live is None and place != self.place:
            say(self.console, detail)
        self.place = place
        self.show(self.progress)

    def row(self, record: Record) -> None:
        """A record has come."""
        self.rows[self.key(record)] = record
        if self.live is None and (line := self.line(record)):
            say(self.console, line)
        self.show(self.progress)

    def note(self, text: str) -> None:
        """A line that stays."""
        say(self.console, text)

    def show(self, *below: Progress) -> None:
        """Draw what there is, where there is a terminal."""
        if self.live is not None:
            self.live.update(Group(*self.tables(list(self.rows.values())), *below), refresh=True)


@contextmanager
def filling(
    console: Console,
    tables: Callable[[Sequence[Record]], Iterable[Table]],
    line: Callable[[Record], str],
    key: Callable[[Record], object],
) -> Iterator[Filling]:
    """A display of records; in a terminal the tables are what stays."""
    if not console.is_terminal:
        yield Filling(console, tables, line, key)
        return
    with Live(console=console, refresh_per_second=4) as live:
        display = Filling(console, tables, line, key, live)
        yield display
        display.show()
