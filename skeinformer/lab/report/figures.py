"""Panels of lines on logarithmic axes: inside the page, where its filters hide and show the series, and as files."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from io import BytesIO
from itertools import cycle, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from skeinformer.lab.files import write_whole
from skeinformer.lab.records import Record
from skeinformer.lab.report.families import FAMILIES
from skeinformer.lab.report.format import REFERENCE, label
from skeinformer.lab.report.names import LABEL, extent, name_lines, option_on_own_line
from skeinformer.lab.report.svg import INK, drawing, stand_alone, svg_element
from skeinformer.lab.report.tables import attributes_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

# of all methods but the two of FAMILIES; after Okabe and Ito: safe for the colour-blind
COLORS = ("#e69f00", "#56b4e9", "#009e73", "#cc79a7", "#8a8f98")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # as many as share no divisor with the colours: 35 pairs
OWN_MARKERS = {"skeinformer": "o", "cluster": "s"}  # of the two with their default options
# the methods of the paper's Figure 1 look the same on every page
FIGURE_1 = {
    "skeinformer": (FAMILIES["skeinformer"], OWN_MARKERS["skeinformer"]),
    "informer": ("#e69f00", "v"),
    "vmean": ("#cc79a7", "D"),
    "linformer": ("#009e73", "^"),
}
PANEL = (4.6, 3.5)  # inches
PNG_DOTS = 160  # per inch
MARKS = 8  # of a line, about: on a longer one not every point has a mark


class Style(NamedTuple):
    """How a method is drawn everywhere. A thick one stands out and is named beside its line."""

    color: str
    marker: str
    thick: bool = False
    dashed: bool = False


Styles = Mapping[str, Style]  # by label


class Series(NamedTuple):
    """A line of a panel. `x` is empty where the method has no budget: then it has the same height everywhere."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float | None] = ()
    end: bool = False  # a larger mark at the last point
    named: bool = True  # a thick line has its name beside it
    thin: bool = False  # without marks and name, behind the others: what goes with another line of the label


class Panel(NamedTuple):
    """What one pair of axes shows. `title` stands above it, and names it to those who cannot see it."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    data: Mapping[str, str] = {}  # for the filters
    x_ticks: Sequence[float] = ()  # none: as `draw_axes` chooses them
    line: tuple[float, str] | None = None  # an x that is marked by a vertical line, and its name


def method_styles(records: Iterable[Record]) -> dict[str, Style]:
    """A style for each label, different from the others up to some thirty; exact attention is ink, SDPA dashed.

    The cluster sketch and Skeinformer have one colour each, with any options: those differ in their marks, and are
    dashed where there are more of them than marks.
    """
    methods = {label(r): (str(r.get("method")), str(r.get("options") or "")) for r in records}
    pairs = [(COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i in range(len(COLORS) * len(MARKERS))]
    others = cycle(pair for pair in pairs if pair not in FIGURE_1.values())
    variants = {name: cycle(_variants(name)) for name in FAMILIES}
    plain = {method for method, options in methods.values() if not options}
    styles: dict[str, Style] = {}
    for name, (method, options) in methods.items():
        if method in (REFERENCE, "sdpa"):
            styles[name] = Style(INK, "o", dashed=method == "sdpa")
        elif method in FAMILIES:
            own = Style(FAMILIES[method], OWN_MARKERS[method], thick=True)
            varied = own in styles.values() or (options and method in plain)
            styles[name] = next(variants[method]) if varied else own
        elif method in FIGURE_1 and not options:
            styles[name] = Style(*FIGURE_1[method], thick=True)
        else:
            styles[name] = Style(*next(others))
    return styles


def _variants(name: str) -> list[Style]:
    """How a method of FAMILIES is drawn with options."""
    marks = [marker for marker in MARKERS if marker != OWN_MARKERS[name]]
    return [Style(FAMILIES[name], marker, thick=True, dashed=dashed) for dashed in (False, True) for marker in marks]


def figure_html(panel: Panel, styles: Styles) -> str:
    """The panel as an element of the page. It has no legend: the page has one for all."""
    caption = f"<figcaption>{escape(panel.title)}</figcaption>"
    return f"<figure{attributes_html(panel.data)}>\n{caption}\n{panels_svg([panel], styles)}\n</figure>"


def grid_html(panels: Iterable[Panel], styles: Styles) -> str:
    """The panels side by side, as many as the screen has room for."""
    figures = "\n".join(figure_html(panel, styles) for panel in panels)
    return f"<div class='grid holds'>\n{figures}\n</div>"


def panels_svg(panels: Sequence[Panel], styles: Styles, columns: int = 1, legend: bool = False) -> str:
    """The panels as one svg element."""
    names = _names(panels)
    title = "; ".join(panel.title for panel in panels)
    with drawing(salt=str([(panel.title, panel.x_label, panel.y_label, panel.data) for panel in panels])):
        return svg_element(_draw(panels, styles, names, columns, legend), title, names)


def write_panels(panels: Sequence[Panel], styles: Styles, stem: Path, columns: int = 2) -> list[Path]:
    """Write the panels and a legend as stem.svg and stem.png, each whole or not at all, and return the paths."""
    names = _names(panels)
    svg = stand_alone(panels_svg(panels, styles, columns, legend=True))
    png = BytesIO()
    with drawing():
        figure = _draw(panels, styles, names, columns, legend=True, paper="white")
        figure.savefig(png, format="png", dpi=PNG_DOTS, facecolor="white")
    return [write_whole(svg, Path(f"{stem}.svg")), write_whole(png.getvalue(), Path(f"{stem}.png"))]


def swatch_svg(style: Style) -> str:
    """A short line with the method's mark, for the page's legend."""
    from matplotlib.figure import Figure

    with drawing(salt=str(style)):
        figure = Figure(figsize=(0.4, 0.16))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, 2), ylim=(-1, 1))
        axes.set_axis_off()
        axes.plot([0, 1, 2], [0, 0, 0], markevery=[1], **_look(style))
        svg = svg_element(figure, "")
    return svg.replace("role='img' aria-label=''", "class='swatch' aria-hidden='true'", 1)


def draw_axes(axes: "Axes", x_label: str, y_label: str, x_ticks: Sequence[float] = ()) -> None:
    """Logarithmic axes with plain numbers: powers of ten, with 2 and 5 between them on a short axis.

    On a very short one the numbers are equally far apart.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        fixed = axis is axes.xaxis and len(x_ticks) > 0
        if fixed:
            axis.set_major_locator(FixedLocator(list(x_ticks)))
        elif high < 5 * low:
            axis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        else:
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(colors=INK)
    axes.grid(color=INK, alpha=0.15, clip_on=False)
    for spine in axes.spines.values():
        spine.set(edgecolor=INK, linewidth=0.6)


