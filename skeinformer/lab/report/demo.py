"""The section of `skein demo`: its headline, its picture, its table, and what to do next."""

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from skeinformer.comparison.result import safe_layers
from skeinformer.lab.files import write_whole
from skeinformer.lab.records import Record
from skeinformer.lab.report.figures import Style, Styles, draw_axes, method_styles
from skeinformer.lab.report.format import (
    FLOOR,
    REFERENCE,
    between,
    count,
    label,
    listed,
    number,
    percent,
    plus_minus,
    real,
    required,
    seconds,
    size,
)
from skeinformer.lab.report.page import Section, command_html
from skeinformer.lab.report.svg import INK, drawing, stand_alone, svg_element
from skeinformer.lab.report.tables import Column, boxed, table_html

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HEADLINED = "cluster"
COLUMNS = (
    Column("method", label),
    Column("n", lambda r: count(r.get("n")), field="n"),
    Column("d", lambda r: count(r.get("budget")), field="budget"),
    Column(
        "time / exact",
        lambda r: number(r.get("ratio")),
        lambda r: between(number(r.get("ratio_q25")), number(r.get("ratio_q75"))),
        "ratio",
        "low",
    ),
    Column("true error", lambda r: number(r.get("error")), lambda r: plus_minus(r.get("error_se")), "error", "low"),
    Column("own estimate", lambda r: number(r.get("estimate")), lambda r: plus_minus(r.get("estimate_se")), "estimate"),
    Column("own bound", lambda r: number(r.get("bound")), field="bound"),
    Column(
        "time",
        lambda r: seconds(r.get("seconds")),
        lambda r: between(seconds(r.get("seconds_q25")), seconds(r.get("seconds_q75"))),
        "seconds",
    ),
    Column("peak memory", lambda r: size(r.get("peak_bytes")), field="peak_bytes", best="low"),
)

LEGEND = (
    "True error: |R - BV| / |BV| in the Frobenius norm, R the method's output and BV exact attention in float64; mean "
    "over heads ± standard error of that mean. Own estimate: what the method itself reports, without knowing BV, ± "
    "its standard error, with a bound of the true error. Time: median and quartiles of the rounds; every round runs "
    "all methods, and time / exact is taken round by round. Peak memory: bytes of tensors beside Q, K and V. In bold: "
    "the best sketch at each n. V-mean gives every row the mean of the values: its error is what a sketch must be "
    "well below."
)
NEXT = (
    "skein compare --model MODEL --text mine.txt --length 4096 --methods cluster --budget 16",
    "skein report --records compare/records.jsonl",
)


def demo_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """Error against time, and the table."""
    html = f"""<figure class="wide">
{figure_svg(records)}
<figcaption class="faint">{escape(caption(records))}</figcaption>
</figure>
{boxed(table_html(records, COLUMNS, contest=lambda record: record.get("n")))}
<p class="faint">{escape(LEGEND)}</p>"""
    return [Section("Attention on pretrained queries, keys and values", html)]


def next_section() -> Section:
    """What to do after a demo."""
    return Section("On your own text and model", command_html(NEXT))


def headline(records: Sequence[Record]) -> list[str]:
    """What the records show, in sentences, the cluster sketch first: of attention, of embeddings, of layers."""
    found = [_attention_sentence(records), _embedding_sentence(records), _layer_sentence(records)]
    return [sentence for sentence in found if sentence]


def _attention_sentence(records: Sequence[Record]) -> str:
    """Speed and error of the cluster sketch in each quality at the greatest n, the faster first; then Skeinformer's."""
    rows = [r for r in records if r.get("kind") == "demo" and real(r, "n") and real(r, "error") and real(r, "ratio")]
    ours = [r for r in rows if r.get("method") == HEADLINED]
    if not ours:
        return ""
    n = max(required(r, "n") for r in ours)
    first, *rest = sorted((r for r in ours if r["n"] == n), key=lambda r: required(r, "ratio"))
    text = f"Over {n:,.0f} tokens, the cluster sketch {_speed(first)} {_error(first)}"
    text += "".join(f", or {_speed(r, '').removeprefix('is ')} {_error(r)}" for r in rest)
    others = [r for r in rows if r["n"] == n and r.get("method") == "skeinformer"]
    return f"{text}." + "".join(f" {label(r)} {_speed(r, '')} {_error(r)}." for r in others)


