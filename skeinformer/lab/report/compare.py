"""Section of `skein compare`: a model with exact and with sketched attention, layer by layer and as a whole."""

from collections.abc import Sequence
from html import escape

from skeinformer.comparison.measure import Record, Value
from skeinformer.comparison.result import count, layer_name, number, of_comparison, sentences
from skeinformer.lab.report.figures import Styles
from skeinformer.lab.report.format import between, cosine, label, percent, real, seconds
from skeinformer.lab.report.heat import heat_html
from skeinformer.lab.report.page import Section
from skeinformer.lab.report.tables import Column, attributes_html, boxed, table_html


def quartiles_of_ratio(record: Record) -> str:
    """The range of half of the rounds; one round has none."""
    low, high = record.get("ratio_q25"), record.get("ratio_q75")
    return "" if low == high else between(number(low), number(high))


METHOD_COLUMNS = (
    Column("method", label),
    Column("d", lambda r: count(r.get("budget")), field="budget"),
    Column("n", lambda r: count(r.get("n")), field="n"),
)
LAYER_COLUMNS = (
    Column("layer", layer_name),
    Column("head", lambda r: "all" if r.get("head") is None else str(r.get("head")), field="head"),
    *METHOD_COLUMNS,
    Column("true error", lambda r: number(r.get("error")), field="error"),
    Column("estimated error", lambda r: number(r.get("estimate")), field="estimate"),
    Column("bound", lambda r: number(r.get("bound")), field="bound"),
    Column("exact", lambda r: seconds(r.get("seconds_exact")), field="seconds_exact"),
    Column("sketched", lambda r: seconds(r.get("seconds_sketched")), field="seconds_sketched"),
    Column(
        "time / exact",
        lambda r: number(r.get("ratio")),
        quartiles_of_ratio,
        "ratio",
    ),
    Column("safe", lambda r: "yes" if r.get("safe") else "no"),
)
MODEL_COLUMNS = (
    *METHOD_COLUMNS,
    Column("model", lambda r: str(r.get("model"))),
    Column("text", lambda r: str(r.get("text"))),
    Column("cosine", lambda r: cosine(r.get("cosine")), lambda r: _least(r.get("cosine_min")), "cosine", "high"),
    Column("change", lambda r: number(r.get("change")), field="change", best="low"),
    Column(
        "change of logits",
        lambda r: number(r.get("logits_change")),
        lambda r: f"largest {number(r.get('logits_change_max'))}" if r.get("logits_change_max") is not None else "",
        "logits_change",
        "low",
    ),
    Column("same largest", lambda r: percent(r.get("argmax_agreement")), field="argmax_agreement", best="high"),
    Column(
        "time / exact",
        lambda r: number(r.get("ratio")),
        quartiles_of_ratio,
        "ratio",
        "low",
    ),
    Column("safe layers", lambda r: f"{r.get('layers_safe')} of {r.get('layers')}", field="layers_safe"),
    Column("worst head", lambda r: number(r.get("error_worst")), field="error_worst", best="low"),
    Column("median head", lambda r: number(r.get("error_median")), field="error_median", best="low"),
)
LEGEND = (
    "Error: |R - BV| / |BV| in the Frobenius norm, of a head or of all heads of a layer together, on the queries, "
    "keys and values of the exact run. Estimated error: what the method itself reports; bound: what the error exceeds "
    "in at most 7 of 100 draws, by its own account. Safe: the true error at d is at most the tolerance, in a layer "
    "that of every head. Cosine: of the rows that the exact and the sketched model return, mean and least. "
    "Change: of the output, relative. Worst head, median head: true errors of "
    "the heads of all layers. Times: median and quartiles of interleaved rounds."
)


def compare_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """The whole models, in sentences and a table; a map of layers and heads for each; then tables of both."""
    fields = frozenset({"label", "n", "model", "text"})
    wholes = [r for r in records if r.get("kind") == "compare_model"]
    html = "".join(
        f"<p{attributes_html(_data(record))}>{escape(' '.join(sentences(record, records)))}</p>\n" for record in wholes
    )
    if wholes:
        alone = len(wholes) == 1  # then nothing is the best
        columns = [column._replace(best=None) if alone else column for column in MODEL_COLUMNS]
        table = table_html(wholes, columns, contest=_input, data=_data, sortable=True)
        html += f"<div class='holds'>{boxed(table)}</div>\n"
    for whole in wholes:
        if (own := [r for r in records if of_comparison(r, whole)]) and (tolerance := real(whole, "tolerance")):
            html += f"<div{attributes_html(_data(whole))}>\n{heat_html(own, tolerance, heat_title(whole))}\n</div>\n"
    layers = [r for r in records if any(of_comparison(r, whole) for whole in wholes)]
    for heading in ("Layers", "Heads"):
        if rows := [r for r in layers if (r.get("head") is None) == (heading == "Layers")]:
            table = table_html(rows, LAYER_COLUMNS, contest=_input, data=_data, sortable=True)
            html += f"<details><summary>All numbers: {heading.lower()}</summary>\n"
            html += f"<div class='holds'>{boxed(table)}</div>\n</details>\n"
    return [Section("A model, exact and sketched", f"{html}<p class='faint'>{escape(LEGEND)}</p>", fields, records)]


def heat_title(whole: Record) -> str:
    """What a map of errors shows."""
    size = f" at d = {count(whole.get('budget'))}" if whole.get("budget") else ""
    return f"{label(whole)}{size} in {whole.get('model')}, n = {count(whole.get('n'))}"


def _least(value: Value) -> str:
    return f"least {cosine(value)}" if value is not None else ""


def _input(record: Record) -> object:
    return record.get("model"), record.get("text"), record.get("n")


def _data(record: Record) -> dict[str, str]:
    shown = {name: record.get(name) for name in ("n", "model", "text")}
    return {"label": label(record), **{name: str(value) for name, value in shown.items() if value is not None}}
