"""Draw what a block of queries sees with a window, docs/figures/near.svg: `python docs/figures/near.py`."""

from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

BLOCKS, WIDTH, OWN = 9, 4, 4  # blocks of keys, keys of a block, the block that is drawn
INK, NEAR, CLUSTERS = "#24292f", "#0b5cad", ("#e07b39", "#3c9d6b", "#9a6bb8")
FAR = "012021100221222101210012"  # the clusters of the far keys
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "near", "font.size": 11, "font.family": "sans-serif"}


def draw() -> Figure:
    """Keys on top, what the block sees below, its queries at the bottom."""
    figure = Figure(figsize=(5.2, 3.55))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.5, 45), ylim=(-1.9, 29.2), aspect="equal")
    axes.axis("off")

    def cells(x: float, y: float, colours: list[str]) -> None:
        for i, colour in enumerate(colours):
            axes.add_patch(Rectangle((x + i, y), 0.85, 1.7, color=colour))

    def text(x: float, y: float, words: str, colour: str = INK) -> None:
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
        axes.text(x, y, words, color=colour, ha="center", va="center", bbox=background)

    def line(start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
        axes.plot(*zip(start, end, strict=True), color=colour, linewidth=0.8, alpha=0.6, zorder=0)

    text(22.2, 28.3, "all keys, in blocks of w")
    far = iter(FAR)
    at: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for block in range(BLOCKS):
        x = block * (WIDTH + 1)
        if abs(block - OWN) <= 1:
            cells(x, 24.5, [NEAR] * WIDTH)
            continue
        clusters = [int(next(far)) for _ in range(WIDTH)]
        cells(x, 24.5, [CLUSTERS[c] for c in clusters])
        for i, c in enumerate(clusters):
            at[c].append(x + i + 0.4)
    left = (OWN - 1) * (WIDTH + 1)
    seen = left + 1  # of the near keys
    for upper, lower in ((left, seen), (left + 3 * WIDTH + 2, seen + 3 * WIDTH)):
        line((upper, 24.3), (lower, 15), NEAR)
        line((lower, 12.8), (22, 3.4), NEAR)
    cells(seen, 13, [NEAR] * 3 * WIDTH)
    for c, middle in enumerate((3.5, 7, 36.5)):
        for key in at[c]:
            line((key, 24.3), (middle, 13.9), CLUSTERS[c])
        axes.add_patch(Circle((middle, 13.9), 0.5 + 0.06 * len(at[c]), color=CLUSTERS[c]))
        line((middle, 12.8), (22, 3.4), CLUSTERS[c])
    text(22.2, 10.4, "3 w near keys, exactly", NEAR)
    text(5.6, 10.4, "far keys as\nmeans of clusters")
    cells(20.1, 1.5, [INK] * WIDTH)
    text(22.2, -0.7, "a block of w queries")
    return figure


if __name__ == "__main__":
    with matplotlib.rc_context(SETTINGS):
        draw().savefig(Path(__file__).with_suffix(".svg"), facecolor="white", metadata={"Date": None})
