"""Figures and tables of docs/ from records: error against d and time, and the methods of least error by time."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.common import markdown
from skeinformer.attention import METHODS
from skeinformer.cli.figures import Panel, draw, panel_of, save
from skeinformer.cli.records import Record, Value, key_of, write_file
from skeinformer.cli.tables import count, label, number, real

INPUTS = ("model", "text", "weights", "layer", "n", "device")  # where queries, keys and values come from
CASE = ("model", "n", "method", "options", "budget", "device")
PASSES = {"both": "forward and backward", "forward": "forward"}
RATIO = "spectral_to_vmean"
MOST = {RATIO: 1.1}  # of errors over V-mean's: what is far above would hide the small differences
AXES = {"spectral": "spectral error |BV - R|", RATIO: "spectral error / V-mean's"}
MADE: tuple[str, ...] = (
    "model",
    "text",
    "weights",
    "layer",
    "n",
    "budget",
    "batch",
    "heads",
    "head_dim",
    "trials",
    "rounds",
    "seed",
)
MADE = (*MADE, "started", "cpu", "cores", "threads", "torch", "python", "skeinformer", "commit", "command")
FRONTIER = (
    "The frontier: what has the least error in so much time, as a share of SDPA's; no faster method is as accurate. "
    "Means of errors and medians of times are compared as they are."
)


class Point(NamedTuple):
    """A method at one sample size: its cost (time as a share of SDPA's, or FLOPs) and its error."""

    name: str
    cost: float
    error: float
    ours: bool = False


Inputs = Mapping[tuple[Value, ...], Sequence[Record]]


def write_approximation(
    summaries: Sequence[Record],
    records: Sequence[Record],
    folder: Path | None,
    page: Path | None,
    layer: int | None = None,
) -> list[Path]:
    """Write the figures into a folder, each as .svg and .png, and the frontiers as a Markdown page."""
    inputs, written = group_inputs(summaries, records), []
    if not inputs:
        raise ValueError("there are no records of errors; measure them first")
    if folder is not None:
        for name, panels in panels_of(inputs, layer).items():
            if panels:
                figure = draw(panels)
                written += [save(figure, folder / f"{name}{ending}") for ending in (".svg", ".png")]
    if page is not None:
        written.append(write_file(page, frontiers(inputs, records)))
    return written


def panels_of(inputs: Inputs, layer: int | None = None) -> dict[str, list[Panel]]:
    """Return the panels of each figure: of one layer, the first by default, and error-time of the greatest n."""
    chosen = min(int(key[3] or 0) for key in inputs) if layer is None else layer
    of_layer = {key: rows for key, rows in inputs.items() if int(key[3] or 0) == chosen}
    if not of_layer:
        raise ValueError(f"there are no records of layer {layer}")
    # pretrained weights where there are such, and the greatest n
    last = max(of_layer, key=lambda key: (key[2] == "pretrained", int(key[4] or 0)))
    alike = {key: rows for key, rows in of_layer.items() if key_part(key) == key_part(last)}
    return {
        "error-time": error_time_panels({last: of_layer[last]}, "both"),
        "error-time-forward": error_time_panels({last: of_layer[last]}, "forward"),
        "figure1": figure_1_panels(alike, "spectral"),
        "figure1-ratio": figure_1_panels(alike, RATIO),
    }


def key_part(key: tuple[Value, ...]) -> tuple[Value, ...]:
    """Return model, text and layer of an input."""
    return key[0], key[1], key[3]


def group_inputs(summaries: Iterable[Record], records: Iterable[Record]) -> dict[tuple[Value, ...], list[Record]]:
    """Group the means by INPUTS, with times and FLOPs added: initialized weights first, then by layer and n.

    Times depend on sizes alone, so that those measured on one layer serve all.
    """
    costs = {key_of(r, CASE): r for r in records if r.get("kind") == "approx_time"}
    found: dict[tuple[Value, ...], list[Record]] = {}
    for summary in summaries:
        cost = costs.get(key_of(summary, CASE), {})
        times = {f"{name}_ratio": cost.get(f"{name}_ratio") for name in PASSES}
        found.setdefault(key_of(summary, INPUTS), []).append({**summary, **times, "flops": cost.get("flops")})
    order = sorted(found, key=lambda key: tuple((x is None, isinstance(x, str), x or 0) for x in key))
    return {key: found[key] for key in order}


def title_of(key: tuple[Value, ...], inputs: Inputs) -> str:
    """Name an input: weights and n always, the other fields where they differ."""
    several = [len({other[i] for other in inputs}) > 1 for i in range(len(INPUTS))]
    model, text, weights, layer, n, device = key
    parts = [str(weights or ""), f"n = {count(n)}", f"layer {layer}"]
    parts += [str(x) for x, differs in ((model, several[0]), (text, several[1])) if differs]
    parts += [f"on {device or 'cpu'}"] if several[5] else []
    return ", ".join(part for part in parts if part)


def figure_1_panels(inputs: Inputs, name: str) -> list[Panel]:
    """Make a panel for each input: error against d, with bars of one standard error."""
    panels = []
    for key, rows in inputs.items():
        most = MOST.get(name)
        shown = [r for r in rows if most is None or (is_approximation(r) and (real(r, name) or most + 1) <= most)]
        titles = (title_of(key, inputs), "sample size d", AXES[name])
        by_budget, value = partial(real, name="budget"), partial(real, name=name)
        panels.append(panel_of(approximations(shown), by_budget, value, titles, error=f"{name}_se"))
    return [panel for panel in panels if panel.x_ticks]


def error_time_panels(inputs: Inputs, direction: str) -> list[Panel]:
    """Make a panel for each input: relative spectral error against time, a line over d for each method."""
    panels = []
    for key, rows in inputs.items():
        titles = (title_of(key, inputs), f"time {PASSES[direction]} / SDPA's", "relative spectral error")
        timed = [r for r in approximations(rows) if real(r, f"{direction}_ratio")]
        ratio, error = partial(real, name=f"{direction}_ratio"), partial(real, name="spectral_relative")
        panels.append(panel_of(timed, ratio, error, titles, ticks=False)._replace(marked=(1.0, "exact (SDPA)")))
    return [panel for panel in panels if panel.lines]


def approximations(rows: Iterable[Record]) -> list[Record]:
    """Return the records of all methods but exact attention, by growing d."""
    return sorted((r for r in rows if r.get("method") != "softmax"), key=lambda r: real(r, "budget") or 0)


def is_approximation(record: Record) -> bool:
    """Return whether the method is not exact attention itself."""
    entry = METHODS.get(str(record.get("method")))
    return entry is None or entry.exact_from != 0


def points_of(rows: Iterable[Record], cost: str) -> list[Point]:
    """Return every approximation whose error and cost are known; ours is the cluster sketch."""
    return [
        Point(label(r) + (f", d = {r['budget']}" if r.get("budget") else ""), x, y, r.get("method") == "cluster")
        for r in rows
        if is_approximation(r) and (x := real(r, cost)) is not None and (y := real(r, "spectral_relative")) is not None
    ]


def frontier(points: Iterable[Point]) -> list[Point]:
    """Return the points that no other beats, by growing time; the exact kernel is the last."""
    kept: list[Point] = []
    for point in sorted({*points, Point("exact (SDPA)", 1.0, 0.0)}, key=lambda p: (p.cost, p.error)):
        if not kept or point.error < kept[-1].error:
            kept.append(point)
    return kept


def beaten(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return our points that another method beats with a smaller error at no more cost, each with the most accurate."""
    found = []
    for ours in (point for point in points if point.ours):
        better = [p for p in points if not p.ours and p.cost <= ours.cost and p.error < ours.error]
        found += [(ours, min(better, key=lambda p: p.error))] if better else []
    return found


def frontiers(inputs: Inputs, records: Sequence[Record]) -> str:
    """Return a Markdown page: for each pass and input the methods of least error by time, and how it was made."""
    parts = ["# Error against time", FRONTIER]
    for direction, name in PASSES.items():
        for key, rows in inputs.items():
            points = points_of(rows, f"{direction}_ratio")
            if points:
                table = [[number(p.cost), p.name, number(p.error)] for p in frontier(points)]
                parts += [f"## {title_of(key, inputs)}, {name}"]
                parts += [markdown(("time / SDPA", "method", "relative spectral error"), table), verdict(points)]
    if total := sum(p.ours for rows in inputs.values() for p in points_of(rows, "flops")):
        lost = beaten_by_multiply_adds(inputs)[0]
        parts.append(f"By multiply-adds of the forward pass, in place of time: {lost} of {total} sizes are beaten.")
    made = []
    for name in MADE:
        values = list(dict.fromkeys(str(r[name]) for r in records if r.get(name) is not None))
        if name == "started" and len(values) > 2:
            values = [f"{min(values)} to {max(values)}"]
        made += [f"- {name.replace('_', ' ')}: {', '.join(values)}"] if values else []
    return "\n\n".join([*(part for part in parts if part), "## How it was made", "\n".join(made)]) + "\n"


def verdict(points: Sequence[Point]) -> str:
    """Say how many sizes of the cluster sketch another method beats; nothing where ours is not among the points."""
    ours, lost = [p for p in points if p.ours], beaten([*points, Point("exact (SDPA)", 1.0, 0.0)])
    if not ours:
        return ""
    by = "; ".join(f"{p.name} ({number(p.error)}) by {q.name} ({number(q.error)})" for p, q in lost)
    return (
        f"Sizes of the cluster sketch that another method beats: {len(lost)} of {len(ours)}{f': {by}' if by else ''}."
    )


def beaten_by_multiply_adds(inputs: Inputs) -> tuple[int, int]:
    """Count our points that another method beats by FLOPs in place of time, and all our points."""
    fields = [points_of(rows, "flops") for rows in inputs.values()]
    return sum(len(beaten(points)) for points in fields), sum(p.ours for points in fields for p in points)
