"""Records in, one self-contained HTML page out: a table, a picture, what they show, and how they were made.

The page asks for nothing else: no script, no font, no image. It follows the reader's light or dark setting.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from html import escape
from io import StringIO
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, NamedTuple

from skeinformer.records import Record, Value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REFERENCE = "softmax"  # the method that the others approximate
COLORS = ("#e69f00", "#56b4e9", "#009e73", "#d55e00", "#cc79a7", "#0072b2")  # Okabe and Ito: safe for the colour-blind
MARKERS = ("o", "s", "^", "D", "v", "P")
INK = "#102030"  # stands for the page's text colour while matplotlib draws
MACHINE = ("cpu", "cores", "threads", "gpu", "torch", "python", "skeinformer", "commit", "command")
SETTINGS = ("model", "layer", "text", "heads", "head_dim", "samples", "rounds", "seed", "started")


class Column(NamedTuple):
    """A column of the table: its heading, how a record shows in it, and the field whose smallest value is marked."""

    heading: str
    show: Callable[[Record], str]
    best: str | None = None


def number(value: Value, unit: str = "") -> str:
    """Three significant digits; nothing for None."""
    if not isinstance(value, int | float):
        return ""
    small = value != 0 and abs(value) < 1e-3
    text = f"{value:.1e}" if small else f"{value:.0f}" if abs(value) >= 100 else f"{value:#.3g}"
    return text.rstrip(".") + unit


def seconds(value: Value) -> str:
    """A time in seconds or milliseconds."""
    if not isinstance(value, int | float):
        return ""
    return number(value, " s") if value >= 1 else number(value * 1e3, " ms")


def size(value: Value) -> str:
    """A number of bytes in KiB or MiB."""
    if not isinstance(value, int | float):
        return ""
    return number(value / 2**20, " MiB") if value >= 2**20 else number(value / 2**10, " KiB")


def spread(value: Value, standard_error: Value) -> str:
    """value ± standard error, where there is one; the error of an exact method is shown without."""
    if not isinstance(value, int | float) or not isinstance(standard_error, int | float) or value < 1e-3:
        return number(value)
    return f"{value:.3f} ± {standard_error:.3f}"


def between(value: str, low: str, high: str) -> str:
    """value (low to high), without the range where there is none."""
    return f"{value} ({low} to {high})" if low and high else value


COLUMNS = (
    Column("n", lambda r: f"{r['n']:,}" if isinstance(r.get("n"), int) else ""),
    Column("method", lambda r: label(r)),
    Column(
        "time",
        lambda r: between(seconds(r.get("seconds")), seconds(r.get("seconds_q25")), seconds(r.get("seconds_q75"))),
        "seconds",
    ),
    Column(
        "time / exact",
        lambda r: between(number(r.get("ratio")), number(r.get("ratio_q25")), number(r.get("ratio_q75"))),
        "ratio",
    ),
    Column("peak memory", lambda r: size(r.get("peak_bytes")), "peak_bytes"),
    Column("true error", lambda r: spread(r.get("error"), r.get("error_se")), "error"),
    Column("estimated error", lambda r: spread(r.get("estimate"), r.get("estimate_se"))),
)

LEGEND = (
    "Error: |R - BV| / |BV| in the Frobenius norm, R the method's output and BV exact attention in float64; mean over "
    "heads ± standard error of that mean. Estimated error: what the method itself reports, without knowing BV, ± its "
    "standard error. Time: median of the rounds (quartiles); every round runs all methods, and time / exact is taken "
    "round by round. Peak memory: bytes of tensors beside Q, K and V. In bold: the best approximation at each n."
)


def label(record: Record) -> str:
    """What a reader calls the record's method."""
    return str(record.get("label") or record.get("method") or "")


def write_report(records: Sequence[Record], path: Path | str, title: str, columns: Sequence[Column] = COLUMNS) -> Path:
    """Write the page that shows `records` to `path`, whole or not at all, and return the path."""
    if not records:
        raise ValueError("no records to report; measure something first")
    page = PAGE.substitute(
        title=escape(title),
        summary="\n".join(f"<p>{escape(sentence)}</p>" for sentence in summary(records)),
        figure=figure_svg(records),
        table=table_html(records, columns),
        legend=escape(LEGEND),
        footer=footer_html(records),
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(page, encoding="utf-8")
    unfinished.replace(path)
    return path


def summary(records: Iterable[Record]) -> list[str]:
    """What the records show, in sentences: time and error at the greatest n, and how good the estimates were."""
    measured = [r for r in records if isinstance(r.get("n"), int) and isinstance(r.get("error"), int | float)]
    approximations = [r for r in measured if r.get("method") != REFERENCE]
    if not approximations:
        return []
    n = max(_float(r, "n") for r in approximations)
    largest = [r for r in approximations if r["n"] == n]
    sentences = [f"At n = {n:,.0f}: {'; '.join(_clause(r) for r in largest)}."]
    quotients = [_float(r, "estimate") / _float(r, "error") for r in approximations if r.get("estimate") and r["error"]]
    if quotients:
        sentences.append(
            f"Over all rows the estimated error was {min(quotients):.2f} to {max(quotients):.2f} times the true one."
        )
    return sentences


def table_html(records: Iterable[Record], columns: Sequence[Column]) -> str:
    """A row per record. The smallest value of the approximations at each n is in bold."""
    records = list(records)
    head = "".join(f"<th scope='col'>{escape(column.heading)}</th>" for column in columns)
    body = []
    for record in records:
        approximate = record.get("method") != REFERENCE
        rivals = [r for r in records if r.get("n") == record.get("n") and r.get("method") != REFERENCE]
        cells = []
        for column in columns:
            text = escape(column.show(record))
            best = approximate and column.best is not None and _is_smallest(record, rivals, column.best)
            cells.append(f"<td><strong>{text}</strong></td>" if best else f"<td>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    rows = "\n".join(body)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def figure_svg(records: Iterable[Record]) -> str:
    """Error against time, log-log, as an svg element: a line per method, a mark per n, in the page's text colour."""
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text, and a name with a dollar sign is no formula
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "skeinformer", "text.parse_math": False}):
        figure = Figure(figsize=(5.4, 4.2), layout="constrained")
        axes = figure.add_subplot()
        _draw_methods(axes, [r for r in records if r.get("seconds") and r.get("error")])
        _draw_frame(axes)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper center", ncols=2, frameon=False, labelcolor=INK)
        buffer = StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return svg.replace(INK, "currentColor").replace("<svg", "<svg role='img' aria-label='error against time'", 1)


