"""What a part of the campaign counts."""

from collections.abc import Callable
from typing import NamedTuple

OnCase = Callable[[int, int], None]  # tried, failed


class Outcome(NamedTuple):
    """How many cases were tried and failed, and what is to be said of the failures."""

    tried: int
    failed: int
    notes: tuple[str, ...] = ()
