"""Values of records as a reader sees them: numbers, times, sizes, spreads and names."""

import math
from collections.abc import Iterable, Sequence

from skeinformer.attention import METHODS
from skeinformer.comparison.result import count, number
from skeinformer.lab.records import Record, Value

__all__ = [
    "between",
    "cosine",
    "count",
    "distinct",
    "is_approximation",
    "is_rival",
    "label",
    "listed",
    "microseconds",
    "number",
    "operations",
    "percent",
    "plus_minus",
    "real",
    "required",
    "seconds",
    "size",
    "with_error",
]

REFERENCE = "softmax"  # the method that the others approximate
FLOOR = "vmean"  # gives every row the mean of the values, whatever the queries: what any method must beat
ROUNDING = 1e-4  # an error below is one of float32 arithmetic


def percent(value: Value) -> str:
    """A share of one, in percent."""
    return number(value * 100, " %") if isinstance(value, int | float) else ""


def cosine(value: Value) -> str:
    """Four decimals: what matters is the distance from 1."""
    return f"{value:.4f}" if isinstance(value, int | float) else ""


def between(low: str, high: str) -> str:
    """low to high, where there are such."""
    return f"{low} to {high}" if low and high else ""


def listed(values: Sequence[object], most: int = 8) -> str:
    """The values with commas between them; of many, the first, and how many more there are."""
    shown = ", ".join(str(value) for value in values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def seconds(value: Value) -> str:
    """A time in seconds or milliseconds."""
    if not isinstance(value, int | float):
        return ""
    return number(value, " s") if value >= 1 else number(value * 1e3, " ms")


def microseconds(value: Value) -> str:
    """A time of a token."""
    return number(value * 1e6, " us") if isinstance(value, int | float) else ""


def size(value: Value) -> str:
    """A number of bytes in KiB or MiB."""
    if not isinstance(value, int | float):
        return ""
    return number(value / 2**20, " MiB") if value >= 2**20 else number(value / 2**10, " KiB")


def operations(value: Value) -> str:
    """A number of floating-point operations in millions or billions (G)."""
    if not isinstance(value, int | float):
        return ""
    return number(value / 1e9, " G") if value >= 1e9 else number(value / 1e6, " M")


def plus_minus(standard_error: Value) -> str:
    """± standard error to two digits, where there is one."""
    if not isinstance(standard_error, int | float):
        return ""
    digits = f"{standard_error:#.2g}"
    return f"± {digits}" if 0 < standard_error < 9.5 else f"± {float(digits):.0f}"


def with_error(value: Value, standard_error: Value) -> str:
    """value ± standard error to the value's third digit, or more; the value alone if it has no error or is rounding."""
    if not isinstance(value, int | float) or not isinstance(standard_error, int | float) or value < ROUNDING:
        return number(value)
    decimals = max(3, 2 - math.floor(math.log10(value)))
    return f"{value:.{decimals}f} ± {standard_error:.{decimals}f}"


def is_approximation(record: Record) -> bool:
    """Is the record of a method that approximates exact attention, and not of exact attention itself?"""
    row = METHODS.get(str(record.get("method")))
    return row is None or row.exact_from != 0


def is_rival(record: Record) -> bool:
    """May the record's method be called the best? Exact attention may not, nor V-mean: it is the floor of a table."""
    return is_approximation(record) and record.get("method") != FLOOR


def label(record: Record) -> str:
    """What a reader calls the record's method."""
    return str(record.get("label") or record.get("method") or "")


def real(record: Record, name: str) -> float | None:
    """The field `name` as a number, or None where the record has none."""
    value = record.get(name)
    return float(value) if isinstance(value, int | float) else None


def required(record: Record, name: str) -> float:
    """The field `name` as a number; a ValueError where the record has none."""
    value = real(record, name)
    if value is None:
        raise ValueError(f"record field {name!r} is {record.get(name)!r}, expected a number")
    return value


def distinct(records: Iterable[Record], name: str) -> list[Value]:
    """The values of the field `name`, each once: numbers by size, anything else in the order of the records."""
    values = list(dict.fromkeys(r[name] for r in records if r.get(name) is not None))
    if all(isinstance(value, int | float) for value in values):
        return sorted(values, key=lambda value: float(value or 0))
    return values
