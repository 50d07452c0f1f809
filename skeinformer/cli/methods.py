"""`skein methods`: the table of methods."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skeinformer.attention import METHODS
from skeinformer.attention.table import Entry


@dataclass(frozen=True)
class Methods:
    """List the attention methods: name, cost, when each is exact, and what it does."""

    def run(self, console: Console | None = None) -> None:
        """Print METHODS as a table, in a pipe with 80 columns."""
        table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
        for heading in ("name", "cost", "exact", "what it does"):
            table.add_column(heading, no_wrap=heading in ("name", "cost"))
        for name, entry in METHODS.items():
            table.add_row(*map(Text, (name, entry.cost, exact(entry), f"{entry.summary} ({entry.paper})")))
        (console or Console(highlight=False)).print(table)


def exact(entry: Entry) -> str:
    """Say when a method is exact."""
    if entry.exact_from is None:
        return "no, unbiased" if entry.unbiased else "no"
    if entry.exact_from == 0:
        return "in evaluation" if entry.random else "always"
    return f"d >= {entry.exact_from:g} m".replace(" 1 ", " ")
