"""What a `sketched` scope did: calls by shape, sketched or exact and why, and their error if it was asked for."""

from collections import Counter
from dataclasses import dataclass, field
from threading import Lock

from torch import Tensor


@dataclass
class AlikeCalls:
    """Calls that are alike: their number, and the error of those that were measured."""

    calls: int = 0
    measured: int = 0
    error: float = 0.0
    """Mean over calls, examples and heads."""
    largest: float = 0.0
    """Of one head of one example."""


@dataclass
class Report:
    """What was done with every call of `scaled_dot_product_attention`. Printing it shows all of it."""

    title: str
    rows: dict[tuple[str | None, tuple[int, ...], int], AlikeCalls] = field(default_factory=dict)
    """By reason, None for what was sketched, shape of the query and number of keys; in the order of the first call."""
    compiled: int = 0
    """Calls in graphs that were compiled meanwhile, whose runs are not counted."""
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    @property
    def sketched(self) -> int:
        """How many calls were sketched."""
        return sum(row.calls for (reason, _, _), row in self.rows.items() if reason is None)

    @property
    def exact(self) -> int:
        """How many calls were left to torch."""
        return sum(row.calls for (reason, _, _), row in self.rows.items() if reason is not None)

    @property
    def reasons(self) -> Counter[str]:
        """Why calls were exact, and how many."""
        found: Counter[str] = Counter()
        for (reason, _, _), row in self.rows.items():
            if reason is not None:
                found[reason] += row.calls
        return found

    @property
    def error(self) -> float | None:
        """The mean relative error of the sketched calls, as they estimate it; None if it was not asked for."""
        measured = [row for row in self.rows.values() if row.measured]
        total = sum(row.measured for row in measured)
        return sum(row.error * row.measured for row in measured) / total if total else None

    def add(self, reason: str | None, query: tuple[int, ...], keys: int, error: Tensor | None = None) -> None:
        """Count one call."""
        with self.lock:
            row = self.rows.setdefault((reason, query, keys), AlikeCalls())
            row.calls += 1
            if error is not None:
                row.error = (row.error * row.measured + float(error.mean())) / (row.measured + 1)
                row.largest = max(row.largest, float(error.max()))
                row.measured += 1

    def counts(self) -> str:
        """How many calls were sketched and exact, in words."""
        return f"{_calls(self.sketched)} sketched, {self.exact} exact"

    def __str__(self) -> str:
        lines = [f"{self.title}: {self.counts()}"]
        for (reason, query, keys), row in self.rows.items():
            did = f"exact: {reason}" if reason else "sketched"
            if row.measured:
                did += f", relative error {row.error:.2g}, at most {row.largest:.2g} in a head"
            lines.append(f"  {row.calls:>5} x  query {query}, {keys} keys  {did}")
        if self.compiled:
            lines.append(f"  {_calls(self.compiled)} in compiled graphs, by the same rules; their runs are not counted")
        if not self.rows and not self.compiled:
            lines.append(
                "  no call of torch.nn.functional.scaled_dot_product_attention was seen. Calls in a graph that was "
                "compiled earlier are sketched by the same rules, but not counted"
            )
        return "\n".join(lines)


def _calls(number: int) -> str:
    return f"{number} call" if number == 1 else f"{number} calls"
