"""How far does dividing a sequence go? Measured time per token and counted bytes, to 1024 ranks and 10^9 tokens.

    skein bench --processes 1 2 4 --lengths 8192 65536 --methods cluster --budget 64 --batch 1 --heads 2 \\
        --head-dim 64 --rounds 5 --max-seconds 30 --again --records docs/results/processes.jsonl
    python -m studies.scaling --write docs

The first measures, the second prints the tables of docs/distributed.md and docs/scaling.md and writes them into the
pages. Time is modelled for one layer, forward and backward, of one sequence:

    computing   n / R tokens, each in the time that one process measured, divided by how much faster a rank is
    exchanging  a gathering of s bytes in R - 1 steps, a sum in 2 (R - 1) steps of s / R bytes, as rings do it; a step
                takes LATENCY and its bytes over the bandwidth of one rank

Nothing overlaps, and all ranks are as fast as the slowest.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from skeinformer.attention import Cluster
from skeinformer.lab.files import write_whole
from skeinformer.lab.measure.processes import several
from skeinformer.lab.records import Record, read
from skeinformer.lab.report.format import count, label, microseconds, required, seconds, size
from studies.command import start
from studies.pages import filled, markdown
from studies.traffic import bytes_text, cluster_bytes, cluster_exchanges

LATENCY = 10e-6  # seconds of one step of a collective: an assumption
TOKENS = {"1M": 10**6, "100M": 10**8, "1G": 10**9}
RANKS = (8, 64, 1024)
GIGABITS = (25, 100, 400)
FASTER = (1, 1000)  # a rank as fast as the measured core, and one as an accelerator: the second is an assumption
MOST_RANKS = 2**24
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
    """Records that `skein bench --processes` wrote."""
    write: Path | None = None
    """The folder of the pages; without one the tables are printed."""


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


def run(options: Scaling) -> None:
    """Print the tables, or write them."""
    for name, texts in parts(read(options.records)).items():
        if options.write is None:
            print(f"{name}\n", *texts.values(), sep="\n\n")
        else:
            path = options.write / name
            write_whole(filled(path.read_text(), texts), path)


if __name__ == "__main__":
    raise SystemExit(start(Scaling, run))
