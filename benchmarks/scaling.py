"""How far does dividing a sequence go? Measured time per token and counted bytes, to 1024 ranks and 10^9 tokens.

    python -m benchmarks.processes --processes 1 2 4 --lengths 8192 65536 --methods cluster --budgets 64 --batch 1 \\
        --heads 2 --head-dim 64 --rounds 5 --max-seconds 30 --records docs/results/processes.jsonl
    python -m benchmarks.scaling --write docs

The first measures, the second prints the tables of docs/distributed.md and docs/scaling.md and writes them into the
pages. Time is modelled for one layer, forward and backward, of one sequence:

    computing   n / R tokens, each in the time that one process measured, divided by how much faster a rank is
    exchanging  a gathering of s bytes in R - 1 steps, a sum in 2 (R - 1) steps of s / R bytes, as rings do it; a step
                takes LATENCY and its bytes over the bandwidth of one rank

Nothing overlaps, and all ranks are as fast as the slowest.

`--traffic` prints the bytes that one rank receives for one head and one example of one layer, with those of ring
attention and Ulysses, by formulas. A gathering of s bytes is (R - 1) s, a sum is that of a ring, 2 (R - 1) / R s. Ring
attention (Liu et al. 2023) passes all keys and values around, and in the backward pass their gradients too. Ulysses
(Jacobs et al. 2023) exchanges tokens for heads: queries, keys, values and the output, and their gradients.
"""

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, Literal, NamedTuple

from benchmarks.common import markdown, start, write_tables
from benchmarks.processes import microseconds, several
from skeinformer.attention import Cluster
from skeinformer.attention.centers import METRIC_QUERIES
from skeinformer.attention.check_rows import FAR
from skeinformer.attention.cluster import SAMPLED_KEYS
from skeinformer.cli.records import Record, read
from skeinformer.cli.tables import count, label, real, seconds, size
from skeinformer.distributed.world import Exchange

LATENCY = 10e-6  # seconds of one step of a collective: an assumption
TOKENS = {"1M": 10**6, "100M": 10**8, "1G": 10**9}
RANKS = (8, 64, 1024)
GIGABITS = (25, 100, 400)
FASTER = (1, 1000)  # a rank as fast as the measured core, and one as an accelerator: the second is an assumption
MOST_RANKS = 2**24
LENGTHS = {"64k": 2**16, "1M": 2**20, "16M": 2**24}
TRAFFIC_RANKS = (2, 8, 64, 1024)
ALONE = ("bench_processes", "cluster", 1, "both")


class MeasuredLayer(NamedTuple):
    """What was measured: one layer's attention, forward and backward."""

    seconds_per_token: float
    heads: int
    width: int
    budget: int
    pilots: int
    n: int

    @property
    def sizes(self) -> dict[str, Any]:
        return {"heads": self.heads, "width": self.width, "budget": self.budget, "num_pilots": self.pilots}


@dataclass(frozen=True)
class Scaling:
    """Print, or write into the pages, what dividing a sequence among processes gives."""

    records: Path = Path("docs/results/processes.jsonl")
    """Records that `benchmarks.processes` wrote."""
    write: Path | None = None
    """The folder of the pages; without one the tables are printed."""
    traffic: bool = False
    """Print how many bytes one rank receives, for one head and one example of one layer."""

    def run(self) -> None:
        """Print the tables, or write them."""
        if self.traffic:
            print(traffic_table())
            return
        for name, texts in parts(read(self.records)).items():
            if self.write is None:
                print(f"{name}\n", *texts.values(), sep="\n\n")
            else:
                write_tables(self.write / name, texts)


def measured(records: Iterable[Record]) -> MeasuredLayer:
    """The cluster sketch in one process, forward and backward, of the longest sequence."""
    found = [r for r in records if tuple(r[name] for name in ("kind", "method", "processes", "mode")) == ALONE]
    if not found:
        raise ValueError("no record of the cluster sketch in one process, forward and backward; measure --processes 1")
    r = max(found, key=lambda record: required(record, "n"))
    heads, width, budget, n = (int(required(r, name)) for name in ("heads", "head_dim", "budget", "n"))
    pilots = Cluster(budget=budget).num_pilots
    assert pilots is not None
    return MeasuredLayer(required(r, "seconds_per_token"), heads, width, budget, pilots, n)


def required(record: Record, name: str) -> float:
    """Return a field as a number; a ValueError where the record has none."""
    value = real(record, name)
    if value is None:
        raise ValueError(f"record field {name!r} is {record.get(name)!r}, expected a number")
    return value


def computing(layer: MeasuredLayer, n: int, ranks: int, faster: float) -> float:
    """Seconds of a rank's n / R tokens."""
    return math.ceil(n / ranks) * layer.seconds_per_token / faster


def exchanging(layer: MeasuredLayer, ranks: int, gigabits: float) -> float:
    """Seconds of all collectives, which do not depend on n."""
    steps = sum(
        (2 if exchange.kind == "sum" else 1) * (ranks - 1)
        for part in cluster_exchanges(ranks, **layer.sizes)
        for exchange in part
    )
    return steps * LATENCY + cluster_bytes(ranks, **layer.sizes) * 8 / (gigabits * 1e9)