def _names(panels: Iterable[Panel]) -> list[str]:
    return list(dict.fromkeys(series.label for panel in panels for series in panel.series))


def _draw(
    panels: Sequence[Panel],
    styles: Styles,
    names: Sequence[str],
    columns: int = 1,
    legend: bool = False,
    paper: str | None = None,
) -> "Figure":
    """All panels in one figure, `columns` side by side; titles and, in a column to the right, a legend if asked for.

    `paper` is the colour below the names of lines, where no style sheet gives it.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    # inches: panels grow until the legend fits beside them
    scale = max(1.0, (0.18 * len(names) + 0.3) / (rows * PANEL[1])) if legend else 1.0
    width, height = scale * PANEL[0], scale * PANEL[1]
    beside = 0.6 + 0.068 * max(map(len, names), default=0) if legend else 0.0
    whole = (columns * width + beside, rows * height)
    figure = Figure(figsize=whole)
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        left, bottom = column * width + 0.7, (rows - 1 - row) * height + 0.48
        box = (left, bottom, width - 0.8, height - (0.92 if legend else 0.66))
        axes = figure.add_axes((box[0] / whole[0], box[1] / whole[1], box[2] / whole[0], box[3] / whole[1]))
        _draw_panel(axes, panel, styles, names)
        _name_series(axes, panel, styles, names, paper)
        if legend:
            axes.set_title(panel.title, color=INK, fontsize=10, pad=15)
    if legend:
        figure.legend(
            handles=[Line2D([], [], label=name, **_look(styles[name])) for name in names],
            loc="center left",
            bbox_to_anchor=(columns * width / whole[0], 0.5),
            frameon=False,
            labelcolor=INK,
            fontsize=LABEL,
        )
    return figure


def _draw_panel(axes: "Axes", panel: Panel, styles: Styles, names: Sequence[str]) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    _set_limits(axes, panel, [option_on_own_line(series.label) for series in _to_name(panel, styles)])
    # the thick ones on top
    for series in sorted(panel.series, key=lambda series: (not series.thin, styles[series.label].thick)):
        style, gid = styles[series.label], f"series-{names.index(series.label)}"
        x, y, look = list(series.x), list(series.y), _look(style, thin=series.thin)
        if not x:
            x, y, look["marker"] = list(axes.get_xlim()), [y[0], y[0]], ""
        axes.plot(x, y, gid=gid, markevery=max(1, len(x) // MARKS), **look)
        if series.end and len(x) > 1:
            axes.plot(x[-1:], y[-1:], gid=gid, **{**look, "markersize": 1.6 * look["markersize"]})
        _draw_errors(axes, x, y, series.error, style.color, gid)
    if panel.line is not None:
        _draw_line(axes, *panel.line)
    draw_axes(axes, panel.x_label, panel.y_label, panel.x_ticks)


def _draw_errors(
    axes: "Axes", x: Sequence[float], y: Sequence[float], errors: Sequence[float | None], color: str, gid: str
) -> None:
    """Bars of one standard error up and down, cut at the lower edge, as one broken line."""
    low = axes.get_ylim()[0]
    bars = [(at, value, error) for at, value, error in zip(x, y, errors, strict=False) if error]
    if bars:
        across = [at for at, _, _ in bars for _ in range(3)]
        up = [edge for _, value, error in bars for edge in (max(value - error, low), value + error, math.nan)]
        axes.plot(across, up, color=color, linewidth=1.2, gid=gid, clip_on=False, solid_capstyle="butt")


def _draw_line(axes: "Axes", x: float, name: str) -> None:
    axes.axvline(x, color=INK, linewidth=1, linestyle="--", clip_on=False)
    low, high = axes.get_xlim()
    axes.annotate(
        name,
        (x, 1),
        xycoords=axes.get_xaxis_transform(),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right" if x * x > low * high else "left",
        color=INK,
        fontsize=LABEL,
    )


def _set_limits(axes: "Axes", panel: Panel, labels: Sequence[str]) -> None:
    """All that is drawn fits, so that nothing needs to be clipped; with room for names to the right of the lines."""
    breadth = axes.get_window_extent().width / axes.figure.dpi * 72  # points
    share = min(0.4, (max((extent(text)[0] for text in labels), default=0.0) + 10) / breadth)
    x = [value for series in panel.series for value in series.x] + ([panel.line[0]] if panel.line else [])
    low, high = (min(x), max(x)) if x else (1.0, 1.0)
    room = 1.25 if panel.line else (1.25 * high / low) ** (share / (1 - share))
    axes.set_xlim(low / 1.25, high * max(room, 1.25))
    bars = [(value, error or 0.0) for s in panel.series for value, error in zip_longest(s.y, s.error) if value]
    low = min((max(value - error, value / 2) for value, error in bars), default=1.0)
    high = max((value + error for value, error in bars), default=1.0)
    margin = min(1.5, max(1.05, (high / low) ** 0.15))
    axes.set_ylim(low / margin, high * margin)


def _look(style: Style, *, thin: bool = False) -> dict[str, Any]:
    return {
        "color": style.color,
        "marker": "" if thin else style.marker,
        "linewidth": 0.6 if thin else 2.4 if style.thick else 1.0,
        "markersize": 6.0 if style.thick else 4.0,
        "markeredgecolor": INK,
        "markeredgewidth": 0.5,
        "linestyle": "--" if style.dashed else "-",
        "alpha": 0.6 if thin else 1.0 if style.thick or style.dashed else 0.75,
        "clip_on": False,
    }


def _to_name(panel: Panel, styles: Styles) -> list[Series]:
    """The thick series, without what only goes with one of them."""
    return [s for s in panel.series if styles[s.label].thick and s.named and not s.thin]


def _name_series(axes: "Axes", panel: Panel, styles: Styles, names: Sequence[str], paper: str | None) -> None:
    """Name the thick series: in a column to the right, or close to their ends where a panel marks an x."""
    thick = sorted(_to_name(panel, styles), key=lambda s: -s.y[-1])
    right = max((x for series in panel.series for x in series.x), default=1.0)
    traces = [_trace(axes, series) for series in panel.series]
    name_lines(
        axes,
        [(series.label, f"series-{names.index(series.label)}") for series in thick],
        [(series.x[-1] if series.x else right, series.y[-1]) for series in thick],
        np.concatenate(traces) if traces else np.zeros((0, 2)),
        beside=panel.line is None,
        paper=paper,
    )


def _trace(axes: "Axes", series: Series) -> "NDArray[np.float64]":
    """The points of a line and some between them, in pixels: (points, 2)."""
    x = series.x or axes.get_xlim()
    y = series.y if series.x else (series.y[0], series.y[0])
    points = axes.transData.transform(np.column_stack([x, y]))
    steps = np.linspace(0, 1, 8)[:, None, None]
    between = (1 - steps) * points[:-1] + steps * points[1:]  # (steps, points - 1, 2)
    return np.concatenate([points, between.reshape(-1, 2)])
