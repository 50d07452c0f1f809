"""Checks of arguments, with errors that name what was expected, what came and which known name is nearest."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isfinite
from operator import index
from typing import SupportsFloat, SupportsIndex, TypeVar

T = TypeVar("T")

# names that other libraries use for an option, and the name it has here
BUDGET = ("num_samples", "samples", "num_features", "num_landmarks", "num_clusters", "sketch_size", "d")
OTHER_NAMES = {**dict.fromkeys(BUDGET, "budget"), "pilots": "num_pilots"}


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Return table[name]; an unknown name raises a ValueError with the nearest and all known names."""
    if not isinstance(name, str):
        raise TypeError(f"{kind} is chosen by its name, a string, got {name!r}")
    if name not in table:
        raise ValueError(f"unknown {kind} {name!r}{_suggest(_nearest(name, table))} Known: {', '.join(table)}.")
    return table[name]


def check_choice(argument: str, value: object, choices: Iterable[str]) -> None:
    """Raise a ValueError unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        suggestion, options = _suggest(_nearest(str(value), choices)), ", ".join(map(repr, choices))
        raise ValueError(f"{argument}={value!r} is not known{suggestion} Choose one of {options}.")


def check_options(owner: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise a TypeError if one of `names` is not an option of `owner`, which takes the `known` ones."""
    known = list(known)
    for name in names:
        if name not in known:
            suggestion, options = _suggest(nearest_option(name, known)), ", ".join(known) or "none"
            raise TypeError(f"{owner} has no option {name!r}{suggestion} Its options: {options}.")


def nearest_option(name: str, known: Sequence[str]) -> str | None:
    """Return the known option that `name` is another name for, or else the one with the most similar spelling."""
    pairs = ((other, word) for other, option in OTHER_NAMES.items() for word in (f"{option}s", option))
    others = {other: word for other, word in pairs if word in known}
    nearest = name if name in others else _nearest(name, [*known, *others])
    return None if nearest is None else others.get(nearest, nearest)


def check_count(argument: str, value: object, at_least: int = 1) -> None:
    """Raise unless `value` is an integer and at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise _wrong_type(argument, f"an integer of at least {at_least}", value)
    if index(value) < at_least:
        raise ValueError(f"{argument} must be at least {at_least}, got {value}")


def check_number(argument: str, value: object, expected: str = "a finite number") -> float:
    """Return `value` as a float; raise unless it is a finite number. The message names what is `expected`."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise _wrong_type(argument, expected, value)
    if not isfinite(float(value)):
        raise ValueError(f"{argument} must be {expected}, got {value}")
    return float(value)


def check_flag(argument: str, value: object) -> None:
    """Raise a TypeError unless `value` is True or False."""
    if not isinstance(value, bool):
        raise _wrong_type(argument, "True or False", value)


def _wrong_type(argument: str, expected: str, value: object) -> TypeError:
    return TypeError(f"{argument} must be {expected}, got {value!r} of type {type(value).__name__}")


def _suggest(nearest: str | None) -> str:
    return f"; did you mean {nearest!r}?" if nearest else "."


def _nearest(name: str, known: Iterable[str]) -> str | None:
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.5)), None)
