"""The frontier of error and time: which methods have the least error in a given time, and where ours do not.

Time is a share of that of torch's exact kernel (SDPA), which is a point itself: nothing slower is worth its error.
Means and medians are compared as they are; what lies within their spread is not told apart.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from skeinformer.lab.records import Record
from skeinformer.lab.report.format import is_approximation, label, number, real
from skeinformer.lab.report.tables import Column, table_html, table_markdown

JUDGED = "cluster"  # the method, with any options, that `verdict` is about


class Point(NamedTuple):
    """A method at one sample size."""

    label: str
    budget: int | None
    time: float  # as a share of the exact kernel's
    error: float
    ours: bool = False
    method: str = ""

    def beats(self, other: "Point") -> bool:
        """Is it as fast and as accurate, and one of the two is better?"""
        return self.time <= other.time and self.error <= other.error and self[2:4] != other[2:4]

    def __str__(self) -> str:
        return self.label + (f", d = {self.budget}" if self.budget else "")


EXACT_POINT = Point("exact (SDPA)", None, 1.0, 0.0)
COLUMNS = (
    Column("time / SDPA", lambda r: number(r["time"]), field="time"),
    Column("method", lambda r: str(r["point"])),
    Column("relative spectral error", lambda r: number(r["error"]), field="error"),
)


def approximations(rows: Iterable[Record], direction: str) -> list[Point]:
    """Every approximation of which error and time are known; `direction` is "forward" or "both"."""
    found = []
    for row in rows:
        time, error, budget = real(row, f"{direction}_ratio"), real(row, "spectral_relative"), real(row, "budget")
        if time is not None and error is not None and is_approximation(row):
            size = None if budget is None else int(budget)
            method = str(row.get("method"))
            found.append(Point(label(row), size, time, error, method == JUDGED, method))
    return found


def frontier(field: Iterable[Point]) -> list[Point]:
    """The points that no other beats, by growing time and falling error; the exact kernel is the last."""
    kept: list[Point] = []
    for point in sorted(
        {*field, EXACT_POINT}, key=lambda point: (point.time, point.error, point.label, point.budget or 0)
    ):
        if not kept or point.error < kept[-1].error:
            kept.append(point)
    return kept


def lost(field: Sequence[Point]) -> dict[Point, Point]:
    """Those of ours that another method beats, each with the most accurate one that does."""
    others = [point for point in (*field, EXACT_POINT) if not point.ours]
    beaten = {}
    for point in field:
        better = [other for other in others if other.beats(point)]
        if point.ours and better:
            beaten[point] = min(better, key=lambda other: (other.error, other.time))
    return beaten


def gaps(field: Sequence[Point]) -> list[tuple[Point, float]]:
    """Where ours are not the best: the best point of another method, and the time from which a better one is known.

    Times at which nothing of ours is fast enough, and the exact kernel's own, are left out.
    """
    line = frontier(field)
    first = min((point.time for point in field if point.ours), default=math.inf)
    ends = [*(point.time for point in line[1:]), math.inf]
    return [(point, end) for point, end in zip(line, ends, strict=True) if not point.ours and first < end < math.inf]


def verdict(field: Sequence[Point]) -> str:
    """Are ours on the frontier at every size and time, and if not, where? Nothing if ours are not among the points."""
    ours = [point for point in field if point.ours]
    if not ours:
        return ""
    beaten, better = lost(field), gaps(field)
    if not beaten and not better:
        fastest = min(ours, key=lambda point: point.time)
        return (
            f"No other method beats the cluster sketch at any of its {len(ours)} sizes, and from the time of its "
            f"fastest, {number(fastest.time)}, to that of the exact kernel none has a smaller error."
        )
    losses: dict[Point, list[str]] = {}
    for point, other in sorted(beaten.items(), key=lambda pair: pair[0].time):
        losses.setdefault(other, []).append(_place(point))
    parts = [f"sizes of the cluster sketch that another method beats: {len(beaten) or 'none'} of {len(ours)}"]
    parts += [f"by {_place(other)}: {', '.join(places)}" for other, places in losses.items()]
    parts += [f"from {number(point.time)} to {number(end)} {point} has the least error" for point, end in better]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def frontier_html(field: Sequence[Point]) -> str:
    """The frontier as a table."""
    return table_html(_rows(field), COLUMNS, rival=lambda record: False)


def frontier_markdown(field: Sequence[Point]) -> str:
    """The same as markdown, with the verdict below."""
    table = table_markdown(_rows(field), COLUMNS, rival=lambda record: False)
    return "\n\n".join(part for part in (table, verdict(field)) if part)


def _rows(field: Sequence[Point]) -> list[Record]:
    return [
        {"time": point.time, "error": point.error, "point": str(point), "method": point.method}
        for point in frontier(field)
    ]


def _place(point: Point) -> str:
    return f"{point} (error {number(point.error)} in {number(point.time)})"
