"""What a long measurement shows while it runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from skeinformer.lab.measure.approx import OnStep

Begin = Callable[[str], OnStep]


@contextmanager
def display(console: Console) -> Iterator[Begin]:
    """A function that begins a part of the run, and returns one that shows what is under way and the share done.

    In a terminal a bar, with the detail on a line of its own; elsewhere a line for every input.
    """
    if not console.is_terminal:

        def begin_lines(part: str) -> OnStep:
            last = ""

            def line(detail: str, done: float) -> None:
                nonlocal last
                place = detail.partition(":")[0]
                if place != last:
                    last = place
                    console.print(f"{part} {done:4.0%} {place}".strip(), markup=False, soft_wrap=True)

            return line

        yield begin_lines
        return
    with Live(console=console, transient=True) as live:

        def begin_bar(part: str) -> OnStep:
            title = TextColumn("{task.description}", markup=False)
            columns = (title, BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            bar = Progress(*columns, console=console, speed_estimate_period=600)
            task = bar.add_task(part, total=1.0)

            def update(detail: str, done: float) -> None:
                bar.update(task, completed=done)
                live.update(Group(bar, Text(detail, no_wrap=True, overflow="ellipsis")))

            return update

        yield begin_bar
