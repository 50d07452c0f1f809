"""Is the cluster sketch ahead by its arithmetic too, or only by how fast its code is?

    python -m studies.frontier_by_multiply_adds docs/results/rivals.jsonl

reads a summary of `skein approx` and prints which sizes of the cluster sketch another method beats: an error that is
smaller, in no more multiply-adds of the forward pass.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

from skeinformer.lab.records import Record, read
from studies.command import start


@dataclass(frozen=True)
class Frontier:
    """Which sizes of the cluster sketch does another method beat, by error and multiply-adds?"""

    records: tyro.conf.Positional[Path]
    """A summary that `skein approx` wrote, such as docs/results/rivals.jsonl."""


def points(records: list[Record]) -> dict[str, list[tuple[float, float, str, bool]]]:
    """Multiply-adds, error, name and whether it is ours, of every method and d, by input."""

    def case(record: Record) -> tuple[object, ...]:
        return tuple(record.get(name) for name in ("n", "method", "options", "budget"))

    work = {case(r): float(r["flops"] or 0) for r in records if r["kind"] == "approx_time"}
    found: dict[str, list[tuple[float, float, str, bool]]] = {}
    for r in records:
        if r["kind"] == "approx_summary":
            place = f"{r['weights']}, n = {r['n']}, layer {r['layer']}"
            name = f"{r['label']}, d = {r.get('budget')}"
            point = (work[case(r)], float(r["spectral_relative"] or 0), name, r["method"] == "cluster")
            found.setdefault(place, []).append(point)
    return found


def run(options: Frontier) -> None:
    """Print each size that is beaten, and how many they are."""
    total = beaten = 0
    for place, field in points(read(options.records)).items():
        for flops, error, name, ours in field:
            better = [other for other in field if not other[3] and other[0] <= flops and other[1] < error]
            total += ours
            if ours and better:
                beaten += 1
                best = min(better, key=lambda other: other[1])
                print(f"{place}: {name} ({error:.3g}) by {best[2]} ({best[1]:.3g})")
    print(f"{beaten} of {total} beaten")


if __name__ == "__main__":
    sys.exit(start(Frontier, run))
