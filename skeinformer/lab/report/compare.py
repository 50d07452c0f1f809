"""Section of `skein compare`: a model with exact and with sketched attention, layer by layer and as a whole."""

from collections.abc import Sequence
from html import escape

from skeinformer.lab.records import Record
from skeinformer.lab.report.figures import Styles
from skeinformer.lab.report.format import between, count, distinct, label, listed, number, percent, required, seconds
from skeinformer.lab.report.page import Section
from skeinformer.lab.report.tables import Column, attributes_html, boxed, table_html

# what layers and the model of one comparison share
SETTINGS = ("model", "text", "method", "options", "samples", "tolerance", "seed", "started")
LAYER_COLUMNS = (
    Column("method", label),
    Column("d", lambda r: count(r.get("samples")), field="samples"),
    Column("n", lambda r: count(r.get("n")), field="n"),
    Column("layer", lambda r: shown_layer(r)),
    Column("head", lambda r: "all" if r.get("head") is None else str(r.get("head")), field="head"),
    Column("true error", lambda r: number(r.get("error")), field="error"),
    Column("estimated error", lambda r: number(r.get("estimate")), field="estimate"),
    Column("entropy", lambda r: number(r.get("entropy")), field="entropy"),
    Column("exact", lambda r: seconds(r.get("seconds_exact")), field="seconds_exact"),
    Column("sketched", lambda r: seconds(r.get("seconds_sketched")), field="seconds_sketched"),
    Column(
        "time / exact",
        lambda r: number(r.get("ratio")),
        lambda r: between(number(r.get("ratio_q25")), number(r.get("ratio_q75"))),
        "ratio",
    ),
    Column("safe", lambda r: "yes" if r.get("safe") else "no"),
    Column("d needed", lambda r: count(r.get("samples_needed")), field="samples_needed"),
    Column("d by estimate", lambda r: count(r.get("samples_estimated")), field="samples_estimated"),
)
MODEL_COLUMNS = (
    Column("model", lambda r: str(r.get("model"))),
    Column("text", lambda r: str(r.get("text"))),
    *LAYER_COLUMNS[:3],
    Column("cosine", lambda r: cosine(r.get("cosine")), lambda r: _least(r.get("cosine_min")), "cosine", "high"),
    Column("cosine, pooled", lambda r: cosine(r.get("pooled_cosine")), field="pooled_cosine", best="high"),
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
        lambda r: between(number(r.get("ratio_q25")), number(r.get("ratio_q75"))),
        "ratio",
        "low",
    ),
    Column("safe layers", lambda r: f"{r.get('layers_safe')} of {r.get('layers')}", field="layers_safe"),
    Column("d needed", lambda r: count(r.get("samples_needed")), field="samples_needed"),
    Column("d by estimate", lambda r: count(r.get("samples_estimated")), field="samples_estimated"),
)
LEGEND = (
    "Error: |R - BV| / |BV| in the Frobenius norm, of a head or of all heads of a layer together, on the queries, keys "
    "and values of the exact run. Estimated error: what the method itself reports. Entropy: of exact attention rows, "
    "mean, in nats; log n where attention is flat. Safe: the true error at d is at most the tolerance. d needed: the "
    "smallest power of two, or d itself, whose true error is at most the tolerance, and above d what is not safe at d; "
    "all keys where no smaller one will do. d by estimate: what the method's own estimate alone would choose. Cosine: "
    "of the rows that the exact and the sketched model return, mean and least; pooled: of the mean over rows, least of "
    "all inputs. Change: of the output, relative. Times: median and quartiles of interleaved rounds."
)


