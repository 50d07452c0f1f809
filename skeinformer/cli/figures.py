"""Panels of lines on logarithmic axes, drawn by matplotlib: for the report, and as .svg and .png files."""

from collections.abc import Callable, Iterable, Sequence
from io import BytesIO
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from skeinformer.cli.records import Record, write_file
from skeinformer.cli.tables import label, real

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# after Okabe and Ito, safe for the colour-blind; exact attention and the two sketches have colours of their own
OWN = {"Cluster sketch": "#1f7ac4", "Skeinformer": "#d55e00", "Standard": "black"}
COLORS = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#8a8f98")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # as many as share no divisor with the colours: 35 pairs
PANEL = (4.6, 3.5)  # inches
SETTINGS: Any = {"svg.fonttype": "none", "svg.hashsalt": "skeinformer", "font.size": 9}


class Line(NamedTuple):
    """A method's points. Without x it is a horizontal line: a method without a budget."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float | None] = ()


class Panel(NamedTuple):
    """What one pair of axes shows. `marked` is an x with a vertical line, and its name."""

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_ticks: Sequence[float] = ()
    marked: tuple[float, str] | None = None


def panel_of(
    records: Iterable[Record],
    x: Callable[[Record], float | None],
    y: Callable[[Record], float | None],
    titles: tuple[str, str, str],
    *,
    name: Callable[[Record], str] = label,
    error: str = "",
    ticks: bool = True,
) -> Panel:
    """Make a panel with a line for each name, through its records in their order that have a positive y.

    Args:
        records: What is drawn.
        x: Gives the place on the horizontal axis; a name whose records have none becomes a horizontal line.
        y: Gives the height.
        titles: Of the panel, the horizontal and the vertical axis.
        name: Gives the line that a record belongs to.
        error: The field that has the length of an error bar.
        ticks: Whether each x has a tick.

    Returns:
        The panel.

    Example:
        >>> record = {"label": "A", "n": 8, "error": 0.5}
        >>> panel_of([record], lambda r: r["n"], lambda r: r["error"], ("", "n", "error")).x_ticks
        [8]
    """
    points: dict[str, list[tuple[float | None, float, float | None]]] = {}
    for record in records:
        if height := y(record):
            points.setdefault(name(record), []).append((x(record), height, real(record, error)))
    lines = []
    for text, found in points.items():
        places = [place for place, _, _ in found if place is not None]
        lines.append(Line(text, places, [height for _, height, _ in found], [bar for _, _, bar in found]))
    return Panel(*titles, lines, sorted({place for line in lines for place in line.x}) if ticks else [])


def draw(panels: Sequence[Panel], columns: int = 2) -> "Figure":
    """Draw the panels, `columns` side by side, above one legend."""
    import matplotlib
    from matplotlib.figure import Figure

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    labels = list(dict.fromkeys(line.label for panel in panels for line in panel.lines))
    looks = _looks(labels)
    legend_columns = max(1, int(columns * PANEL[0] / (0.5 + 0.08 * max(map(len, labels), default=1))))
    legend_rows = -(-len(labels) // legend_columns)
    with matplotlib.rc_context(SETTINGS):
        size = (columns * PANEL[0], rows * PANEL[1] + 0.2 * legend_rows)
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel, looks)
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        handles = {
            text: handle for axes in grid for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        style: Any = {"loc": "outside lower center", "ncols": legend_columns, "frameon": False}
        figure.legend(handles.values(), handles.keys(), **style)
    return figure


def svg(figure: "Figure") -> str:
    """Return the figure as an svg element, the same for the same content."""
    import matplotlib

    file = BytesIO()
    with matplotlib.rc_context(SETTINGS):
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue().decode()
    return text[text.index("<svg") :]


def save(figure: "Figure", path: Path) -> Path:
    """Write the figure as .svg or .png, and return the path."""
    if path.suffix == ".svg":
        return write_file(path, svg(figure))
    if path.suffix != ".png":
        raise ValueError(f"{path} ends in {path.suffix!r}; a figure is written as .svg or .png")
    file = BytesIO()
    figure.savefig(file, format="png", dpi=160, facecolor="white")
    return write_file(path, file.getvalue())


def _looks(labels: Sequence[str]) -> dict[str, dict[str, Any]]:
    """A colour and a mark for each label, different up to some thirty."""
    colors, looks = cycle(COLORS), {}
    for text, marker in zip(labels, cycle(MARKERS), strict=False):
        own = next((color for name, color in OWN.items() if text.startswith(name)), "")
        width = 2.2 if text.partition(", d = ")[0] in OWN else 1.0
        looks[text] = {"color": own or next(colors), "marker": marker, "linewidth": width}
        if text == "SDPA":
            looks[text] = {"color": "black", "linestyle": "--", "linewidth": 1.0}
    return looks


def _draw_panel(axes: "Axes", panel: Panel, looks: dict[str, dict[str, Any]]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set(xscale="log", yscale="log", xlabel=panel.x_label, ylabel=panel.y_label)
    axes.set_title(panel.title, fontsize=10)
    for line in panel.lines:
        if line.x:
            errors = [0.0 if e is None else e for e in line.error] or None
            axes.errorbar(line.x, line.y, yerr=errors, label=line.label, markersize=5, **looks[line.label])
        else:
            axes.axhline(line.y[0], label=line.label, **{**looks[line.label], "marker": ""})
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        # a short axis has few powers of ten
        few = MaxNLocator(nbins=6, steps=[1, 2, 5, 10]) if high < 5 * low else LogLocator(subs=(1, 2, 5))
        if high < 100 * low:
            axis.set_major_locator(few)
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    if panel.x_ticks:
        axes.xaxis.set_major_locator(FixedLocator(list(panel.x_ticks)))
    if panel.marked is not None:
        axes.axvline(panel.marked[0], color="black", linestyle=":", linewidth=1)
        axes.annotate(panel.marked[1], (panel.marked[0], 1), xycoords=axes.get_xaxis_transform(), ha="right", va="top")
    axes.grid(alpha=0.2)