def fastest(layer: MeasuredLayer, n: int, gigabits: float, faster: float) -> tuple[int, float]:
    """The power of two of ranks that takes least time, and that time."""
    ranks = [2**k for k in range(int(math.log2(MOST_RANKS)) + 1)]
    times = {r: computing(layer, n, r, faster) + exchanging(layer, r, gigabits) for r in ranks}
    best = min(times, key=lambda r: times[r])
    return best, times[best]


def efficient(layer: MeasuredLayer, n: int, gigabits: float, faster: float) -> int:
    """The most ranks, a power of two, that compute for at least half of the time."""
    ranks = 1
    while computing(layer, n, 2 * ranks, faster) >= exchanging(layer, 2 * ranks, gigabits) and ranks < MOST_RANKS:
        ranks *= 2
    return ranks


def times_table(layer: MeasuredLayer, faster: float) -> str:
    """A row for each number of tokens and ranks."""
    head = ["tokens", "ranks", "computing", "received"]
    head += [f"exchanging, {g} Gbit/s" for g in GIGABITS] + [f"computing, of the time, {g} Gbit/s" for g in GIGABITS]
    rows = []
    for name, n in TOKENS.items():
        for ranks in RANKS:
            work = computing(layer, n, ranks, faster)
            waits = [exchanging(layer, ranks, g) for g in GIGABITS]
            received = bytes_text(cluster_bytes(ranks, **layer.sizes))
            shares = [f"{work / (work + wait):.0%}" for wait in waits]
            rows.append([name, str(ranks), seconds(work), received, *map(seconds, waits), *shares])
    return markdown(head, rows)


def limits_table(layer: MeasuredLayer) -> str:
    """Where it stops: the ranks that are fastest, and those that still compute for half of their time."""
    head = ["a rank is", "tokens", "Gbit/s", "half efficient up to", "fastest with", "which takes"]
    rows = []
    for faster in FASTER:
        for name, n in TOKENS.items():
            for gigabits in (GIGABITS[0], GIGABITS[-1]):
                best, time = fastest(layer, n, gigabits, faster)
                half = efficient(layer, n, gigabits, faster)
                speed = "the measured core" if faster == 1 else f"{faster:,} times it"
                rows.append([speed, name, str(gigabits), f"{half:,} ranks", f"{best:,} ranks", seconds(time)])
    return markdown(head, rows)


def bench_table(records: Sequence[Record], each: bool) -> str:
    """What was measured at a fixed n per process (`each`), or in all."""
    field = "n_each" if each else "n"
    head = ["n per process" if each else "n in all", "processes", "", "forward", "per token", "memory of one"]
    head += ["forward and backward", "per token", "memory of one", "received by one"]
    given = sorted({int(required(r, "n")) for r in records if r["processes"] == 1})
    groups: dict[tuple[int, int, str], dict[str, Record]] = {}
    for r in records:
        if (n := int(required(r, field))) in given:
            groups.setdefault((n, int(required(r, "processes")), label(r)), {})[str(r["mode"])] = r
    rows = []
    for (n, ranks, name), modes in sorted(groups.items()):
        forward, both = modes.get("forward", {}), modes.get("both", {})
        row = [count(n), str(ranks), name]
        for r in (forward, both):
            row += [seconds(r.get("seconds")), microseconds(r.get("seconds_per_token")), size(r.get("peak_bytes"))]
        rows.append([*row, size(both.get("received_bytes"))])
    return markdown(head, rows)


def machine_line(records: Sequence[Record]) -> str:
    """On what it was measured, in a sentence."""
    r = records[0]
    ranks = ", ".join(several(n) for n in sorted({int(required(r, "processes")) for r in records}))
    return (
        f"Measured on {r['cpu']}, {r['cores']} cores, torch {r['torch']}: {ranks}, {r['threads']} thread each; "
        f"batch {r['batch']}, {r['heads']} heads of width {r['head_dim']}, {r['dtype']}, "
        f"d = {measured(records).budget}; median of {r['rounds']} rounds."
    )


def measured_line(layer: MeasuredLayer) -> str:
    """What the model starts from, in a sentence."""
    return (
        f"One process with one thread took {microseconds(layer.seconds_per_token)} for a token of {layer.n:,}, forward "
        f"and backward, with {layer.heads} heads of width {layer.width}, d = {layer.budget} and {layer.pilots} pilots."
    )


def parts(records: Sequence[Record]) -> dict[str, dict[str, str]]:
    """What stands between the marks of each page."""
    layer = measured(records)
    return {
        "distributed.md": {
            "machine": fill(machine_line(records), 120),
            "per process": bench_table(records, True),
            "in all": bench_table(records, False),
        },
        "scaling.md": {
            "measured": fill(measured_line(layer), 120),
            **{f"times, {faster}": times_table(layer, faster) for faster in FASTER},
            "limits": limits_table(layer),
        },
    }


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
    """Make the table of docs/distributed.md, for float32."""
    rows = []
    for name, n in LENGTHS.items():
        for ranks in TRAFFIC_RANKS:
            ours = cluster_bytes(ranks, width=width, budget=budget, num_pilots=num_pilots)
            others = (ring_bytes(n, ranks, width), ulysses_bytes(n, ranks, width))
            rows.append([name, str(ranks), *map(bytes_text, (ours, *others))])
    return markdown(("tokens", "ranks", "cluster sketch", "ring attention", "Ulysses"), rows)


def bytes_text(size: float) -> str:
    """'1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.3g} {unit}"
        size /= 1000
    raise AssertionError


if __name__ == "__main__":
    sys.exit(start(Scaling))