def compare_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """The whole models, in sentences and a table; then a table of layers and heads for each."""
    fields = frozenset({"label", "n", "model", "text"})
    wholes = [r for r in records if r.get("kind") == "compare_model"]
    html = "".join(
        f"<p{attributes_html(_data(record))}>{escape(' '.join(sentences(record, records)))}</p>\n" for record in wholes
    )
    if wholes:
        table = table_html(wholes, MODEL_COLUMNS, contest=_input, data=_data, sortable=True)
        html += f"<div class='holds'>{boxed(table)}</div>\n"
    layers = [r for r in records if any(of_comparison(r, whole) for whole in wholes)]
    for heading in ("Layers", "Heads"):
        if rows := [r for r in layers if (r.get("head") is None) == (heading == "Layers")]:
            table = table_html(rows, LAYER_COLUMNS, contest=_input, data=_data, sortable=True)
            html += f"<details{' open' if heading == 'Layers' else ''}><summary>{heading}</summary>\n"
            html += f"<div class='holds'>{boxed(table)}</div>\n</details>\n"
    return [Section("A model, exact and sketched", f"{html}<p class='faint'>{escape(LEGEND)}</p>", fields, records)]


def sentences(whole: Record, records: Sequence[Record]) -> list[str]:
    """What a comparison of one model shows: the output, the time, which layers are safe, and the d that is needed."""
    layers = [r for r in records if r.get("head") is None and of_comparison(r, whole)]
    tolerance, samples = number(whole.get("tolerance")), count(whole.get("samples"))
    at = f" at d = {samples}" if samples else ""
    ratio = required(whole, "ratio")
    speed = f"{number(1 / ratio)} times as fast" if ratio < 1 else f"{number(ratio)} times as slow"
    spread = between(number(whole.get("ratio_q25")), number(whole.get("ratio_q75")))
    found = [
        f"{label(whole)}{at} in {whole.get('model')}, n = {count(whole.get('n'))}: mean cosine of "
        f"{whole.get('output')} with those of the exact model {cosine(whole.get('cosine'))}, and the model is "
        f"{speed} (time / exact {number(ratio)}, {spread})."
    ]
    if whole.get("argmax_agreement") is not None:
        mean, largest = number(whole.get("logits_change")), number(whole.get("logits_change_max"))
        same = percent(whole.get("argmax_agreement"))
        found.append(
            f"Logits change by {mean} on average and {largest} at most; the largest is the same in {same} of the rows."
        )
    safe, unsafe = verdicts(layers)
    verdict = [f"safe: {listed(safe)}"] if safe else []
    verdict += [f"not safe: {listed(unsafe)}"] if unsafe else []
    found.append(f"Error of at most {tolerance}{at}: {'; '.join(verdict)}.")
    if whole.get("samples_needed") is not None:
        each = [
            f"{d:,} for {listed([shown_layer(r) for r in layers if r.get('samples_needed') == d])}"
            for d in distinct(layers, "samples_needed")
        ]
        needed = count(whole.get("samples_needed"))
        chosen = count(whole.get("samples_estimated"))
        estimate = f" Its own estimate would choose {chosen}." if chosen else ""
        found.append(f"To meet {tolerance} in every layer: d = {needed} ({'; '.join(each)}).{estimate}")
    if whole.get("left"):
        found.append(f"Exact in both: {whole.get('left')}.")
    return found


def verdicts(records: Sequence[Record]) -> tuple[list[str], list[str]]:
    """Names of the layers that are safe, and of the others: a layer that is called several times if every call is."""
    safe: dict[str, bool] = {}
    for record in records:
        if record.get("head") is None:
            name = str(record.get("layer"))
            safe[name] = safe.get(name, True) and bool(record.get("safe"))
    return [name for name in safe if safe[name]], [name for name in safe if not safe[name]]


def shown_layer(record: Record) -> str:
    """The layer's name, with the number of the call where it is not the first."""
    name, call = str(record.get("layer")), record.get("call")
    return f"{name} (call {call})" if isinstance(call, int) and call > 1 else name


def of_comparison(record: Record, whole: Record) -> bool:
    """Whether the record is of a layer or head of that comparison."""
    return record.get("kind") == "compare_layer" and all(record.get(name) == whole.get(name) for name in SETTINGS)


def cosine(value: object) -> str:
    """Four decimals: what matters is the distance from 1."""
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def _least(value: object) -> str:
    return f"least {cosine(value)}" if value is not None else ""


def _input(record: Record) -> object:
    return record.get("model"), record.get("text"), record.get("n")


def _data(record: Record) -> dict[str, str]:
    shown = {name: record.get(name) for name in ("n", "model", "text")}
    return {"label": label(record), **{name: str(value) for name, value in shown.items() if value is not None}}
