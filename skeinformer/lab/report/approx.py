"""Sections of `skein approx`: the paper's Figure 1, error against time, the table of methods."""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Literal, NamedTuple

from skeinformer.attention import METHODS
from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.figures import Panel, Series, Styles, grid_html
from skeinformer.lab.report.format import (
    REFERENCE,
    between,
    count,
    distinct,
    is_approximation,
    label,
    number,
    operations,
    plus_minus,
    real,
    size,
)
from skeinformer.lab.report.frontier import approximations, frontier_html, frontier_markdown, verdict
from skeinformer.lab.report.inputs import INPUTS, PASSES, Input, group_inputs
from skeinformer.lab.report.page import Section, made_by, select_html
from skeinformer.lab.report.tables import Column, attributes_html, boxed, markdown_text, table_html

FIELDS = frozenset({*INPUTS, "budget", "label"})
ORDER = ("skeinformer", "informer", "vmean", "linformer")  # the paper's, by growing error
RATIO = "spectral_to_vmean"


class ErrorMeasure(NamedTuple):
    """A measure of the error that Figure 1 can show, and the greatest value that it shows."""

    name: str
    axis: str
    most: float = math.inf


NEAR = 1.1  # of errors over V-mean's: what is far above would hide the small differences
MEASURES = {
    "spectral": ErrorMeasure("spectral, absolute (the paper's)", "spectral error |BV - R|"),
    RATIO: ErrorMeasure("spectral, over V-mean's", "spectral error / V-mean's", NEAR),
    "spectral_relative": ErrorMeasure("spectral, relative", "relative spectral error"),
    "frobenius_relative": ErrorMeasure("Frobenius, relative", "relative Frobenius error"),
    "row": ErrorMeasure("largest row, relative", "relative error of the largest row"),
    "gradient": ErrorMeasure("gradients, relative", "relative error of the gradients"),
}


def _measured(heading: str, field: str, best: Literal["low", "high"] | None = "low") -> Column:
    """A mean over trials with its standard error."""
    return Column(
        heading, lambda r: number(r.get(field)), lambda r: plus_minus(r.get(f"{field}_se")), field=field, best=best
    )


def _timed(heading: str, field: str) -> Column:
    """A median of rounds with its quartiles."""
    return Column(
        heading,
        lambda r: number(r.get(field)),
        lambda r: between(number(r.get(f"{field}_q25")), number(r.get(f"{field}_q75"))),
        field=field,
        best="low",
    )


COLUMNS = (
    Column("method", label),
    Column("d", lambda r: str(r.get("budget") or ""), field="budget"),
    _measured("spectral error", "spectral"),
    _measured("over V-mean's", RATIO),
    _measured("spectral, relative", "spectral_relative"),
    _measured("Frobenius, relative", "frobenius_relative"),
    _measured("largest row", "row"),
    _measured("cosine", "cosine", "high")._replace(show=lambda r: _decimals(r.get("cosine"))),
    _measured("gradient of q", "grad_query"),
    _measured("gradient of k", "grad_key"),
    _measured("gradient of v", "grad_value"),
    _measured("estimate / true", "estimate_ratio", None),
    _timed("forward / SDPA", "forward_ratio"),
    _timed("with backward / SDPA", "both_ratio"),
    Column("peak memory", lambda r: size(r.get("peak_bytes")), field="peak_bytes", best="low"),
    Column("FLOPs", lambda r: operations(r.get("flops")), field="flops", best="low"),
)

FRONTIER = (
    "The frontier: what has the least error in so much time, as a share of SDPA's; no faster method is as accurate. "
    "Means of errors and medians of times are compared as they are."
)
LEGEND = (
    "BV is exact attention in float64, R a method's output; errors are means over heads and trials ± standard error "
    "over trials. Spectral: |BV - R| in the spectral norm; over V-mean's: divided by V-mean's, trial by trial; "
    "relative: divided by |BV|. Largest row: the greatest error "
    "of a row, divided by the greatest norm of a row of BV. Cosine: mean over rows. Gradients: relative Frobenius "
    "error of the gradients of q, k and v. Estimate / true: the method's own estimate of its relative Frobenius "
    "error, divided by the true one. Times: divided by those of SDPA (torch's fused exact attention), median and "
    "quartiles of rounds, taken round by round. Peak memory and FLOPs: of a forward pass. In bold: the best "
    "approximation among the rows shown. Dropout is none, and V-mean is the floor: both are shown for comparison."
)


