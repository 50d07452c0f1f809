"""Contenders: a name of OFFERED with options, as the command line writes them, and as a reader calls them.

`skeinformer:num_pilots=32` is Skeinformer with 32 pilots; `sketched:sketch=srht,side=rows` has two options. The head
width, the longest sequence and the seed belong to the experiment and are not options of a contender. The budget d is
the experiment's too, unless the contender has one of its own: `cluster:budget=16`.
"""

import importlib
import sys
from collections import ChainMap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from skeinformer.attention import METHODS, Attention, Method, build
from skeinformer.registry import lookup

Option = int | float | bool | str

OFFERED: ChainMap[str, Method] = ChainMap({}, METHODS)  # by name; `offer` adds to them, and leaves METHODS alone

OF_THE_EXPERIMENT = ("head_dim", "max_len", "seed")
# of families of SKETCHES whose name is not what a reader calls them
SKETCH_LABELS = {
    "srht": "SRHT",
    "subsampling": "sub-sampling",
    "subsampling_without": "sub-sampling without replacement",
}


@dataclass(frozen=True)
class Contender:
    """A method and the options that it does not have by default, in the order of their names."""

    method: str
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def options_text(self) -> str:
        """The options as the command line writes them, or an empty text."""
        return ",".join(f"{name}={_written(value)}" for name, value in self.options)

    @property
    def spec(self) -> str:
        """What `parse` reads as this contender."""
        return f"{self.method}:{self.options_text}" if self.options else self.method

    @property
    def label(self) -> str:
        """What a reader calls it, without d: "Skeinformer, 32 pilots"."""
        row = OFFERED.get(self.method)
        name = self.method.replace("_", " ").capitalize() if row is None else row.label
        return ", ".join([name, *(_described(option, value) for option, value in self.options)])

    def settings(self, budget: int | None) -> tuple[int | None, dict[str, Any]]:
        """The budget to build it with, and its other options. An option that gives the size leaves no budget."""
        options: dict[str, Any] = dict(self.options)
        own: int | None = options.pop("budget", None)
        return (own if self.has_size() else budget), options

    def has_size(self) -> bool:
        """Do its own options give the size that the experiment's budget would else decide?"""
        row = OFFERED.get(self.method)
        sizes = ("budget", *(() if row is None else row.make.sizes))
        return any(name in sizes for name, _ in self.options)


def offer(module_name: str) -> None:
    """Add the rows of METHODS in that module to OFFERED. It is looked for in the current folder too."""
    here = str(Path.cwd())
    if "" not in sys.path and here not in sys.path:
        sys.path.append(here)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"cannot import the contenders' module {module_name!r}: {error}; name it as in an import, studies.rivals "
            "for studies/rivals.py in the current folder"
        ) from error
    rows = getattr(module, "METHODS", None)
    if not isinstance(rows, Mapping) or not all(isinstance(row, Method) for row in rows.values()):
        raise ValueError(f"{module_name!r} has no METHODS, a dict of name to Method, as studies.rivals has")
    for name, row in rows.items():
        if OFFERED.get(name, row) is not row:
            raise ValueError(f"{module_name!r} has a method called {name!r}, a name that this library uses; rename it")
    OFFERED.update(rows)


def parse(spec: str) -> Contender:
    """The contender that `name` or `name:option=value,option=value` describes.

    Values are read as whole numbers, numbers, true or false, else as text. A name, an option or a value that the method
    does not take is a ValueError.
    """
    method, colon, rest = spec.strip().partition(":")
    lookup("attention", method, OFFERED)
    options: dict[str, Option] = {}
    for part in rest.split(",") if colon else ():
        name, equals, value = (text.strip() for text in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"{part!r} in {spec!r} is not an option; expected {method}:option=value,option=value")
        if name in OF_THE_EXPERIMENT:
            raise ValueError(f"{name!r} in {spec!r} is set for all methods alike; leave it out")
        if name in options:
            raise ValueError(f"{name!r} is given twice in {spec!r}; give it once")
        options[name] = _read(value)
    contender = Contender(method, tuple(sorted(options.items())))
    try:
        build_contender(contender, head_dim=8, max_len=8, budget=8, seed=0)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return contender


def parse_all(specs: Iterable[str]) -> list[Contender]:
    """The contenders of several descriptions, each once, in order."""
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
    """The module, in evaluation mode. With a `seed`, its parameters start from it and its draws are deterministic.

    With a seed torch's global random state stays as it was. `budget` may be None where `has_budget` is False.
    """
    budget, own = contender.settings(budget)
    options: dict[str, Any] = {**own, "head_dim": head_dim, "max_len": max_len, "seed": seed, "budget": budget}
    options["group"] = group
    if seed is None:
        return build(contender.method, table=OFFERED, **options).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(contender.method, table=OFFERED, **options).eval()


def has_budget(contender: Contender) -> bool:
    """Does the experiment's budget change anything? Not for V-mean, nor where an option gives the size."""
    row = OFFERED.get(contender.method)
    return row is not None and row.has_budget and not contender.has_size()


def _read(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _written(value: Option) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _described(option: str, value: Option) -> str:
    """num_pilots=32 -> 32 pilots, sketch=srht -> SRHT, redraw=false -> no redraw, side=rows -> side rows."""
    words = option.replace("_", " ")
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if option == "sketch":
        return SKETCH_LABELS.get(str(value), str(value).replace("_", " "))
    return f"{value} {words.removeprefix('num ')}" if words.startswith("num ") else f"{words} {value}"
