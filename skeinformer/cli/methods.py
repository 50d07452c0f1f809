"""`skein methods`: the table of methods."""

import json
from dataclasses import dataclass, fields

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skeinformer.attention import METHODS
from skeinformer.attention.table import Entry


@dataclass(frozen=True)
class Methods:
    """List the attention methods: name, cost, when each is exact, and what it does."""

    json: bool = False
    """Print JSON with every field, for scripts."""

    def run(self, console: Console | None = None) -> None:
        """Print METHODS as a table, in a pipe with 80 columns, or as JSON."""
        if self.json:
            print(json.dumps(as_json(), indent=2, default=str))
            return
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for heading in ("name", "cost", "exact", "what it does"):
            table.add_column(heading, no_wrap=heading in ("name", "cost"))
        for name, entry in METHODS.items():
            table.add_row(*map(Text, (name, entry.cost, exact(entry), f"{entry.summary} ({entry.paper})")))
        (console or Console(highlight=False)).print(table)


def as_json() -> dict[str, dict[str, object]]:
    """Return METHODS as plain data: every field but the class, and `exact` and `masks` in words."""
    names = [field.name for field in fields(Entry) if field.name != "method"]
    return {
        name: {**{field: getattr(row, field) for field in names}, "exact": exact(row), "masks": masks(row)}
        for name, row in METHODS.items()
    }


def exact(entry: Entry) -> str:
    """Say when a method is exact."""
    if entry.exact_from is None:
        return "no, unbiased" if entry.unbiased else "no"
    if entry.exact_from == 0:
        return "in evaluation" if entry.random else "always"
    return f"d >= {entry.exact_from:g} m".replace(" 1 ", " ")


def masks(entry: Entry) -> str:
    """Say which masks a method takes."""
    if not entry.cross_attention:
        return "one mask, padding anywhere"  # the row of a token that is padding as a key is 0
    return "padding anywhere" + (" (drawn keys may be padded)" if entry.padded_draws else "")
