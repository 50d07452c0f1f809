"""What `compare` found: records, and what they say in plain text."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO

from skeinformer.compare.record import Record
from skeinformer.compare.text import paragraphs, table, verdicts


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

    def text(self, *, heads: bool = True) -> str:
        """A table of layers, and of their heads unless told otherwise; then what it says, in sentences."""
        return f"{table(self.layers, heads=heads)}\n\n{paragraphs(self.whole, self.layers)}"

    def print(self, file: IO[str] | None = None, *, heads: bool = True) -> None:
        """Write the text to a file, or where `print` writes: at most 80 columns wide."""
        print(self.text(heads=heads), file=file)
