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
ROUNDING = 1e-4  # an error below is one of float32 arithmetic
INK = "#102030"  # stands for the page's text colour while matplotlib draws
MACHINE = ("cpu", "cores", "threads", "gpu", "torch", "python", "skeinformer", "commit", "command")
SETTINGS = ("model", "layer", "text", "heads", "head_dim", "samples", "rounds", "seed", "started")


class Column(NamedTuple):
    """A column of the table: how a record shows in it, what stands small below, the field whose least value is best."""

    heading: str
    show: Callable[[Record], str]
    detail: Callable[[Record], str] = lambda record: ""
    best: str | None = None


def number(value: Value, unit: str = "") -> str:
    """Three significant digits, two where it is below 0.001; nothing for None."""
    if not isinstance(value, int | float):
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}{unit}"
    return f"{value:.1e}{unit}" if abs(value) < 1e-3 else f"{value:#.3g}{unit}"


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


def plus_minus(standard_error: Value) -> str:
    """± standard error, where there is one."""
    return f"± {standard_error:#.2g}" if isinstance(standard_error, int | float) else ""


def spread(value: Value, standard_error: Value) -> str:
    """value ± standard error to three decimals; the value alone where it has no standard error or is rounding."""
    if not isinstance(value, int | float) or not isinstance(standard_error, int | float) or value < ROUNDING:
        return number(value)
    return f"{value:.3f} ± {standard_error:.3f}"


def between(low: str, high: str) -> str:
    """low to high, where there are such."""
    return f"{low} to {high}" if low and high else ""


def label(record: Record) -> str:
    """What a reader calls the record's method."""
    return str(record.get("label") or record.get("method") or "")


COLUMNS = (
    Column("n", lambda r: f"{r['n']:,}" if isinstance(r.get("n"), int) else ""),
    Column("method", label),
    Column(
        "time",
        lambda r: seconds(r.get("seconds")),
        lambda r: between(seconds(r.get("seconds_q25")), seconds(r.get("seconds_q75"))),
        "seconds",
    ),
    Column(
        "time / exact",
        lambda r: number(r.get("ratio")),
        lambda r: between(number(r.get("ratio_q25")), number(r.get("ratio_q75"))),
        "ratio",
    ),
    Column("peak memory", lambda r: size(r.get("peak_bytes")), best="peak_bytes"),
    Column("true error", lambda r: number(r.get("error")), lambda r: plus_minus(r.get("error_se")), "error"),
    Column("estimated error", lambda r: number(r.get("estimate")), lambda r: plus_minus(r.get("estimate_se"))),
)

LEGEND = (
    "Error: |R - BV| / |BV| in the Frobenius norm, R the method's output and BV exact attention in float64; mean over "
    "heads ± standard error of that mean. Estimated error: what the method itself reports, without knowing BV, ± its "
    "standard error. Time: median and quartiles of the rounds; every round runs all methods, and time / exact is taken "
    "round by round. Peak memory: bytes of tensors beside Q, K and V. In bold: the best approximation at each n."
)


def write_report(records: Sequence[Record], path: Path | str, title: str, columns: Sequence[Column] = COLUMNS) -> Path:
    """Write the page that shows `records` to `path`, whole or not at all, and return the path."""
    if not records:
        raise ValueError("no records to report; measure something first")
    page = PAGE.substitute(
        title=escape(title),
        summary=escape(" ".join(summary(records))),
        figure=figure_svg(records),
        caption=escape(caption(records)),
        table=table_html(records, columns),
        legend=escape(LEGEND),
        footer=footer_html(records),
    )
    return _write_whole(page, Path(path))


def write_figure(records: Iterable[Record], path: Path | str) -> Path:
    """Write the figure alone, an svg file that follows the reader's light or dark setting, and return the path."""
    element, drawing = figure_svg(records).split(">", 1)
    return _write_whole(f"{element}>\n{FIGURE_STYLE}{drawing}", Path(path))


def _write_whole(text: str, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
    return path


def summary(records: Iterable[Record]) -> list[str]:
    """What the records show, in sentences: time and error at the greatest n, and how good the estimates were."""
    records = [r for r in records if isinstance(r.get("n"), int) and isinstance(r.get("error"), int | float)]
    if not records:
        return []
    n = max(_float(r, "n") for r in records)
    sentences = [_sentence(r) for r in records if r["n"] == n]
    sentences[0] = f"At n = {n:,.0f}, {sentences[0]}"
    quotients = [_float(r, "estimate") / _float(r, "error") for r in records if _is_estimated(r)]
    if quotients:
        low, high = min(quotients), max(quotients)
        sentences.append(f"At all n, the estimated error was {low:.2f} to {high:.2f} times the true one.")
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
            text, detail = escape(column.show(record)), escape(column.detail(record))
            if approximate and column.best is not None and _is_smallest(record, rivals, column.best):
                text = f"<strong>{text}</strong>"
            cells.append(f"<td>{text}<small>{detail}</small></td>" if detail else f"<td>{text}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    rows = "\n".join(body)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"


def figure_svg(records: Iterable[Record]) -> str:
    """Error against time, log-log, as an svg element: a line per method, a mark per n, in the page's text colour."""
    import matplotlib
    from matplotlib.figure import Figure

    # text stays text, and a name with a dollar sign is no formula
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "skeinformer", "text.parse_math": False}):
        figure = Figure(figsize=(5.6, 4.4), layout="constrained")
        axes = figure.add_subplot()
        _draw_methods(axes, [r for r in records if r.get("seconds") and r.get("error") and r.get("n")])
        _draw_frame(axes)
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside upper center", ncols=2, frameon=False, labelcolor=INK, fontsize=9)
        buffer = StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return svg.replace(INK, "currentColor").replace("<svg", "<svg role='img' aria-label='error against time'", 1)


