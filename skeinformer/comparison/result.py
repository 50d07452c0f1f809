"""Comparison: the result of `compare`, as records and as plain text: a table of layers and heads, and sentences."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from textwrap import fill
from typing import IO

from skeinformer.comparison.measure import Record, Value

WIDTH = 100  # columns of the text, at most
# fields that the records of one comparison share
SETTINGS = ("model", "text", "method", "options", "budget", "tolerance", "seed", "started")


@dataclass(frozen=True, repr=False)
class Comparison:
    """Exact and sketched attention side by side."""

    layers: tuple[Record, ...]
    """For each attention call the record of the whole layer, whose head is None, then one of each head."""
    whole: Record  # of the model: outputs, time, how many layers are safe
    left: Mapping[str, str]  # layers that stay exact, each with the reason

    @property
    def safe(self) -> tuple[str, ...]:
        """Names of the layers in which no head has an error above the tolerance, at any call."""
        return tuple(safe_layers(self.layers)[0])

    @property
    def unsafe(self) -> tuple[str, ...]:
        """Names of the other layers that were sketched."""
        return tuple(safe_layers(self.layers)[1])

    def records(self) -> list[Record]:
        """Return the flat records of the kinds compare_layer and compare_model, which `skein bench --html` reads."""
        return [*self.layers, self.whole]

    def json(self) -> str:
        """Return the records as a JSON list."""
        return json.dumps(self.records(), indent=1)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the JSON to a file."""
        Path(path).write_text(self.json() + "\n", encoding="utf-8")

    def text(self, *, heads: bool = True) -> str:
        """Return a table with a row for each layer, and by `heads` for each head, and a summary in sentences."""
        wrap = partial(fill, width=WIDTH, break_long_words=False, break_on_hyphens=False)
        return "\n".join([text_table(self.layers, heads=heads), "", *map(wrap, sentences(self.whole, self.layers))])

    def print(self, file: IO[str] | None = None, *, heads: bool = True) -> None:
        """Print the text, at most 100 columns wide; `file` is that of Python's `print`."""
        print(self.text(heads=heads), file=file)

    __str__ = text

    def __repr__(self) -> str:
        model, label, safe = self.whole.get("model"), self.whole.get("label"), len(self.safe)
        return f"<Comparison of {model} with {label}: {safe} of {safe + len(self.unsafe)} attention layers safe>"


def number(value: Value, unit: str = "", scale: float = 1) -> str:
    """Format value * scale with three significant digits, two below 0.001; nothing for None."""
    if not isinstance(value, int | float):
        return ""
    value *= scale
    form = ".0f" if value == 0 or abs(value) >= 100 else ".1e" if abs(value) < 1e-3 else "#.3g"
    return f"{value:{form}}{unit}"


def count(value: Value) -> str:
    return f"{value:,}" if isinstance(value, int) else ""


# field of a record to the two lines of its heading; of times, the scale is ms
NUMBERS = {"error": ("true", "error"), "estimate": ("estimated", "error"), "bound": ("its", "bound")}
NUMBERS |= {"seconds_exact": ("exact", "ms"), "seconds_sketched": ("sketched", "ms"), "ratio": ("time /", "exact")}


def text_table(layers: Sequence[Record], *, heads: bool = True) -> str:
    """Align a row for each layer, and for each of its heads by `heads`; of a name that is too long only the end."""
    rows = [record for record in layers if heads or record.get("head") is None]
    columns = [["", "head", *("all" if r.get("head") is None else str(r.get("head")) for r in rows)]] if heads else []
    for field, heading in NUMBERS.items():
        cells = [number(r.get(field), scale=1e3 if heading[1] == "ms" else 1) for r in rows]
        columns += [[*heading, *cells]] if any(cells) else []
    columns.append(["", "safe", *("yes" if r.get("safe") else "no" for r in rows)])
    widths = [max(map(len, column)) for column in columns]
    room = WIDTH - sum(widths) - len(widths)
    names = [name if len(name) <= room else f"...{name[3 - room :]}" for name in map(layer_name, rows)]
    names, lines = ["", "layer", *names], []
    for i, name in enumerate(names):
        starts_layer = heads and i > 2 and rows[i - 2].get("head") is None  # a blank line before it
        cells = [column[i].rjust(width) for column, width in zip(columns, widths, strict=True)]
        lines.append("\n" * starts_layer + " ".join([name.ljust(max(map(len, names))), *cells]).rstrip())
    return "\n".join(lines)


def sentences(whole: Record, records: Sequence[Record]) -> list[str]:
    """Summarize one comparison: the output, the time, the worst head, which layers are safe, what stays exact."""
    records = [record for record in records if of_comparison(record, whole)]
    at = f" at d = {count(whole.get('budget'))}" if whole.get("budget") else ""
    if not isinstance(ratio := whole.get("ratio"), int | float):
        raise ValueError(f"record field 'ratio' is {ratio!r}, expected a number")
    speed = f"is {number(1 / ratio)} times as fast" if ratio < 1 else f"takes {number(ratio)} times as long"
    text = {name: number(value) for name, value in whole.items()}
    output = [
        f"{whole.get('label')}{at} in {whole.get('model')}, n = {count(whole.get('n'))}: the cosine between a row of "
        f"its {whole.get('output')} and the exact model's is {whole.get('cosine_min'):.4f} at least and "
        f"{whole.get('cosine'):.4f} on average. The sketched model {speed} (time / exact {text['ratio']}, quartiles "
        f"{text['ratio_q25']} to {text['ratio_q75']})."
    ]
    if (same := whole.get("argmax_agreement")) is not None:
        change = f"{text['logits_change']} on average and {text['logits_change_max']} at most"
        output.append(f"Logits change by {change}; the largest is the same in {same:.1%} of the rows.")
    if heads := sorted((r for r in records if r.get("head") is not None), key=_error):
        worst, half, nine = (number(heads[math.ceil(q * len(heads)) - 1].get("error")) for q in (1, 0.5, 0.9))
        head = f"head {heads[-1].get('head')} of {layer_name(heads[-1])}"
        share = f"half of them have at most {half}, nine in ten at most {nine}"
        output.append(f"The worst of {len(heads)} heads, {head}, has an error of {worst}; {share}.")
    safe, unsafe = (", ".join(names) for names in safe_layers(records))
    output += [f"Safe{at}, no head has an error above {text['tolerance']}: {safe}."] if safe else []
    output += [f"Not safe{at}, a head has an error above {text['tolerance']}: {unsafe}."] if unsafe else []
    return [*output, *([f"Exact in both models: {whole.get('left')}."] if whole.get("left") else [])]


def safe_layers(records: Sequence[Record]) -> tuple[list[str], list[str]]:
    """Name the layers that are safe, and the others: a layer that is called several times if every call is."""
    safe: dict[str, bool] = {}
    for record in records:
        if record.get("head") is None:
            name = str(record.get("layer"))
            safe[name] = safe.get(name, True) and bool(record.get("safe"))
    return [name for name in safe if safe[name]], [name for name in safe if not safe[name]]


def layer_name(record: Record) -> str:
    """Name a layer, with the number of its call from the second on."""
    call = record.get("call")
    return f"{record.get('layer')}" + (f" (call {call})" if isinstance(call, int) and call > 1 else "")


def of_comparison(record: Record, whole: Record) -> bool:
    return record.get("kind") == "compare_layer" and all(record.get(name) == whole.get(name) for name in SETTINGS)


def _error(record: Record) -> float:
    error = float(record.get("error") or 0)
    return math.inf if math.isnan(error) else error  # sorts NaN as the largest
