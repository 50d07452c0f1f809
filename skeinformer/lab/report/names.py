"""Names beside the lines of a panel, placed so that none lies on another."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from skeinformer.lab.report.svg import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

LABEL = 8.0  # points
GAP = 7.0  # points between the end of a line and its name
# places of a name around its point, in points, as (up, right): the near ones first
AROUND = [(up - LABEL / 2, right) for up in sorted(range(-72, 73, 8), key=abs) for right in (GAP, -GAP)]
FAR = 0.2  # hidden points that a name may cost by moving one point of height

Box = tuple[float, float, float, float]  # left, bottom, right, top


def name_lines(
    axes: "Axes",
    names: Sequence[tuple[str, str]],
    ends: Sequence[tuple[float, float]],
    obstacles: "NDArray[np.float64]",
    *,
    beside: bool,
    paper: str | None = None,
) -> None:
    """Write each name, given with its gid, at the end of its line, a point in data coordinates.

    `beside`: in a column to the right, in the order of the ends. Otherwise close to the end, where it hides the fewest
    `obstacles`, (points, 2) in pixels. A thin line leads from a name that had to move to its end. `paper` is the colour
    around the letters, where no style sheet gives it.
    """
    from matplotlib.patheffects import withStroke

    dots = axes.figure.dpi / 72  # per point
    points = [tuple(axes.transData.transform(end)) for end in ends]
    sizes = [(dots * width, dots * height) for width, height in (extent(option_on_own_line(name)) for name, _ in names)]
    frame = axes.get_window_extent()
    inside = (frame.x0, frame.y0, frame.x1, frame.y1)
    places = _column(points, sizes, inside, dots) if beside else _around(points, sizes, inside, dots, obstacles)
    to_figure = axes.figure.transFigure.inverted()
    for (name, gid), end, point, size, (left, bottom) in zip(names, ends, points, sizes, places, strict=True):
        moved = abs(bottom + size[1] / 2 - point[1]) > 6 * dots
        side = 0.0 if left > point[0] else 1.0
        note = axes.annotate(
            option_on_own_line(name),
            end,
            xytext=tuple(to_figure.transform((left, bottom))),
            textcoords="figure fraction",
            color=INK,
            fontsize=LABEL,
            gid=gid,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": INK, "alpha": 0.6, "linewidth": 0.6, "relpos": (side, 0.5)}
            | {"shrinkA": 1, "shrinkB": 3, "gid": gid}
            if moved
            else None,
        )
        if paper:
            note.set_path_effects([withStroke(linewidth=2.5, foreground=paper)])


def option_on_own_line(name: str) -> str:
    """A name with its first option on a line of its own."""
    return name.replace(", ", ",\n", 1)


def extent(text: str) -> tuple[float, float]:
    """About how wide and high a text is, in points."""
    lines = text.split("\n")
    return 0.55 * LABEL * max(map(len, lines)), 1.25 * len(lines) * LABEL


def _column(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], inside: Box, dots: float
) -> list[tuple[float, float]]:
    """Left and bottom of each name in one column, each at the height of its point or as near as the others allow."""
    if not points:
        return []
    order = sorted(range(len(points)), key=lambda i: -points[i][1])
    heights = [sizes[i][1] + 2 * dots for i in order]
    wanted = [points[i][1] for i in order]
    # pushed down by those above, pushed up by those below: halfway between they are apart too
    middle = [(x + y) / 2 for x, y in zip(_down(wanted, heights), _up(wanted, heights), strict=True)]
    middle[-1] = max(middle[-1], inside[1] + heights[-1] / 2)
    middle = _up(middle, heights)
    middle[0] = min(middle[0], inside[3] - heights[0] / 2)
    middle = _down(middle, heights)
    left = max(x for x, _ in points) + GAP * dots
    found = {i: (left, y - sizes[i][1] / 2) for i, y in zip(order, middle, strict=True)}
    return [found[i] for i in range(len(points))]


def _down(centres: Sequence[float], heights: Sequence[float]) -> list[float]:
    """The centres of names from the top, each as high as given or just below the one before."""
    found: list[float] = []
    for i, y in enumerate(centres):
        found.append(y if not found else min(y, found[-1] - (heights[i - 1] + heights[i]) / 2))
    return found


def _up(centres: Sequence[float], heights: Sequence[float]) -> list[float]:
    """The same from the bottom: each as low as given or just above the one below."""
    return [-y for y in reversed(_down([-y for y in reversed(centres)], heights[::-1]))]


def _around(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    inside: Box,
    dots: float,
    obstacles: "NDArray[np.float64]",
) -> list[tuple[float, float]]:
    """Left and bottom of each name near its point."""
    taken: list[Box] = []
    for (x, y), (width, height) in zip(points, sizes, strict=True):
        costs: dict[Box, float] = {}
        for up, right in AROUND:
            left, bottom = x + right * dots - (width if right < 0 else 0), y + up * dots
            box = (left, bottom, left + width, bottom + height)
            costs[box] = _cost(box, inside, taken, obstacles) + FAR * abs(up)
        taken.append(min(costs, key=costs.__getitem__))
    return [(left, bottom) for left, bottom, _, _ in taken]


def _cost(box: Box, inside: Box, taken: Sequence[Box], obstacles: "NDArray[np.float64]") -> float:
    """How many obstacles a name would hide; far more if it leaves the frame or lies on another name."""
    left, bottom, right, top = box
    outside = left < inside[0] or bottom < inside[1] or right > inside[2] or top > inside[3]
    over = sum(left < x1 and x0 < right and bottom < y1 and y0 < top for x0, y0, x1, y1 in taken)
    hidden = ((obstacles > (left, bottom)) & (obstacles < (right, top))).all(-1).sum()
    return 1000.0 * (int(outside) + over) + float(hidden)