def _error(record: Record) -> str:
    estimate = f" (its own estimate: {percent(record.get('estimate'))})" if real(record, "estimate") else ""
    return f"with an error of {percent(record.get('error'))}{_size(record)}{estimate}"


def _size(record: Record) -> str:
    return f" at d = {count(record.get('budget'))}" if record.get("budget") else ""


def _embedding_sentence(records: Sequence[Record]) -> str:
    """Time, cosine and neighbours of the sketched model that is nearest to the exact one."""
    rows = [r for r in records if r.get("kind") == "embeddings" and r.get("method") == HEADLINED]
    timed = [r for r in rows if real(r, "cosine") and real(r, "ratio") and real(r, "passages")]
    if not timed:
        return ""
    best = max(timed, key=lambda r: required(r, "cosine"))
    passages = required(best, "passages")
    text = (
        f"With the cluster sketch{_size(best)}, {best.get('model')} {_speed(best, 'with exact attention')} "
        f"on passages of {count(best.get('n'))} tokens: "
        f"the mean cosine with the exact embedding is {required(best, 'cosine'):.3f}"
    )
    if (kept := real(best, "recall_1")) is not None:
        text += f", and the nearest passage stays the same for {kept * passages:.0f} of {passages:.0f}"
    return f"{text}."


def _layer_sentence(records: Sequence[Record]) -> str:
    """Which layers are safe."""
    layers = [r for r in records if r.get("kind") == "compare_layer" and r.get("method") == HEADLINED]
    if not layers:
        return ""
    safe, unsafe = safe_layers(layers)
    at = f"At {count(layers[0].get('n'))} tokens and a tolerance of {required(layers[0], 'tolerance'):g}"
    text = f"{at}, compare finds {len(safe)} of {len(safe) + len(unsafe)} layers safe"
    text += f": {_numbers(safe, layers)}" if safe else ""
    return f"{text}. Better left exact: {_numbers(unsafe, layers)}." if unsafe else f"{text}."


def _numbers(names: Sequence[str], layers: Sequence[Record]) -> str:
    """Layers by their place in the model."""
    places = {str(r.get("layer")): r.get("index") for r in reversed(layers)}
    return listed([places[name] for name in names], most=24)


def _speed(record: Record, exact: str = "exact attention") -> str:
    ratio, than = required(record, "ratio"), f" as {exact}" if exact else ""
    return f"is {number(1 / ratio)} times as fast{than}" if ratio < 1 else f"takes {number(ratio)} times as long{than}"


def write_figure(records: Iterable[Record], path: Path | str) -> Path:
    """Write the figure alone, an svg file that follows the reader's light or dark setting, and return the path."""
    return write_whole(stand_alone(figure_svg(records)), Path(path))


def figure_svg(records: Iterable[Record]) -> str:
    """Error against time, log-log, as an svg element: a line per method, a mark per n, in the page's text colour."""
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(5.4, 4.2), layout="constrained")
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
    styles = method_styles(records)
    for name in dict.fromkeys(label(r) for r in records):
        rows = [r for r in records if label(r) == name]
        style, exact = styles[name], rows[0].get("method") == REFERENCE and bool(errors)
        transform = axes.get_xaxis_transform() if exact else axes.transData
        x, y = [required(r, "seconds") for r in rows], [0.0 if exact else required(r, "error") for r in rows]
        if not exact:
            dashes = "--" if style.dashed else "-"
            axes.plot(
                x, y, color=style.color, linestyle=dashes, linewidth=_width(rows[0], style), zorder=2, clip_on=False
            )
        shown = f"{name} (error {number(rows[-1]['error'])})" if exact else name
        axes.scatter(
            x,
            y,
            s=[30.0 + 50.0 * lengths.index(required(r, "n")) for r in rows],
            label=shown,
            color=style.color,
            marker=style.marker,
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


def _width(record: Record, style: Style) -> float:
    return 1.0 if record.get("method") == FLOOR or not style.thick else 2.4