def footer_html(records: Sequence[Record]) -> str:
    """Settings, machine, versions, commit and command; several values where the records differ."""
    items = []
    for name in (*SETTINGS, *MACHINE):
        values = dict.fromkeys(str(r[name]) for r in records if r.get(name) is not None)
        if values:
            items.append(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(', '.join(values))}</dd>")
    return f"<dl>{''.join(items)}</dl>"


def _draw_methods(axes: "Axes", records: Sequence[Record]) -> None:
    """A line per label. The reference's error is rounding, far below: its marks sit on the lower edge, at its times."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    errors = [_float(r, "error") for r in records if r.get("method") != REFERENCE]
    for i, name in enumerate(dict.fromkeys(label(r) for r in records)):
        rows = [r for r in records if label(r) == name]
        exact = rows[0].get("method") == REFERENCE and bool(errors)
        x = [_float(r, "seconds") for r in rows]
        y = [0.0 if exact else _float(r, "error") for r in rows]
        axes.plot(
            x,
            y,
            label=f"{name} (off the scale, {number(rows[-1]['error'])})" if exact else name,
            color=INK if exact else COLORS[i % len(COLORS)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=8,
            markeredgecolor=INK,
            markeredgewidth=0.6,
            linestyle="none" if exact else "-",
            transform=axes.get_xaxis_transform() if exact else axes.transData,
            clip_on=False,
            zorder=3,
        )
        for record, at_x, at_y in zip(rows, x, y, strict=True):
            axes.annotate(
                f"{record.get('n', ''):,}",
                (at_x, at_y),
                xycoords=axes.get_xaxis_transform() if exact else "data",
                xytext=(6, 6),
                textcoords="offset points",
                color=INK,
                fontsize=8,
            )
    if errors:
        axes.set_ylim(min(errors) / 2, max(errors) * 1.5)


def _draw_frame(axes: "Axes") -> None:
    """Logarithmic axes with plain numbers: powers of ten, and 2 and 5 between them where an axis is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xlabel("seconds", color=INK)
    axes.set_ylabel("relative error", color=INK)
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(colors=INK)
    axes.grid(color=INK, alpha=0.15)
    for spine in axes.spines.values():
        spine.set_edgecolor(INK)


def _clause(record: Record) -> str:
    parts = []
    if record.get("ratio"):
        ratio = _float(record, "ratio")
        parts.append(f"{number(1 / ratio)} times faster than" if ratio < 1 else f"{number(ratio)} times the time of")
    time = f"takes {seconds(record.get('seconds'))}, {parts[0]} exact attention, and" if parts else ""
    estimate = spread(record.get("estimate"), record.get("estimate_se"))
    own = f" (its own estimate: {estimate})" if estimate else ""
    error = spread(record.get("error"), record.get("error_se"))
    return " ".join(f"{label(record)} {time} has a relative error of {error}{own}".split())


def _is_smallest(record: Record, rivals: Iterable[Record], name: str) -> bool:
    values = [_float(r, name) for r in rivals if isinstance(r.get(name), int | float)]
    return isinstance(record.get(name), int | float) and _float(record, name) == min(values)


def _float(record: Record, name: str) -> float:
    value = record[name]
    if not isinstance(value, int | float):
        raise ValueError(f"record field {name!r} is {value!r}, expected a number")
    return float(value)


PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --line: #d0d7de; --faint: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0f1318; --line: #30363d; --faint: #9aa5b1; }
}
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; }
figure { margin: 1.5rem 0; }
svg { display: block; width: 100%; height: auto; max-width: 40rem; color: var(--ink); }
svg text { font-family: system-ui, sans-serif; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .35rem .75rem; border-bottom: 1px solid var(--line); text-align: right; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
.faint, footer { color: var(--faint); font-size: .875rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$title</h1>
$summary
<figure>
$figure
</figure>
<div class="scroll" tabindex="0">
$table
</div>
<p class="faint">$legend</p>
<footer>
$footer
</footer>
</body>
</html>
""")
