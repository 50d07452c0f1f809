"""What `compare` found: records, and a table of them."""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skeinformer.lab.records import Record
from skeinformer.lab.report.compare import LAYER_COLUMNS, sentences, verdicts

if TYPE_CHECKING:
    from rich.console import Console

HIDDEN = ("method", "d", "n")  # columns that are the same in every row


@dataclass(frozen=True)
class Comparison:
    """Exact and sketched attention side by side. `print()` shows it, `records()` are what `skein report` reads."""

    layers: tuple[Record, ...]
    """For each attention call: the whole layer, with head None, then its heads."""
    whole: Record
    """The model: outputs, time, how many layers are safe."""
    left: Mapping[str, str]
    """Layers that stay exact, each with the reason."""

    @property
    def safe(self) -> tuple[str, ...]:
        """Names of the layers whose error is at most the tolerance, at every call."""
        return tuple(verdicts(self.layers)[0])

    @property
    def unsafe(self) -> tuple[str, ...]:
        """Names of the others."""
        return tuple(verdicts(self.layers)[1])

    def records(self) -> list[Record]:
        """Flat records of the kinds compare_layer and compare_model."""
        return [*self.layers, self.whole]

    def print(self, console: "Console | None" = None, *, heads: bool = True) -> None:
        """A table of layers, and of their heads unless told otherwise; then what it says, in sentences.

        Without rich there are only the sentences.
        """
        if importlib.util.find_spec("rich") is None:
            print(*sentences(self.whole, self.layers), sep="\n")
            return
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from studies.command import print_whole

        console = console or Console(highlight=False)
        columns = [column for column in LAYER_COLUMNS if column.heading not in HIDDEN]
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        for column in columns:
            table.add_column(column.heading, justify="left" if column.heading == "layer" else "right", no_wrap=True)
        for record in self.layers:
            whole = record["head"] is None
            if whole or heads:
                if whole and heads and table.row_count:
                    table.add_section()
                table.add_row(*(Text(column.show(record)) for column in columns))
        print_whole(console, table)
        for sentence in sentences(self.whole, self.layers):
            console.print(sentence, markup=False, soft_wrap=True)