def approx_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """The paper's order of methods, Figure 1, error against time, and the table; what could not be measured."""
    inputs = group_inputs(records)
    sections = []
    if order := order_html(inputs):
        sections.append(Section("Does the paper's order hold?", order, FIELDS, records))
    if panels := [panel for measure in MEASURES for panel in figure_1_panels(inputs, measure)]:
        measures = {str(panel.data["measure"]): MEASURES[panel.data["measure"]].name for panel in panels}
        note = (
            "Figure 1 of the paper: error against the sample size d; bars are standard errors over trials (of the "
            "gradients, the mean of three and a bound). Methods without a budget are horizontal lines. Thick: the "
            "methods of the paper's figure and Skeinformer. Choose the error over V-mean's to see small differences: "
            f"the ratio is taken trial by trial, on the same input, and what is above {NEAR} is left out."
        )
        choice = _choice("measure", "error", measures)
        html = f"{choice}<p class='faint'>{escape(note)}</p>\n{grid_html(panels, styles)}"
        sections.append(Section("Error against sample size", html, FIELDS, records))
    if panels := [panel for direction in PASSES for panel in error_time_panels(inputs, direction)]:
        note = (
            "Relative spectral error against time as a share of SDPA's (torch's fused exact attention): lower left is "
            "better. A line goes over the sample sizes d; the larger mark is the largest d."
        )
        choice = _choice("pass", "time of", PASSES)
        html = f"{choice}<p class='faint'>{escape(note)}</p>\n{grid_html(panels, styles)}\n{frontiers_html(inputs)}"
        sections.append(Section("Error against time", html, FIELDS, records))
    if inputs:
        tables = "\n".join(_table_html(name, rows) for name, rows in inputs.items())
        html = f"<div class='holds'>{tables}</div>\n<p class='faint'>{escape(LEGEND)}</p>"
        sections.append(Section("Methods", html, FIELDS, records))
    if skipped := [r for r in records if r.get("kind") == "approx_skipped"]:
        sections.append(Section("Not measured", _skipped_html(skipped)))
    return sections


def figure_1_panels(inputs: Mapping[Input, Sequence[Record]], measure: str) -> list[Panel]:
    """A panel for each input: error against d, with bars of one standard error."""
    panels = []
    for where, rows in inputs.items():
        series = []
        for name, points in _by_label(_shown(rows, measure), measure).items():
            budgeted = points[0].get("budget") is not None
            x = [float(r["budget"] or 0) for r in points] if budgeted else []
            y, error = [real(r, measure) or 0.0 for r in points], [real(r, f"{measure}_se") for r in points]
            series.append(Series(name, x, y, error))
        if any(line.x for line in series):
            ticks = [float(d or 0) for d in distinct(rows, "budget")]
            axis, data = MEASURES[measure].axis, {**where.data, "measure": measure}
            panels.append(Panel(where.title, "sample size d", axis, series, data, x_ticks=ticks))
    return panels


def error_time_panels(inputs: Mapping[Input, Sequence[Record]], direction: str) -> list[Panel]:
    """A panel for each input: relative spectral error against time, one line over d for each method."""
    panels = []
    for where, rows in inputs.items():
        timed = [r for r in rows if real(r, f"{direction}_ratio")]
        series = [
            Series(
                name,
                [real(r, f"{direction}_ratio") or 0.0 for r in points],
                [real(r, "spectral_relative") or 0.0 for r in points],
                end=True,
            )
            for name, points in _by_label(timed, "spectral_relative").items()
        ]
        if series:
            axis = f"time {PASSES[direction]} / SDPA's"
            data = {**where.data, "pass": direction}
            panels.append(Panel(where.title, axis, "relative spectral error", series, data, line=(1.0, "exact (SDPA)")))
    return panels


def frontiers_html(inputs: Mapping[Input, Sequence[Record]]) -> str:
    """For each pass and input the methods of least error by time, and where the cluster sketch is none of them."""
    boxes = []
    for direction in PASSES:
        for where, rows in inputs.items():
            if field := approximations(rows, direction):
                data, title = {**where.data, "pass": direction}, f"{where.title}, {PASSES[direction]}"
                boxes.append(boxed(frontier_html(field), title, data, verdict(field)))
    return f"<p class='faint'>{escape(FRONTIER)}</p>\n<div class='holds'>{''.join(boxes)}</div>"


def frontiers_markdown(records: Sequence[Record]) -> str:
    """The same as the text of a markdown file; nothing where errors or times are missing."""
    inputs = group_inputs(records)
    parts = []
    for direction, name in PASSES.items():
        for where, rows in inputs.items():
            if field := approximations(rows, direction):
                parts.append(f"## {markdown_text(where.title)}, {name}\n\n{frontier_markdown(field)}")
    if not parts:
        return ""
    made = "\n".join(f"- {name}: {markdown_text(text)}" for name, text in made_by(records).items())
    return "\n\n".join(["# Error against time", FRONTIER, *parts, "## How it was made", made]) + "\n"


def order_html(inputs: Mapping[Input, Sequence[Record]]) -> str:
    """Input by input: do the spectral errors at the largest d grow in the paper's order? Empty without its methods."""
    items = []
    for where, rows in inputs.items():
        if sentence := order_sentence(rows):
            items.append(f"<li{attributes_html(where.data)}>{escape(where.title)}: {escape(sentence)}</li>")
    if not items:
        return ""
    claim = "The paper finds Skeinformer < Informer < V-mean ≪ Linformer, by spectral error."
    return f"<p>{escape(claim)}</p>\n<ul class='holds'>{''.join(items)}</ul>"


