"""Values of records as a reader sees them: numbers, times and shares."""

import math
from collections.abc import Sequence

from skeinformer.compare.record import Value


def number(value: Value, unit: str = "") -> str:
    """Three significant digits, two where it is below 0.001; nothing for None."""
    if not isinstance(value, int | float):
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}{unit}"
    return f"{value:.1e}{unit}" if abs(value) < 1e-3 else f"{value:#.3g}{unit}"


def bound(value: Value) -> str:
    """As `number`, but below 1 with three decimals, rounded up."""
    if isinstance(value, int | float) and 0 < value < 1:
        return f"{math.ceil(1000 * value) / 1000:.3f}"
    return number(value)


def decimals(value: Value) -> str:
    """Two decimals."""
    return f"{value:.2f}" if isinstance(value, int | float) else ""


def milliseconds(value: Value) -> str:
    """A time in seconds as a number of milliseconds."""
    return number(value * 1e3) if isinstance(value, int | float) else ""


def percent(value: Value) -> str:
    """A share of one, in percent."""
    return number(value * 100, " %") if isinstance(value, int | float) else ""


def count(value: Value) -> str:
    """A whole number with commas: a length, a number of trials."""
    return f"{value:,}" if isinstance(value, int) else ""


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