def caption(records: Iterable[Record]) -> str:
    """How to read the figure."""
    text = "Error against time: the larger the mark, the larger n."
    if any(r.get("method") == REFERENCE for r in records):
        text += " The error of exact attention is rounding, far below: its marks sit on the lower edge."
    return text


def footer_html(records: Sequence[Record]) -> str:
    """Settings, machine, versions, commit and command; several values where the records differ."""
    items = []
    for name in (*SETTINGS, *MACHINE):
        values = dict.fromkeys(str(r[name]) for r in records if r.get(name) is not None)
        if values:
            items.append(f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(', '.join(values))}</dd>")
    return f"<dl>{''.join(items)}</dl>"


def _draw_methods(axes: "Axes", records: Sequence[Record]) -> None:
    """A line per label, larger marks for larger n.

    The reference's error is rounding, far below the others: its marks sit on the lower edge, at its times.
    """
    axes.set_xscale("log")
    axes.set_yscale("log")
    lengths = sorted({_float(r, "n") for r in records})
    errors = [_float(r, "error") for r in records if r.get("method") != REFERENCE]
    for i, name in enumerate(dict.fromkeys(label(r) for r in records)):
        rows = [r for r in records if label(r) == name]
        exact = rows[0].get("method") == REFERENCE and bool(errors)
        color = INK if exact else COLORS[i % len(COLORS)]
        marker, transform = MARKERS[i % len(MARKERS)], axes.get_xaxis_transform() if exact else axes.transData
        x, y = [_float(r, "seconds") for r in rows], [0.0 if exact else _float(r, "error") for r in rows]
        if not exact:
            axes.plot(x, y, color=color, zorder=2)
        sizes = [30.0 + 50.0 * lengths.index(_float(r, "n")) for r in rows]
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
    times = [_float(r, "seconds") for r in records]
    if errors:
        axes.set_ylim(min(errors) / 2, max(errors) * 1.5)
        axes.set_xlim(min(times) / 1.5, max(times) * 1.5)


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


def _sentence(record: Record) -> str:
    if record.get("method") == REFERENCE:
        return f"{label(record)} takes {seconds(record.get('seconds'))}."
    if record.get("ratio"):
        ratio = _float(record, "ratio")
        speed = f"is {number(1 / ratio)} times faster" if ratio < 1 else f"takes {number(ratio)} times as long"
    else:
        speed = "was not timed"
    estimate = spread(record.get("estimate"), record.get("estimate_se"))
    own = f"; its own estimate is {estimate}" if estimate else ""
    return f"{label(record)} {speed}, with a relative error of {spread(record['error'], record.get('error_se'))}{own}."


def _is_estimated(record: Record) -> bool:
    return isinstance(record.get("estimate"), int | float) and _float(record, "error") > ROUNDING


def _is_smallest(record: Record, rivals: Iterable[Record], name: str) -> bool:
    values = [_float(r, name) for r in rivals if isinstance(r.get(name), int | float)]
    return isinstance(record.get(name), int | float) and _float(record, name) == min(values)


def _float(record: Record, name: str) -> float:
    value = record[name]
    if not isinstance(value, int | float):
        raise ValueError(f"record field {name!r} is {value!r}, expected a number")
    return float(value)


FIGURE_STYLE = """<style>
svg { color: #1b1f24; background: #ffffff; }
svg text { font-family: system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { color: #e6edf3; background: #0f1318; } }
</style>"""

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
body { margin: 0 auto; padding: 1rem; max-width: 66rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; line-height: 1.25; }
figure { margin: 1.5rem 0; }
svg { display: block; width: 100%; height: auto; max-width: 40rem; color: var(--ink); }
svg text { font-family: system-ui, sans-serif; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: .35rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
th { white-space: normal; vertical-align: bottom; }
td { vertical-align: top; }
td small { display: block; }
.faint, small, footer { color: var(--faint); font-size: .875rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem; }
dd { margin: 0; overflow-wrap: anywhere; }
</style>
</head>
<body>
<h1>$title</h1>
<p>$summary</p>
<figure>
$figure
<figcaption class="faint">$caption</figcaption>
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
