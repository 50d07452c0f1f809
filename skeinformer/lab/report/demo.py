"""The section of `skein demo`: its table, its picture, what they show."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from skeinformer.lab.files import write_whole
from skeinformer.lab.records import Record
from skeinformer.lab.report.figures import COLORS, MARKERS, Styles, draw_axes
from skeinformer.lab.report.format import (
    REFERENCE,
    ROUNDING,
    between,
    count,
    label,
    number,
    plus_minus,
    required,
    seconds,
    size,
    with_error,
)
from skeinformer.lab.report.page import Section
from skeinformer.lab.report.svg import INK, drawing, stand_alone, svg_element
from skeinformer.lab.report.tables import Column, boxed, table_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMNS = (
    Column("n", lambda r: count(r.get("n"))),
    Column("method", label),
    Column(
        "time",
        lambda r: seconds(r.get("seconds")),
        lambda r: between(seconds(r.get("seconds_q25")), seconds(r.get("seconds_q75"))),
        "seconds",
        "low",
    ),
    Column(
        "time / exact",
        lambda r: number(r.get("ratio")),
        lambda r: between(number(r.get("ratio_q25")), number(r.get("ratio_q75"))),
        "ratio",
        "low",
    ),
    Column("peak memory", lambda r: size(r.get("peak_bytes")), field="peak_bytes", best="low"),
    Column("true error", lambda r: number(r.get("error")), lambda r: plus_minus(r.get("error_se")), "error", "low"),
    Column("estimated error", lambda r: number(r.get("estimate")), lambda r: plus_minus(r.get("estimate_se"))),
    Column("bound", lambda r: number(r.get("bound"))),
)

LEGEND = (
    "Error: |R - BV| / |BV| in the Frobenius norm, R the method's output and BV exact attention in float64; mean over "
    "heads ± standard error of that mean. Estimated error: what the method itself reports, without knowing BV, ± its "
    "standard error, and a bound of the true one. Time: median and quartiles of the rounds; every round runs all "
    "methods, and time / exact is taken round by round. Peak memory: bytes of tensors beside Q, K and V. In bold: the "
    "best approximation at each n."
)


def demo_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """What the records show, in sentences; error against time; the table."""
    table = table_html(records, COLUMNS, contest=lambda record: record.get("n"))
    html = f"""<p>{escape(" ".join(summary(records)))}</p>
<figure class="wide">
{figure_svg(records)}
<figcaption class="faint">{escape(caption(records))}</figcaption>
</figure>
{boxed(table)}
<p class="faint">{escape(LEGEND)}</p>"""
    return [Section("Exact and sketched attention", html)]


def write_figure(records: Iterable[Record], path: Path | str) -> Path:
    """Write the figure alone, an svg file that follows the reader's light or dark setting, and return the path."""
    return write_whole(stand_alone(figure_svg(records)), Path(path))


def summary(records: Iterable[Record]) -> list[str]:
    """What the records show, in sentences: time and error at the greatest n, and how good the estimates were."""
    records = [r for r in records if isinstance(r.get("n"), int) and isinstance(r.get("error"), int | float)]
    if not records:
        return []
    n = max(required(r, "n") for r in records)
    sentences = [_sentence(r) for r in records if r["n"] == n]
    sentences[0] = f"At n = {n:,.0f}, {sentences[0]}"
    quotients = [required(r, "estimate") / required(r, "error") for r in records if _is_estimated(r)]
    if quotients:
        low, high = min(quotients), max(quotients)
        sentences.append(f"At all n, the estimated error was {low:.2f} to {high:.2f} times the true one.")
    return sentences


def figure_svg(records: Iterable[Record]) -> str:
    """Error against time, log-log, as an svg element: a line per method, a mark per n, in the page's text colour."""
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(5.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        _draw_methods(axes, [r for r in records if r.get("seconds") and r.get("error") and r.get("n")])
        draw_axes(axes, "seconds", "relative error")
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper center", ncols=2, frameon=False, labelcolor=INK, fontsize=9)
        return svg_element(figure, "error against time")


def caption(records: Iterable[Record]) -> str:
    """How to read the figure."""
    text = "Error against time: the larger the mark, the larger n."
    if any(r.get("method") == REFERENCE for r in records):
        text += " The error of exact attention is rounding, far below: its marks sit on the lower edge."
    return text


def _draw_methods(axes: "Axes", records: Sequence[Record]) -> None:
    """A line per label, larger marks for larger n.

    The reference's error is rounding, far below the others: its marks sit on the lower edge, at its times.
    """
    axes.set_xscale("log")
    axes.set_yscale("log")
    lengths = sorted({required(r, "n") for r in records})
    errors = [required(r, "error") for r in records if r.get("method") != REFERENCE]
    for i, name in enumerate(dict.fromkeys(label(r) for r in records)):
        rows = [r for r in records if label(r) == name]
        exact = rows[0].get("method") == REFERENCE and bool(errors)
        color = INK if exact else COLORS[i % len(COLORS)]
        marker, transform = MARKERS[i % len(MARKERS)], axes.get_xaxis_transform() if exact else axes.transData
        x, y = [required(r, "seconds") for r in rows], [0.0 if exact else required(r, "error") for r in rows]
        if not exact:
            axes.plot(x, y, color=color, zorder=2, clip_on=False)
        sizes = [30.0 + 50.0 * lengths.index(required(r, "n")) for r in rows]
        shown = f"{name} (error {number(rows[-1]['error'])})" if exact else name
        axes.scatter(
            x,
            y,
            s=sizes,
            label=shown,
            color=color,
            marker=marker,
            edgecolors=INK,
            linewidths=0.6,
            transform=transform,
            clip_on=False,
            zorder=3,
        )
    times = [required(r, "seconds") for r in records]
    if errors:
        axes.set_ylim(min(errors) / 2, max(errors) * 1.5)
        axes.set_xlim(min(times) / 1.5, max(times) * 1.5)


def _sentence(record: Record) -> str:
    if record.get("method") == REFERENCE:
        return f"{label(record)} takes {seconds(record.get('seconds'))}."
    if record.get("ratio"):
        ratio = required(record, "ratio")
        speed = f"is {number(1 / ratio)} times faster" if ratio < 1 else f"takes {number(ratio)} times as long"
    else:
        speed = "was not timed"
    error, estimate = (with_error(record.get(name), record.get(f"{name}_se")) for name in ("error", "estimate"))
    own = f"; its own estimate is {estimate}" if estimate else ""
    return f"{label(record)} {speed}, with a relative error of {error}{own}."


def _is_estimated(record: Record) -> bool:
    return isinstance(record.get("estimate"), int | float) and required(record, "error") > ROUNDING
