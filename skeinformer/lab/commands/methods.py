"""`skein methods`: the table of methods."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from skeinformer.attention import METHODS
from skeinformer.attention.table import Entry
from skeinformer.lab.methods_page import exact, masks

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# in the order in which a wider terminal gets them
TITLES = ("name", "summary", "cost", "exact at full budget", "random", "cross attention", "masks", "paper")
SUMMARY = TITLES.index("summary")  # the one column whose cells may be broken
SUMMARY_ROOM = 34  # characters that the summary keeps before there is another column


@dataclass(frozen=True)
class Methods:
    """List the attention methods: what each does, its cost, exactness, randomness, masks and paper."""

    json: bool = False
    """Print JSON with every field, for scripts."""


def command(options: Methods, console: "Console | None" = None) -> None:
    """Print METHODS as a table or as JSON.

    In a terminal the table has the columns that fit, and the summaries are broken between words; in a pipe it is whole,
    a line for each method.
    """
    if options.json:
        print(json.dumps(methods_as_json(), indent=2, default=str))
        return
    from rich.console import Console

    console = console or Console(highlight=False)
    widths = column_widths(methods_rows(), console.width if console.is_terminal else None)
    console.width = max(console.width, sum(widths) + 2 * len(widths) - 2)
    console.print(methods_table(widths))
    if left_out := TITLES[len(widths) :]:
        console.print(f"For {', '.join(left_out)}: a wider terminal, or skein methods --json.")


def methods_as_json() -> dict[str, dict[str, object]]:
    """METHODS as plain data: every field but the class of the method, and what they say in words."""
    names = [field.name for field in fields(Entry) if field.name != "method"]
    return {
        name: {**{field: getattr(row, field) for field in names}, "exact": exact(row), "masks": masks(row)}
        for name, row in METHODS.items()
    }


def methods_rows() -> list[tuple[str, ...]]:
    """A row of text for each method, in the order of TITLES."""
    return [
        (
            name,
            method.summary,
            method.cost,
            exact(method),
            "yes" if method.random else "no",
            "yes" if method.cross_attention else "no",
            masks(method),
            method.paper,
        )
        for name, method in METHODS.items()
    ]


def column_widths(rows: Sequence[Sequence[str]], room: int | None) -> list[int]:
    """The widths of as many columns as fit, two spaces apart: cells are whole, but summaries may have to be broken.

    There are names and summaries in any case. Without a `room` all columns are whole; only headings are broken.
    """
    widths = [
        max(len(text) for text in (*title.split(), *cells))
        for title, cells in zip(TITLES, zip(*rows, strict=True), strict=True)
    ]
    if room is None:
        return widths
    whole, widths[SUMMARY] = widths[SUMMARY], SUMMARY_ROOM
    while len(widths) > SUMMARY + 1 and sum(widths) + 2 * len(widths) - 2 > room:
        widths.pop()
    rest = room - sum(widths) - 2 * len(widths) + 2
    widths[SUMMARY] = min(whole, widths[SUMMARY] + max(0, rest))
    return widths


def methods_table(widths: Sequence[int]) -> "Table":
    """METHODS as a table with the first columns of TITLES, of the given widths, two spaces apart."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for title, width in zip(TITLES, widths, strict=False):
        table.add_column(title, width=width, vertical="top")
    for row in methods_rows():
        table.add_row(*map(Text, row[: len(widths)]))  # as Text, so that brackets are not read as markup
    return table
