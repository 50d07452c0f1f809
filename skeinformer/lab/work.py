"""What a long measurement says of itself: what is under way, and which share of the work is done."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

OnStep = Callable[[str, float], None]
"""Told before each step what it is, "place: detail", and the share of the work that is done."""
OnSkip = Callable[[str, str], None]
"""Told what is left out, and why."""


def silent(detail: str, done: float) -> None:
    """Say nothing."""


def part_of(on_step: OnStep, place: str, done: float, share: float) -> OnStep:
    """Of a part of the work: its own details and shares, told as those of the whole."""
    return lambda detail, part: on_step(f"{place}: {detail}", done + share * part)


@dataclass
class Work:
    """Says what is under way, and which share of the estimated cost is done."""

    total: float
    on_step: OnStep
    done: float = 0.0

    def step(self, detail: str, cost: float) -> None:
        """Announce a piece of work of the given cost, before it begins."""
        self.on_step(detail, min(1.0, self.done / self.total))
        self.done += cost


def now() -> str:
    """The time, as records write it."""
    return datetime.now(UTC).isoformat(timespec="seconds")
