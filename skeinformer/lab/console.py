"""Tables and text as a command prints them, in a terminal and in a pipe; `progress.py` has what changes."""

import math
import re
import textwrap
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, JustifyMethod
from rich.segment import Segments
from rich.table import Table
from rich.text import Text

GAP = 2  # between columns
# headings of columns that hold words: they begin at the left
WORDS = ("method", "mode", "peer", "weights", "paper's term", "part", "what", "commit")


def plain_table(
    headings: Iterable[str],
    rows: Iterable[Sequence[str]],
    *,
    sections: int = 0,
    title: str | None = None,
    edge: bool = True,
    broken: str | None = None,
) -> Table:
    """A table without a frame: words begin at the left, numbers end at the right.

    A line stands between rows that differ in the first `sections` cells. Only the column `broken` may be narrower than
    its cells, and never narrower than a word in it.
    """
    rows = list(rows)
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_style, table.title_justify = "", "left"
    table.show_edge = edge and title is None
    for i, heading in enumerate(headings):
        least = longest_word([heading, *(row[i] for row in rows)]) if heading == broken else None
        justify: JustifyMethod = "left" if heading in WORDS else "right"
        table.add_column(heading, justify=justify, no_wrap=heading != broken, min_width=least)
    last: Sequence[str] | None = None
    for row in rows:
        if last is not None and last[:sections] != row[:sections]:
            table.add_section()
        last = row
        table.add_row(*map(Text, row))  # as Text, so that brackets are not read as markup
    return table


def longest_word(texts: Iterable[str]) -> int:
    """The length of the longest word."""
    return max((len(word) for text in texts for word in text.split()), default=0)


def split_tables(headings: Sequence[str], rows: Sequence[Sequence[str]], *, width: int) -> list[Table]:
    """The rows in as many tables as it takes for each to fit: all columns are shown, the first one in every table.

    The first column may be narrower than its cells, down to 24 letters or its longest word; the others are divided
    evenly. A row is left out of a table in which it has nothing.
    """
    first = [headings[0], *(row[0] for row in rows)]
    least = max(longest_word(first), min(24, max(map(len, first))))
    wide = [GAP + max(map(len, [heading, *(row[i] for row in rows)])) for i, heading in enumerate(headings)]
    groups = column_groups(wide, width - least)
    even = column_groups(wide, width - least, most=math.ceil((len(headings) - 1) / len(groups)))
    groups = even if len(even) == len(groups) else groups
    tables = []
    for group in groups:
        shown = [[row[0], *(row[i] for i in group)] for row in rows if any(row[i] for i in group)]
        columns = [headings[0], *(headings[i] for i in group)]
        tables.append(plain_table(columns, shown, edge=False, broken=headings[0]))
    return tables


def column_groups(wide: Sequence[int], room: int, most: int | None = None) -> list[list[int]]:
    """The columns after the first, in their order, in groups that fit the room and have at most `most` columns."""
    groups: list[list[int]] = [[]]
    for i in range(1, len(wide)):
        last = groups[-1]
        if last and (sum(wide[j] for j in last) + wide[i] > room or len(last) == most):
            groups.append([])
        groups[-1].append(i)
    return groups


def hyphenated(name: str, width: int) -> str:
    """A long name in lines of at most `width` letters, broken only behind hyphens where that will do."""
    lines = [""]
    for part in re.split(r"(?<=-)", name):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it is: a narrow terminal wraps its lines, and no cell is cut."""
    width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(Segments(console.render(table, console.options.update(width=width))), crop=False)


def wrapped(text: str, console: Console) -> str:
    """The text in lines that fit a terminal, words whole; one line elsewhere."""
    if not console.is_terminal:
        return text
    return textwrap.fill(text, console.width, break_long_words=False, break_on_hyphens=False)
