"""What a long run is doing: a bar in a terminal, elsewhere a line for each part of the work."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class Steps:
    """Shows each step of a run, and the share of the expected cost that is done.

    `steps.expect(10)` adds to the cost of the whole run. `steps("n = 1,024: memory of Performer", 2)` announces a step
    of cost 2; what stands before the colon is the part of the work. Without a console nothing is shown.
    """

    def __init__(self, console: Console | None = None, bar: Progress | None = None) -> None:
        self.console, self.bar = console, bar
        self.task = None if bar is None else bar.add_task("", total=1.0)
        self.total = self.done = self.running = 0.0
        self.part = ""

    def expect(self, cost: float) -> None:
        """Add to the cost of the whole run."""
        self.total += cost

    def __call__(self, detail: str, cost: float = 0.0) -> None:
        """Announce a step before it begins."""
        self.done, self.running = self.done + self.running, cost
        part = detail.partition(":")[0]
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, description=detail, completed=self.done / (self.total or 1.0))
        elif part != self.part:
            self.print(part)
        self.part = part

    def print(self, text: str) -> None:
        """Print a line that stays."""
        if self.console is not None:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def show_steps(console: Console) -> Iterator[Steps]:
    """Show the steps of a run on the console until the block ends."""
    if not console.is_terminal:
        yield Steps(console)
        return
    columns = (BarColumn(bar_width=20), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        yield Steps(console, bar)