def order_sentence(rows: Iterable[Record]) -> str:
    """Which pairs of neighbours in the paper's order differ as it says, at the largest d; nothing if one is missing.

    A difference is given in its standard errors where both have one, if it can be of the ratios to V-mean's error.
    """
    found = [_at_largest(rows, method) for method in ORDER]
    if any(row is None for row in found):
        return ""
    chain = [row for row in found if row is not None]
    errors = [real(row, "spectral") or 0.0 for row in chain]
    shown = [
        f"{label(row)} {number(row.get('spectral'))} {plus_minus(row.get('spectral_se'))}".strip() for row in chain
    ]
    text = f"{', '.join(shown)} at d = {chain[0].get('budget')}; "
    ratios = [f"{number(r.get(RATIO))} {plus_minus(r.get(f'{RATIO}_se'))}" for r in chain[:2] if r.get(RATIO)]
    if len(ratios) == 2:
        text += f"over V-mean's, trial by trial, {ratios[0].strip()} and {ratios[1].strip()}; "
    broken = [
        f"{label(low)} < {label(high)}{_apart(low, high)}"
        for low, high, x, y in zip(chain, chain[1:], errors, errors[1:], strict=False)
        if x >= y
    ]
    if broken:
        return f"{text}broken: {' and '.join(broken)}."
    return f"{text}the order holds, Linformer's error is {number(errors[3] / errors[2])} times V-mean's."


def _choice(field: str, heading: str, choices: Mapping[str, str]) -> str:
    """A switch between panels that show the same in another way."""
    return (
        f"<p class='control'>{escape(heading)} {select_html(field, choices, heading)}</p>\n" if len(choices) > 1 else ""
    )


def _table_html(where: Input, rows: Sequence[Record]) -> str:
    sizes = distinct(rows, "budget")
    largest = sizes[-1] if sizes else None

    def contest(record: Record) -> Value:
        budget = record.get("budget")
        return largest if budget is None else budget

    def data(record: Record) -> dict[str, str]:
        budget = record.get("budget")
        size = {} if budget is None else {"budget": str(budget)}
        return {"label": label(record), **size, **({"largest": ""} if size and budget == largest else {})}

    shown = [column for column in COLUMNS if column.field is None or any(r.get(column.field) is not None for r in rows)]
    ordered = sorted(rows, key=lambda r: -(real(r, "budget") or math.inf))
    table = table_html(ordered, shown, contest=contest, data=data, sortable=True)
    return boxed(table, f"{where.title}{_trials(rows)}", where.data)


def _trials(rows: Iterable[Record]) -> str:
    """How many trials the rows are means of, to stand behind a title."""
    trials = [count(x) for x in distinct(rows, "trials")]
    return f"; trials: {between(trials[0], trials[-1]) if len(trials) > 1 else trials[0]}" if trials else ""


def _skipped_html(records: Iterable[Record]) -> str:
    """An item for each method and reason, with the lengths and the sample sizes that it holds for."""
    found: dict[tuple[str, Value], list[Record]] = {}
    for record in records:
        found.setdefault((label(record), record.get("reason")), []).append(record)
    items = []
    for (name, reason), group in found.items():
        lengths, budgets = ([count(x) for x in distinct(group, field)] for field in ("n", "budget"))
        where = f"n = {', '.join(lengths)}" + (f"; d = {', '.join(budgets)}" if budgets else "")
        items.append(f"<li>{escape(f'{name} ({where}): {reason}')}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _shown(rows: Sequence[Record], measure: str) -> Sequence[Record]:
    """The rows that a measure shows: all, or the rivals up to its greatest value."""
    most = MEASURES[measure].most
    if most == math.inf:
        return rows
    return [r for r in rows if is_approximation(r) and (real(r, measure) or math.inf) <= most]


def _decimals(value: Value) -> str:
    """A cosine: most are close to one."""
    return f"{value:.5f}" if isinstance(value, int | float) else ""


def _by_label(rows: Iterable[Record], field: str) -> dict[str, list[Record]]:
    """The approximations whose `field` a logarithmic axis can show, each method's by growing d."""
    found: dict[str, list[Record]] = {}
    for row in sorted(rows, key=lambda r: real(r, "budget") or 0):
        if row.get("method") != REFERENCE and (real(row, field) or 0) > 0:
            found.setdefault(label(row), []).append(row)
    return found


def _at_largest(rows: Iterable[Record], method: str) -> Record | None:
    """The method's row at its largest d, with its default options; else that of one that computes the same."""
    rows = [r for r in rows if real(r, "spectral") is not None and not r.get("options")]
    for name in (method, *(other for other, row in METHODS.items() if row.same_as == method)):
        if found := [r for r in rows if r.get("method") == name]:
            return max(found, key=lambda r: real(r, "budget") or 0)
    return None


def _apart(low: Record, high: Record) -> str:
    """By how many standard errors of their difference the two differ."""
    field = RATIO if all(real(row, RATIO) is not None for row in (low, high)) else "spectral"
    errors = [real(row, f"{field}_se") for row in (low, high)]
    if any(error is None for error in errors):
        return ""
    both = math.hypot(*(error or 0.0 for error in errors))
    difference = (real(low, field) or 0.0) - (real(high, field) or 0.0)
    return f" ({difference / both:.1f} standard errors the other way)" if both else ""
