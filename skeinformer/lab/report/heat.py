"""A map of errors, a row for each layer and a column for each head: teal up to the tolerance, brown above it."""

import math
from collections.abc import Mapping, Sequence
from html import escape

from skeinformer.comparison.measure import Record
from skeinformer.comparison.result import layer_name
from skeinformer.lab.report.format import distinct, number, real
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
    names = list(dict.fromkeys(layer_name(record) for record in layers))
    shared, short = shared_name(names)
    cells = {(layer_name(record), record.get("head")): record for record in layers}
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


def shared_name(names: Sequence[str]) -> tuple[str, dict[str, str]]:
    """Find the pattern that all names share, and the short name of each: encoder.layer.*.self, and 5.

    Words between dots are not divided. Return an empty pattern, and the names themselves, where they share no word.
    """
    words = [name.split(".") for name in dict.fromkeys(names)]
    most = min(map(len, words)) - 1  # a short name has at least one word
    first = _num_equal([parts[:most] for parts in words])
    last = _num_equal([parts[::-1][: most - first] for parts in words])
    if len(words) < 2 or not first + last:
        return "", {name: name for name in names}
    parts = words[0]
    pattern = ".".join([*parts[:first], "*", *parts[len(parts) - last :]])
    return pattern, {".".join(parts): ".".join(parts[first : len(parts) - last]) for parts in words}


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


def _num_equal(lists: Sequence[Sequence[str]]) -> int:
    """Count the leading items that are the same in all lists."""
    same = [len(set(items)) == 1 for items in zip(*lists, strict=False)]
    return same.index(False) if False in same else len(same)
