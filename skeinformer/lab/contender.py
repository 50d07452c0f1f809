"""Contenders: methods with options, as the command line writes them and as a reader calls them.

`skeinformer:num_pilots=32` is Skeinformer with 32 pilots; `cluster:budget=16` has a budget of its own, where other
contenders have that of the experiment. Head width, longest sequence and seed are the experiment's for all.
"""

import importlib
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skeinformer.attention import METHODS, Attention, build
from skeinformer.attention.table import Entry
from skeinformer.checks import lookup

Option = int | float | bool | str

OFFERED: ChainMap[str, Entry] = ChainMap({}, METHODS)  # `offer` adds rows and does not change METHODS

EXPERIMENT_OPTIONS = ("head_dim", "max_len", "seed")
# labels of the families of SKETCHES whose name is not what a reader calls them
SKETCH_LABELS = {
    "srht": "SRHT",
    "subsampling": "sub-sampling",
    "subsampling_without": "sub-sampling without replacement",
}


@dataclass(frozen=True)
class Contender:
    """A method and the options that differ from its defaults, in the order of their names."""

    method: str
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def options_text(self) -> str:
        """The options as the command line writes them, or an empty text."""
        return ",".join(f"{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in self.options)

    @property
    def spec(self) -> str:
        """The text that `parse` reads as this contender."""
        return f"{self.method}:{self.options_text}" if self.options else self.method

    @property
    def label(self) -> str:
        """What a reader calls it, without d: "Skeinformer, 32 pilots"."""
        row = OFFERED.get(self.method)
        name = self.method.replace("_", " ").capitalize() if row is None else row.label
        return ", ".join([name, *(_option_label(option, value) for option, value in self.options)])

    def settings(self, budget: int | None) -> tuple[int | None, dict[str, Any]]:
        """Return the budget to build it with, and its other options. An option that sets the size leaves no budget."""
        options: dict[str, Any] = dict(self.options)
        own: int | None = options.pop("budget", None)
        return (own if self.has_size() else budget), options

    def has_size(self) -> bool:
        """Return whether its own options set the size that the experiment's budget would set otherwise."""
        row = OFFERED.get(self.method)
        sizes = {"budget", *(() if row is None else row.method.size_options)}
        return not sizes.isdisjoint(dict(self.options))


def offer(module_name: str) -> None:
    """Add the rows of METHODS in that module to OFFERED. The current folder is searched too."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        rows = getattr(importlib.import_module(module_name), "METHODS", None)
    except ImportError as error:
        raise ValueError(
            f"cannot import the contenders' module {module_name!r}: {error}; name it as in an import, studies.rivals"
        ) from error
    if not isinstance(rows, Mapping) or not all(isinstance(row, Entry) for row in rows.values()):
        raise ValueError(f"{module_name!r} has no METHODS, a dict of name to Entry, as studies.rivals has")
    for name, row in rows.items():
        if OFFERED.get(name, row) is not row:
            raise ValueError(f"{module_name!r} has a method called {name!r}, a name that this library uses; rename it")
    OFFERED.update(rows)


def parse(spec: str) -> Contender:
    """Read `name` or `name:option=value,option=value`; a ValueError names what the method does not take."""
    method, colon, rest = spec.strip().partition(":")
    lookup("attention", method, OFFERED)
    options: dict[str, Option] = {}
    for part in rest.split(",") if colon else ():
        name, equals, value = (text.strip() for text in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"{part!r} in {spec!r} is not an option; expected {method}:option=value,option=value")
        if name in EXPERIMENT_OPTIONS:
            raise ValueError(f"{name!r} in {spec!r} is set for all methods alike; leave it out")
        if name in options:
            raise ValueError(f"{name!r} is given twice in {spec!r}; give it once")
        options[name] = _parse_value(value)
    contender = Contender(method, tuple(sorted(options.items())))
    try:
        build_contender(contender, head_dim=8, max_len=8, budget=8, seed=0)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return contender


def parse_all(specs: Iterable[str]) -> list[Contender]:
    """Read several descriptions: each contender once, in order."""
    return list(dict.fromkeys(parse(spec) for spec in specs))


def build_contender(
    contender: Contender,
    *,
    head_dim: int,
    max_len: int | None,
    budget: int | None,
    seed: int | None = None,
    group: Any = None,
) -> Attention:
    """Build the module in evaluation mode. With a `seed`, its parameters and its draws depend on nothing else."""
    budget, options = contender.settings(budget)
    options |= {"head_dim": head_dim, "max_len": max_len, "budget": budget, "seed": seed, "group": group}
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        return build(contender.method, table=OFFERED, **options).eval()


def has_budget(contender: Contender) -> bool:
    """Whether the experiment's budget changes anything: not for V-mean, nor where an option sets the size."""
    row = OFFERED.get(contender.method)
    return row is not None and row.has_budget and not contender.has_size()


def _parse_value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _option_label(option: str, value: Option) -> str:
    """num_pilots=32 -> 32 pilots, sketch=srht -> SRHT, redraw=false -> no redraw, side=rows -> side rows."""
    words = option.replace("_", " ")
    if option == "sketch":
        return SKETCH_LABELS.get(str(value), str(value).replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{value} {words.removeprefix('num ')}" if words.startswith("num ") else f"{words} {value}"
