"""What studies share that are started by `python -m studies.NAME`: arguments, progress, errors in one line."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from skeinformer.lab.measure.approx import OnStep
from skeinformer.lab.records import Record, append

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

USER_ERROR, INTERRUPTED = 2, 130  # exit statuses, those of `skein`

Options = TypeVar("Options")


def start(kind: type[Options], run: Callable[[Options], object], arguments: Sequence[str] | None = None) -> int:
    """Read the options from the command line and run: 0 done, 2 an error that the user can mend, 130 interrupted."""
    import tyro

    options = tyro.cli(kind, args=arguments)
    try:
        run(options)
    except FileNotFoundError as error:
        return _fail(f"there is no {error.filename}" if error.filename else str(error))
    except (ValueError, OSError) as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted; call again to go on", INTERRUPTED)
    return 0


def gather(path: Path, known: list[Record], found: Iterable[Record]) -> None:
    """Append each record to the file, and to what is known, as soon as it is measured."""
    for record in found:
        append(path, record)
        known.append(record)


def print_whole(console: "Console", table: "Table") -> None:
    """Print a table as wide as it is: a narrow terminal wraps its lines, and no cell is cut."""
    from rich.segment import Segments

    width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(Segments(console.render(table, console.options.update(width=width))), crop=False)


@contextmanager
def progress(console: "Console") -> Iterator[OnStep]:
    """A function that shows what is under way and the share done: a bar in a terminal, elsewhere a line for each part.

    The part is what stands before a colon in the detail.
    """
    if not console.is_terminal:
        last = ""

        def line(detail: str, done: float) -> None:
            nonlocal last
            part = detail.partition(":")[0]
            if part != last:
                last = part
                console.print(f"{done:4.0%} {part}", markup=False, soft_wrap=True)

        yield line
        return
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    text = TextColumn("{task.description}", markup=False)
    with Progress(*columns, text, console=console, transient=True, speed_estimate_period=600) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda detail, done: bar.update(task, completed=done, description=detail)


def _fail(message: str, status: int = USER_ERROR) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return status
