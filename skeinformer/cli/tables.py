"""Tables of records as text: for the terminal, for Markdown pages and for the HTML report."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from skeinformer.cli.records import Record, Value
from skeinformer.comparison.result import count as count
from skeinformer.comparison.result import number as number

# columns of words begin at the left, columns of numbers end at the right
WORDS = ("method", "mode", "of", "arm", "layer", "peer", "paper's term", "name", "what")


class Table(NamedTuple):
    """A title, headings, and a text for each cell."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self, console: Console) -> None:
        """Print the table; what is wider than a terminal is wrapped, and a pipe gets whole lines."""
        table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for heading in self.headings:
            word = heading in WORDS
            table.add_column(
                heading, justify="left" if word else "right", overflow="fold", min_width=12 if word else None
            )
        for row in self.rows:
            table.add_row(*map(Text, row))  # brackets in a Text are no markup
        if self.title:
            console.print(f"\n{self.title}", markup=False, highlight=False, soft_wrap=True)
        width = console.width
        if not console.is_terminal:
            console.width = max(width, console.measure(table, options=console.options.update(width=1000)).maximum)
        console.print(table)
        console.width = width


def table_of(title: str, columns: Mapping[str, Callable[[Record], str]], records: Iterable[Record]) -> Table:
    """Make a table with a row for each record; a column in which no record has anything is left out."""
    rows = [[show(record) for show in columns.values()] for record in records]
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    return Table(title, [list(columns)[i] for i in used], [[row[i] for i in used] for row in rows])


def label(record: Record) -> str:
    """Return what a reader calls the method of a record."""
    return str(record.get("label") or record.get("method") or "")


def named(record: Record) -> str:
    """Return a method's label with its size; V-mean ignores queries and keys and is the baseline."""
    text = label(record) + (f", d = {record['budget']}" if record.get("budget") else "")
    return f"{text} (baseline)" if record.get("method") == "vmean" else text


def real(record: Record, name: str) -> float | None:
    """Return a field as a number, or None where the record has none."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None


def percent(value: Value) -> str:
    """Format a share of one in percent."""
    return number(value * 100, " %") if isinstance(value, int | float) else ""


def seconds(value: Value) -> str:
    """Format a time in seconds or milliseconds."""
    return number(value, " s") if isinstance(value, int | float) and value >= 1 else number(value, " ms", 1e3)


def size(value: Value) -> str:
    """Format a number of bytes in MiB or KiB."""
    mebi = isinstance(value, int | float) and value >= 2**20
    return number(value, " MiB", 2**-20) if mebi else number(value, " KiB", 2**-10)


def spread(record: Record, name: str, show: Callable[[Value], str] = number) -> str:
    """Format a median with its quartiles."""
    low, high = show(record.get(f"{name}_q25")), show(record.get(f"{name}_q75"))
    return show(record.get(name)) + (f" ({low} to {high})" if low and high and low != high else "")


def spread_se(record: Record, name: str) -> str:
    """Format a mean with its standard error."""
    error = number(record.get(f"{name}_se"))
    return number(record.get(name)) + (f" ± {error}" if error else "")
