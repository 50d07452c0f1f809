"""The pages about speed: time and memory against n, and from which length on each method is faster than SDPA.

skein bench --lengths 512 1024 2048 4096 8192 16384 --records docs/results/speed.jsonl
python -m benchmarks.speed docs/results/speed.jsonl --figure docs/results/speed
"""

import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console

from benchmarks.common import start
from skeinformer.cli.figures import Panel, draw, panel_of, save
from skeinformer.cli.records import Record, key_of, read
from skeinformer.cli.tables import Table, label, real

SETTING = ("mode", "heads", "head_dim", "dtype", "threads", "device")  # what is the same in a panel
MODES = {"forward": "forward", "both": "forward and backward"}


@dataclass(frozen=True)
class Speed:
    """Show from which length each method is faster than SDPA, and draw time and memory against n."""

    records: tyro.conf.Positional[tuple[Path, ...]]
    """Records that `skein bench` wrote."""
    figure: Path | None = None
    """Where to write the figure, without its ending: as .svg and .png."""

    def run(self, console: Console | None = None) -> None:
        """Print the table, and write the figure."""
        records = [r for r in read(*self.records) if r.get("kind") == "bench"]
        table = Table("", ("mode", "method", "faster than SDPA", "exponent"), growth_rows(records))
        table.print(console or Console(highlight=False))
        if self.figure is not None:
            drawing = draw(speed_panels(records))
            for ending in (".svg", ".png"):
                save(drawing, self.figure.with_name(self.figure.name + ending))


def crossover(ns: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Return the length from which a method is faster than SDPA: where SDPA's time / its own passes 1 for good.

    Interpolated on logarithmic axes; the smallest n where it is faster at all, None where it is not at the greatest.
    """
    points = sorted(zip(ns, ratios, strict=True))
    slower = [index for index, (_, value) in enumerate(points) if value <= 1]
    if not slower:
        return float(points[0][0]) if points else None
    if slower[-1] == len(points) - 1:
        return None
    (n1, ratio1), (n2, ratio2) = points[slower[-1] : slower[-1] + 2]
    weight = -math.log(ratio1) / (math.log(ratio2) - math.log(ratio1))
    return math.exp(math.log(n1) + weight * (math.log(n2) - math.log(n1)))


def faster_from(ns: Sequence[int], ratios: Sequence[float]) -> str:
    """Say where a method is faster than SDPA."""
    length = crossover(ns, ratios)
    if length is None:
        return f"not at n = {max(ns):,}"
    if all(value > 1 for value in ratios):
        return "at all n measured" if len(set(ns)) > 1 else f"at n = {ns[0]:,}"
    return f"from n = {length:,.0f}"


def growth_rows(records: Iterable[Record]) -> list[tuple[str, ...]]:
    """Return mode, method, where it is faster, and a in time ~ n^a between the two greatest n, for an example."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    # of an n with several batches the greatest stays
    for record in sorted(records, key=lambda r: (real(r, "n") or 0, real(r, "batch") or 0)):
        groups.setdefault(key_of(record, (*SETTING, "label", "budget")), []).append(record)
    rows: list[tuple[str, ...]] = []
    for group in groups.values():
        times = {real(r, "n") or 1: (real(r, "seconds") or 0) / (real(r, "batch") or 1) for r in group}
        ratios = {int(real(r, "n") or 0): value for r in group if (value := real(r, "ratio")) is not None}
        overtakes = exponent = ""
        if ratios and group[0].get("method") != "sdpa":
            overtakes = faster_from(list(ratios), list(ratios.values()))
        if len(times) > 1:
            (n1, t1), (n2, t2) = list(times.items())[-2:]
            exponent = f"{math.log(t2 / t1) / math.log(n2 / n1):.2f}"
        rows.append((str(group[0]["mode"]), label(group[0]), overtakes, exponent))
    return rows


def speed_panels(records: Sequence[Record]) -> list[Panel]:
    """Make panels of time and memory for an example against n, for each mode, at the largest d."""
    groups: dict[tuple[object, ...], list[Record]] = {}
    for record in sorted(records, key=lambda r: (r.get("mode") != "forward", real(r, "n") or 0)):
        groups.setdefault(key_of(record, SETTING), []).append(record)
    panels = []
    for setting, rows in groups.items():
        largest = max((d for r in rows if (d := real(r, "budget"))), default=None)
        kept = [r for r in rows if real(r, "budget") in (None, largest)]
        for field, name, unit in (("seconds", "time", 1e3), ("peak_bytes", "peak memory", 1 / 2**20)):
            titles = (
                f"{name}, {MODES[str(setting[0])]}",
                "length n",
                f"{name} per example, {'ms' if unit > 1 else 'MiB'}",
            )

            def per_example(r: Record, field: str = field, unit: float = unit) -> float:
                return (real(r, field) or 0) / (real(r, "batch") or 1) * unit

            panels.append(panel_of(kept, lambda r: real(r, "n"), per_example, titles))
    panels = [panel for panel in panels if panel.lines]
    return panels


if __name__ == "__main__":
    sys.exit(start(Speed))
