"""What crosses ranks, by formulas: the cluster sketch beside ring attention and Ulysses.

Bytes that one rank receives for one head and one example of one layer. A gathering of s bytes is (R - 1) s, a sum is
that of a ring, 2 (R - 1) / R s. Nothing of the cluster sketch has the size of the sequence. Ring attention (Liu et al.
2023) passes all keys and values around, and in the backward pass their gradients too. Ulysses (Jacobs et al. 2023)
exchanges tokens for heads: queries, keys, values and the output, and their gradients; it has no more ranks than heads.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from skeinformer.attention.centers import METRIC_QUERIES
from skeinformer.attention.check_rows import FAR
from skeinformer.attention.cluster import SAMPLED_KEYS
from skeinformer.distributed.world import Exchange
from studies.command import start

LENGTHS = {"64k": 2**16, "1M": 2**20, "16M": 2**24}
RANKS = (2, 8, 64, 1024)


def cluster_exchanges(
    ranks: int,
    *,
    budget: int = 16,
    num_pilots: int = 16,
    width: int = 64,
    batch: int = 1,
    heads: int = 1,
    item: int = 4,
) -> tuple[list[Exchange], list[Exchange]]:
    """The exchanges of a call of `cluster_attention`, forward and backward, where there are more tokens than asked for.

    Keys and values of one width, in a precision of `item` bytes; the noise has 4.
    """
    d, pilots, p, each = budget, num_pilots, width, batch * heads
    exchange = _of(ranks, each, item)
    metric, sample = METRIC_QUERIES * p, SAMPLED_KEYS * d

    forward = [
        Exchange("shares", "gather", 5 * 8, ranks),
        exchange("pilots", "gather", pilots * p, each * (pilots + metric) * 4),
        exchange("row sums", "gather", pilots + 1),
        exchange("samples", "gather", sample),
        exchange("centers", "sum", (sample + metric) * p, batch * item),
        exchange("clusters", "sum", 2 * d + 2 * d * p + pilots * p + p * p),
    ]
    backward = [
        exchange("gradients", "sum", 2 * d * p + p * p + pilots * p),
        exchange("rows", "sum", pilots * p),
    ]
    return forward, backward


def certificate_exchanges(
    ranks: int,
    *,
    num_checks: int = 32,
    num_pilots: int = 16,
    width: int = 64,
    batch: int = 1,
    heads: int = 1,
    item: int = 4,
) -> list[Exchange]:
    """What `return_info` adds to a call of `cluster_attention`, where there are more tokens than are checked."""
    exchange, c, p, each = _of(ranks, batch * heads, item), num_checks, width, batch * heads
    return [
        exchange("guesses", "gather", 4 * p + 7),
        exchange("far keys", "gather", FAR * (p + 2) + p * p),
        exchange("totals", "sum", 4),
        exchange("chances", "gather", c + 2),
        exchange("checks", "gather", 2 * c),
        exchange("check rows", "sum", (2 * c + num_pilots) * p + 1),
        exchange("check sums", "gather", c),
        exchange("exact rows", "sum", c * p),
        exchange("places", "sum", 0, each * num_pilots * 8),
    ]


def _of(ranks: int, each: int, item: int) -> Callable[..., Exchange]:
    """An exchange of so many numbers of `item` bytes for each head and example, and some bytes more."""

    def exchange(step: str, kind: Literal["sum", "gather"], numbers: int, more: int = 0) -> Exchange:
        return Exchange(step, kind, each * numbers * item + more, ranks)

    return exchange


def cluster_bytes(ranks: int, **sizes: Any) -> int:
    """Bytes that a rank receives, forward and backward."""
    return sum(x.received for part in cluster_exchanges(ranks, **sizes) for x in part)


def ring_bytes(n: int, ranks: int, width: int = 64, item: int = 4) -> int:
    """Ring attention: K and V of all other ranks, and in the backward pass these again with their gradients."""
    return 3 * 2 * n * width * item * (ranks - 1) // ranks


def ulysses_bytes(n: int, ranks: int, width: int = 64, item: int = 4) -> int:
    """Ulysses: of Q, K, V and the output a rank's n / R tokens, but for its own 1 / R, and of their gradients."""
    return 2 * 4 * (n // ranks) * width * item * (ranks - 1) // ranks


def traffic_table(width: int = 64, budget: int = 16, num_pilots: int = 16) -> str:
    """The table of docs/distributed.md, for float32."""
    lines = ["| tokens | ranks | cluster sketch | ring attention | Ulysses |", "|---|---|---|---|---|"]
    for name, n in LENGTHS.items():
        for ranks in RANKS:
            ours = cluster_bytes(ranks, width=width, budget=budget, num_pilots=num_pilots)
            others = (ring_bytes(n, ranks, width), ulysses_bytes(n, ranks, width))
            lines.append(f"| {name} | {ranks} | " + " | ".join(bytes_text(x) for x in (ours, *others)) + " |")
    return "\n".join(lines)


def bytes_text(size: float) -> str:
    """'1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


@dataclass(frozen=True)
class Traffic:
    """Print how many bytes one rank receives, for one head and one example of one layer."""

    width: int = 64
    """Width p of a head."""
    budget: int = 16
    """Clusters d."""
    num_pilots: int = 16
    """Pilot rows P."""


def print_table(options: Traffic) -> None:
    """Print the table."""
    print(traffic_table(options.width, options.budget, options.num_pilots))


if __name__ == "__main__":
    raise SystemExit(start(Traffic, print_table))
