"""Images of Pathfinder beside their paddles: `python -m skeinformer.lab.report.pathfinder_sheet FILE.png [seed]`."""

import sys
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from skeinformer.lab.files import write_whole
from skeinformer.lab.lra.pathfinder import Drawing, draw_image
from skeinformer.lab.report.families import FAMILIES
from skeinformer.lab.report.figures import PNG_DOTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS, PAIRS = 4, 3  # an image and its paddles are a pair
PANEL = 1.5  # inches
SNAKES = (FAMILIES["skeinformer"], FAMILIES["cluster"])
DISTRACTOR, DISK = "#a0a0a0", "#202020"
TITLES = ("0: two snakes", "1: one snake")  # by label


def write_sheet(path: Path, seed: int = 0) -> Path:
    """A sheet of images with alternating labels, as a png."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 * PAIRS * PANEL, ROWS * (PANEL + 0.2)), layout="constrained")
    axes = figure.subplots(ROWS, 2 * PAIRS).reshape(-1, 2)
    for index, (left, right) in enumerate(axes):
        drawing = draw_image(np.random.default_rng((seed, index)), index % 2)
        left.imshow(drawing.image, cmap="gray", vmin=0, vmax=255)
        left.set_title(TITLES[drawing.label], fontsize=9)
        _draw_paddles(right, drawing)
        for panel in (left, right):
            panel.set(xticks=[], yticks=[])
    png = BytesIO()
    figure.savefig(png, format="png", dpi=PNG_DOTS, facecolor="white")
    return write_whole(png.getvalue(), path)


def _draw_paddles(axes: "Axes", drawing: Drawing) -> None:
    groups = [*zip(drawing.snakes, SNAKES, strict=True), *((snake, DISTRACTOR) for snake in drawing.distractors)]
    for snake, color in groups:
        for paddle in snake:
            axes.plot(paddle[:, 1], paddle[:, 0], color=color, linewidth=1.8, solid_capstyle="butt")
    axes.plot(drawing.markers[:, 1], drawing.markers[:, 0], "o", color=DISK, markersize=6, fillstyle="none")
    size = len(drawing.image)
    axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), aspect="equal")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    print(write_sheet(Path(sys.argv[1]), *map(int, sys.argv[2:])))
