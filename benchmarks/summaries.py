"""Means over the trials of `benchmarks.approximation`, and the small file of them that is published."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from skeinformer.cli.records import Record, Value, key_of, write_file

KEYS = ("model", "text", "seed", "weights", "layer", "n", "method", "options", "budget", "device")
GRADIENTS = ("grad_query", "grad_key", "grad_value")
VALUES: tuple[str, ...] = (
    "spectral",
    "spectral_relative",
    "frobenius",
    "frobenius_relative",
    "row",
    "cosine",
    *GRADIENTS,
)
VALUES = (*VALUES, "estimate", "estimate_ratio")
# how a record was made: a summary has these fields only where they change
MADE = ("started", "cpu", "cores", "gpu", "torch", "python", "skeinformer", "commit", "command")


def summarize(records: Iterable[Record]) -> list[Record]:
    """Make one "approx_summary" of all trials with the same KEYS: mean, standard error `<value>_se`, `trials`.

    `spectral_to_vmean` is the mean of the ratio to V-mean's spectral error in the same trial: what makes an input hard
    for all methods cancels. Of two summaries of the same, the one of more trials stays.
    """
    records = list(records)
    means = {_trial(r): float(r["spectral"]) for r in records if _is_vmean(r)}  # type: ignore[arg-type]
    trials: dict[tuple[Value, ...], dict[object, Record]] = {}
    found: dict[tuple[Value, ...], Record] = {}

    def keep(key: tuple[Value, ...], summary: Record) -> None:
        if key not in found or int(summary["trials"] or 0) > int(found[key]["trials"] or 0):
            found[key] = summary

    for record in records:
        if record.get("kind") == "approx":
            trials.setdefault(key_of(record, KEYS), {})[record.get("trial")] = record
        elif record.get("kind") == "approx_summary":
            keep(key_of(record, KEYS), record)
    for key, group in trials.items():
        keep(key, _summary(list(group.values()), means))
    return list(found.values())


def _summary(group: Sequence[Record], means: dict[tuple[Value, ...], float]) -> Record:
    result: Record = {name: value for name, value in group[-1].items() if name not in (*VALUES, "trial")}
    result |= {"kind": "approx_summary", "trials": len(group)}
    numbers = {name: [float(x) for r in group if (x := r.get(name)) is not None] for name in VALUES}
    numbers["spectral_to_vmean"] = [
        float(x) / mean for r in group if (x := r.get("spectral")) is not None and (mean := means.get(_trial(r)))
    ]
    for name, values in numbers.items():
        result[name] = float(np.mean(values)) if values else None
        result[f"{name}_se"] = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return result


def _trial(record: Record) -> tuple[Value, ...]:
    return key_of(record, ("model", "text", "seed", "weights", "layer", "n", "trial", "device"))


def _is_vmean(record: Record) -> bool:
    return record.get("kind") == "approx" and record.get("method") == "vmean" and bool(record.get("spectral"))


def write_summary(records: Sequence[Record], path: Path) -> None:
    """Write means, times and what was left out, small enough to publish: six digits, nothing for None."""
    made: Record = {}
    lines: dict[str, None] = {}  # each once
    others = [r for r in records if r.get("kind") in ("approx_time", "approx_skipped")]
    for record in [*summarize(records), *others]:
        short = {x: float(f"{y:.6g}") if isinstance(y, float) else y for x, y in record.items() if y is not None}
        lines[json.dumps({x: y for x, y in short.items() if x not in MADE or made.get(x) != y}) + "\n"] = None
        made |= {x: y for x, y in short.items() if x in MADE}
    write_file(path, "".join(lines))
