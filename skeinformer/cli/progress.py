"""What a long run is doing: in a terminal a line that changes, elsewhere a line for each part of the work."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.status import Status


class Steps:
    """Shows each step of a run; without a console nothing.

    `steps("n = 1,024: memory of Performer")` announces a step; what stands before the colon is the part of the work.
    """

    def __init__(self, console: Console | None = None, status: Status | None = None) -> None:
        self.console, self.status = console, status
        self.part = ""

    def __call__(self, detail: str) -> None:
        """Announce a step before it begins."""
        part = detail.partition(":")[0]
        if self.status is not None:
            self.status.update(escape(detail))
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
    with console.status("") as status:
        yield Steps(console, status)


def progress_bar(console: Console) -> Progress:
    """Make a bar that shows in a terminal only and is gone afterwards; start it by `with`."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
