"""Multiply-adds of every method and the leading terms that Chen et al. (2022) give for them.

    python -m benchmarks.flops --lengths 16384 --backward

`skein bench` has the counts as a column; this adds the terms of the paper's table, and lengths at which nothing could
be timed. Nothing is computed.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console

from benchmarks.common import check_options, start
from skeinformer.attention import METHODS
from skeinformer.cli.flops import count_multiply_adds
from skeinformer.cli.records import Record, machine
from skeinformer.cli.specs import MethodSpec, parse_all
from skeinformer.cli.tables import count, number, real, table_of


class LeadingTerm(NamedTuple):
    """Multiply-adds of one head as a function of n tokens, budget d and head width p."""

    text: str
    multiply_adds: Callable[[int, int, int], int]


def linear(factor: int) -> LeadingTerm:
    """Return the term `factor` n d p."""
    return LeadingTerm(f"{factor} n d p", lambda n, d, p: factor * n * d * p)


STANDARD = LeadingTerm("2 n^2 p", lambda n, d, p: 2 * n * n * p)
# the paper's table "The leading terms of FLOPs in computing attention"; Reformer and the ablations are not in it
PAPER: dict[str, LeadingTerm] = {
    "softmax": STANDARD,
    "softmax_dropout": STANDARD,
    "bigbird": linear(5),
    "performer": linear(3),
    "nystromformer": linear(4),
    "linformer": linear(4),
    "informer": linear(3),
    "informer_mask": linear(3),
    "skeinformer": linear(4),
}


@dataclass(frozen=True)
class Flops:
    """Count the multiply-adds of one head of each method, beside the leading terms that the paper gives."""

    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    """Sequence lengths, in tokens."""
    budget: int = 256
    """The sketch size d, the same for every method that has none among its options."""
    head_dim: int = 32
    """The head width p."""
    methods: tuple[str, ...] = ()
    """Methods, with options as in cluster:num_pilots=3, or benchmarks.rivals:wildcat. Default: all."""
    backward: bool = False
    """Count the forward and backward pass of a training step too."""
    json: bool = False
    """Print one JSON record per line, with exact counts."""

    def run(self, console: Console | None = None) -> None:
        """Print counted and published multiply-adds."""
        check_options(self, {"lengths": 1, "budget": 1, "head_dim": 1}, ("lengths",))
        records = flop_records(self)
        if self.json:
            for record in records:
                print(json.dumps(record), flush=True)
            return
        columns: dict[str, Callable[[Record], str]] = {
            "method": lambda r: ":".join(str(r[name]) for name in ("method", "options") if r[name]),
            "n": lambda r: count(r["n"]),
            "forward": lambda r: millions(r, "multiply_adds"),
            "with backward": lambda r: millions(r, "multiply_adds_with_backward"),
            "paper's term": lambda r: str(r["paper_term"] or ""),
            "paper": lambda r: millions(r, "paper"),
            "ratio": lambda r: number(r["ratio"]),
        }
        title = f"millions of multiply-adds per head, d = {self.budget}, p = {self.head_dim}"
        table_of(title, columns, records).print(console or Console(highlight=False))


def flop_records(options: Flops) -> Iterator[Record]:
    """Yield a record for every length and method; the paper's table is about methods without options."""
    common: Record = {"kind": "flops", "head_dim": options.head_dim, **machine()}
    for n in options.lengths:
        for method in parse_all(options.methods or METHODS):
            (spec,) = method.at((options.budget,))
            forward = multiply_adds(spec, n, options)
            term = None if spec.options else PAPER.get(spec.method)
            paper = None if term is None else term.multiply_adds(n, options.budget, options.head_dim)
            yield {
                **common,
                **spec.fields,
                "n": n,
                "multiply_adds": forward,
                "multiply_adds_with_backward": multiply_adds(spec, n, options, True) if options.backward else None,
                "paper": paper,
                "paper_term": None if term is None else term.text,
                "ratio": None if paper is None else forward / paper,
            }


def multiply_adds(spec: MethodSpec, n: int, options: Flops, backward: bool = False) -> int:
    """Count the multiply-adds of one head."""
    return sum(count_multiply_adds(spec, n, head_dim=options.head_dim, backward=backward).values())


def millions(record: Record, name: str) -> str:
    """Format a count in millions."""
    value = real(record, name)
    return "" if value is None else f"{value / 1e6:,.1f}"


if __name__ == "__main__":
    sys.exit(start(Flops))
