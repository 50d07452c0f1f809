"""Tables of named things, and errors that say what was asked, what exists and what is nearest."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from operator import index
from typing import SupportsFloat, SupportsIndex, TypeVar

T = TypeVar("T")

# other names for a quantity that has one name here
OTHER_NAMES = {
    **dict.fromkeys(
        ("num_samples", "samples", "num_features", "num_landmarks", "num_clusters", "sketch_size"), "budget"
    ),
    "d": "budget",
    "pilots": "num_pilots",
}


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """The entry of `table` called `name`, or a ValueError that names the nearest one."""
    if not isinstance(name, str):
        raise TypeError(f"{kind} is chosen by its name, a string, got {name!r}")
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}{_suggest(name, table)} Known: {', '.join(table)}.")
    return table[name]


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        options = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{argument}={value!r} is not known{_suggest(str(value), choices)} Choose one of {options}.")


def check_options(owner: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError if an option is not one that `owner` takes."""
    known = list(known)
    for name in given:
        if name not in known:
            options = ", ".join(known) if known else "none"
            nearest = nearest_option(name, known)
            suggestion = f"; did you mean {nearest!r}?" if nearest else "."
            raise TypeError(f"{owner} has no option {name!r}{suggestion} Its options: {options}.")


def nearest_option(name: str, known: Sequence[str]) -> str | None:
    """The known option that `name` is another name for, or else the one that is spelled most like it, or None."""
    pairs = ((other, word) for other, option in OTHER_NAMES.items() for word in (f"{option}s", option))
    others = {other: word for other, word in pairs if word in known}
    nearest = name if name in others else _nearest(name, [*known, *others])
    return None if nearest is None else others.get(nearest, nearest)


def check_count(argument: str, value: object, at_least: int = 1) -> None:
    """Raise unless `value` is an integer of at least 1, or another bound."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        expected = f"an integer of at least {at_least}"
        raise TypeError(f"{argument} must be {expected}, got {value!r} of type {type(value).__name__}")
    if index(value) < at_least:
        raise ValueError(f"{argument} must be at least {at_least}, got {value}")


def check_number(argument: str, value: object, expected: str = "a finite number") -> float:
    """The number, or a TypeError or ValueError that says what was `expected`."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{argument} must be {expected}, got {value!r} of type {type(value).__name__}")
    if not isfinite(float(value)):
        raise ValueError(f"{argument} must be {expected}, got {value}")
    return float(value)


def check_flag(argument: str, value: object) -> None:
    """Raise a TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{argument} must be True or False, got {value!r} of type {type(value).__name__}")


def _suggest(name: str, known: Iterable[str]) -> str:
    nearest = _nearest(name, known)
    return f"; did you mean {nearest!r}?" if nearest else "."


def _nearest(name: str, known: Iterable[str]) -> str | None:
    nearest = get_close_matches(name, list(known), n=1, cutoff=0.5)
    return nearest[0] if nearest else None
