"""`skein flops`: multiply-adds of every method, counted."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from skeinformer.lab.console import plain_table, print_whole
from skeinformer.lab.contender import offer
from skeinformer.lab.measure.flops import flop_records
from skeinformer.lab.progress import status
from skeinformer.lab.records import Record, Value


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
    """Names of methods, with options as in cluster:num_pilots=3. Default: all."""
    contenders: str | None = None
    """A module with a table METHODS of its own, as studies.rivals: --methods may then name these too."""
    backward: bool = False
    """Count the forward and backward pass of a training step too."""
    json: bool = False
    """Print one JSON record per line, with exact counts, for scripts."""


def command(options: Flops) -> None:
    """Print counted and published multiply-adds as a table, or as one JSON record per line."""
    if options.contenders is not None:
        offer(options.contenders)
    records = flop_records(
        methods=options.methods,
        lengths=options.lengths,
        budget=options.budget,
        head_dim=options.head_dim,
        backward=options.backward,
    )
    if options.json:
        for record in records:
            print(json.dumps(record), flush=True)
        return
    with status(Console(stderr=True), lines=False) as show:
        show("counting")
        table = flops_table(list(records), options)
    print_whole(Console(highlight=False), table)


def flops_table(records: Sequence[Record], options: Flops) -> Table:
    """Millions of multiply-adds, a section for each length."""
    both = ("with backward",) if options.backward else ()
    headings = ("n", "method", "forward", *both, "paper's term", "paper", "ratio")
    title = f"millions of multiply-adds per head, d = {options.budget}, p = {options.head_dim}"
    return plain_table(headings, [_cells(record, options.backward) for record in records], sections=1, title=title)


def _cells(record: Record, backward: bool) -> list[str]:
    ratio = record["ratio"]
    return [
        f"{record['n']:,}",
        ":".join(str(record[name]) for name in ("method", "options") if record[name]),
        _millions(record["multiply_adds"]),
        *([_millions(record["multiply_adds_with_backward"])] if backward else []),
        str(record["paper_term"] or ""),
        _millions(record["paper"]),
        f"{ratio:.3f}" if isinstance(ratio, float) else "",
    ]


def _millions(count: Value) -> str:
    return f"{count / 1e6:,.1f}" if isinstance(count, int | float) else ""
