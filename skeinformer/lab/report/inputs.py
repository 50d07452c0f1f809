"""Queries, keys and values that `skein approx` measured on, and the methods' errors and costs on each of them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skeinformer.lab.measure.approx import GRADIENTS, summarize
from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.format import count, real

INPUTS = ("model", "text", "weights", "layer", "n", "device")  # where queries, keys and values come from, and are
PASSES = {"both": "forward and backward", "forward": "forward"}
COSTS = (
    *(f"{name}_ratio{end}" for name in PASSES for end in ("", "_q25", "_q75")),
    "peak_bytes",
    "both_peak_bytes",
    "flops",
)


class Input(NamedTuple):
    """Where queries, keys and values come from. `title` leaves out what is the same in all panels of the page."""

    fields: tuple[Value, ...]
    title: str

    @property
    def data(self) -> dict[str, str]:
        """For the filters."""
        return {name: str(value) for name, value in zip(INPUTS, self.fields, strict=True) if value is not None}

    def alike(self, other: "Input", names: Iterable[str]) -> bool:
        """Do both have the same values of these fields?"""
        return all(self.data.get(name) == other.data.get(name) for name in names)


def group_inputs(records: Sequence[Record]) -> dict[Input, list[Record]]:
    """Summaries of the trials with the costs beside them, by input: initialized weights first, then by layer and n.

    Time and memory depend on sizes alone, so that those measured on one layer and one kind of weights serve all.
    """
    costs = {_contender(r): r for r in records if r.get("kind") == "approx_time"}
    found: dict[tuple[Value, ...], list[Record]] = {}
    for summary in summarize(records):
        cost = costs.get(_contender(summary), {})
        row = {**summary, **{name: cost.get(name) for name in COSTS}, **_gradient(summary)}
        found.setdefault(tuple(row.get(name) for name in INPUTS), []).append(row)
    alike = [len({key[i] for key in found}) == 1 for i in range(len(INPUTS))]
    return {
        Input(key, _title(key, alike)): found[key]
        for key in sorted(found, key=lambda key: tuple((x is None, isinstance(x, str), x or 0) for x in key))
    }


def pick_input(inputs: Mapping[Input, Sequence[Record]], **wanted: Value) -> tuple[Input, list[Record]]:
    """The input with the wanted fields; where a field is None: pretrained weights, the first layer, the greatest n."""
    chosen = [where for where in inputs if all(str(v) == where.data.get(k) for k, v in wanted.items() if v is not None)]
    if not chosen:
        asked = ", ".join(f"{name} {value}" for name, value in wanted.items() if value is not None)
        known = "; ".join(where.title for where in inputs)
        raise ValueError(f"no records of {asked}; there are: {known}")

    def preference(where: Input) -> tuple[bool, float, float]:
        _, _, weights, layer, n, _ = where.fields
        return weights == "pretrained", -float(layer or 0), float(n or 0)

    where = max(chosen, key=preference)
    return where, list(inputs[where])


def _gradient(summary: Record) -> Record:
    """The mean of the three gradient errors; its standard error is at most the mean of theirs."""
    result: Record = {}
    for end in ("", "_se"):
        values = [real(summary, f"{name}{end}") for name in GRADIENTS]
        known = [value for value in values if value is not None]
        result[f"gradient{end}"] = sum(known) / len(known) if len(known) == len(GRADIENTS) else None
    return result


def _contender(record: Record) -> tuple[Value, ...]:
    return tuple(record.get(name) for name in ("model", "n", "method", "options", "budget", "device"))


def _title(key: Sequence[Value], alike: Sequence[bool]) -> str:
    """Weights and n always, the others where they differ."""
    model, text, weights, layer, n, device = key
    parts = [
        str(weights) if weights else "",
        f"n = {count(n)}",
        "" if alike[3] else f"layer {layer}",
        "" if alike[0] else str(model),
        "" if alike[1] else str(text),
        "" if alike[5] else f"on {device or 'cpu'}",
    ]
    return ", ".join(part for part in parts if part)
