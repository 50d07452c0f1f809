"""Names beside lines do not lie on each other, keep the order of the lines, and stay inside the frame."""

from itertools import pairwise

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

import numpy as np
from matplotlib.figure import Figure
from matplotlib.text import Text

from skeinformer.lab.report.names import name_lines

NAMES = ["A", "B, an option", "C", "D", "E, option"]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("heights", [[5, 5.01, 5.02, 5.03, 5.04], [0, 0, 0, 0.1, 10], [9.9, 10, 10, 10, 10]])
def test_names_do_not_overlap(beside: bool, heights: list[float]) -> None:
    figure = Figure(figsize=(5, 4))
    axes = figure.add_axes((0.1, 0.1, 0.8, 0.8), xlim=(0, 10), ylim=(0, 10))
    ends = [(5.0, y) for y in heights]
    name_lines(axes, [(name, name) for name in NAMES], ends, np.zeros((0, 2)), beside=beside)
    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    boxes = [Text.get_window_extent(text) for text in axes.texts]  # without the lines that lead to them
    assert [text.get_text().replace("\n", " ") for text in axes.texts] == NAMES
    for i, box in enumerate(boxes):
        assert frame.y0 - 3 <= box.y0
        assert box.y1 <= frame.y1 + 3
        assert not any(box.overlaps(other) for other in boxes[:i])
    if beside:
        order = sorted(range(len(NAMES)), key=lambda i: heights[i])
        assert all(boxes[i].y0 <= boxes[j].y0 for i, j in pairwise(order) if heights[i] < heights[j])
