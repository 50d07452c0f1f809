"""A map of errors, a row for each layer and a column for each head: teal up to the tolerance, brown above it."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from skeinformer.compare.format import number
from skeinformer.compare.record import Record
from skeinformer.compare.text import shared_name, shown_layer
from skeinformer.lab.report.format import distinct, real
from skeinformer.lab.report.tables import boxed

# after Brewer's BrBG, safe for the colour-blind: the error over the tolerance is at most so much, and its colour
STEPS = (
    (0.25, "#01665e"),
    (0.5, "#35978f"),
    (0.75, "#80cdc1"),
    (1.0, "#c7eae5"),
    (1.5, "#f6e8c3"),
    (2.0, "#dfc27d"),
    (3.0, "#bf812d"),
    (math.inf, "#8c510a"),
)
DARK_INK, LIGHT_INK = "#1b1f24", "#ffffff"
LEVEL = 0.179  # the luminance at which black and white letters are equally clear


def heat_html(layers: Sequence[Record], tolerance: float, heading: str = "", data: Mapping[str, str] = {}) -> str:
    """The errors of all layers and heads as a table in a box that scrolls; colours are the same on light and dark."""
    names = list(dict.fromkeys(shown_layer(record) for record in layers))
    shared, short = shared_name(names)
    cells = {(shown_layer(record), record.get("head")): record for record in layers}
    heads = [int(head or 0) for head in distinct(layers, "head")]
    columns = [None, *heads]
    titles = "".join(f"<th scope='col'>{'all' if head is None else head}</th>" for head in columns)
    rows = []
    for name in names:
        found = "".join(_cell(cells.get((name, head)), tolerance, head is None) for head in columns)
        rows.append(f"<tr><td class='word' title=\"{escape(name)}\">{escape(short[name])}</td>{found}</tr>")
    head = f"<thead><tr><th scope='col' class='word'>layer</th>{titles}</tr></thead>"
    table = f"<table class='heat'>\n{head}\n<tbody>\n{chr(10).join(rows)}\n</tbody>\n</table>"
    note = f"Error of each head, and of all heads of a layer together. Layers: {shared or 'by name'}."
    return f"{boxed(table, heading, data, note)}\n{scale_html(tolerance)}"


def scale_html(tolerance: float) -> str:
    """The legend: the error up to which each colour goes."""
    parts = []
    for most, color in STEPS:
        text = f"above {number(STEPS[-2][0] * tolerance)}" if most == math.inf else f"to {number(most * tolerance)}"
        parts.append(f"<span style='background:{color};color:{ink_on(color)}'>{text}</span>")
    return f"<p class='scale'>error {''.join(parts)} the tolerance is {number(tolerance)}</p>"


def color_of(error: float, tolerance: float) -> str:
    """The colour of an error: the first whose step it does not exceed."""
    return next(color for most, color in STEPS if error <= most * tolerance)


def ink_on(color: str) -> str:
    """Black or white letters, whichever are clearer on the colour."""
    return DARK_INK if luminance(color) > LEVEL else LIGHT_INK


def luminance(color: str) -> float:
    """The relative luminance of #rrggbb, from 0 to 1."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _cell(record: Record | None, tolerance: float, whole: bool) -> str:
    error = None if record is None else real(record, "error")
    if error is None:
        return "<td></td>"
    color = color_of(error, tolerance)
    kind = " class='whole'" if whole else ""
    return f"<td{kind} style='background:{color};color:{ink_on(color)}'>{_short(error)}</td>"


def _short(error: float) -> str:
    """Two decimals, or three digits of a large one."""
    return f"{error:.2f}" if error < 10 else number(error)
