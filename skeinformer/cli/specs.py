"""Methods as the command line names them: `cluster`, `skeinformer:num_pilots=32`, `my_module:MyMethod`."""

import importlib
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from skeinformer.attention import METHODS, Attention, Method, build
from skeinformer.attention.table import Entry
from skeinformer.checks import lookup
from skeinformer.cli.records import Record

Option = int | float | bool | str
SHARED_OPTIONS = ("head_dim", "max_len", "seed", "group")  # a command sets them for all methods
SKETCH_LABELS = {
    "srht": "SRHT",
    "subsampling": "sub-sampling",
    "subsampling_without": "sub-sampling without replacement",
}


@dataclass(frozen=True)
class MethodSpec:
    """A method, the options that differ from its defaults, and the budget d where that changes anything."""

    method: str
    options: tuple[tuple[str, Option], ...] = ()
    budget: int | None = None

    @property
    def entry(self) -> Entry:
        """The row of METHODS."""
        return METHODS[self.method]

    @property
    def options_text(self) -> str:
        """The options as the command line writes them."""
        return ",".join(f"{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in self.options)

    @property
    def name(self) -> str:
        """The text that `parse` reads as this method, without the budget."""
        return f"{self.method}:{self.options_text}" if self.options else self.method

    @property
    def label(self) -> str:
        """What a reader calls it, without d: "Skeinformer, 32 pilots"."""
        return ", ".join([self.entry.label, *(_option_label(name, value) for name, value in self.options)])

    @property
    def fields(self) -> Record:
        """How records name it."""
        return {
            "method": self.method,
            "options": self.options_text,
            "label": self.label,
            "budget": self.budget,
        }

    @property
    def takes_budget(self) -> bool:
        """Whether a command's budget changes anything: an option may set the size, and V-mean has none."""
        sizes = {"budget", *self.entry.method.size_options}
        return self.entry.has_budget and sizes.isdisjoint(dict(self.options))

    def settings(self) -> tuple[int | None, dict[str, Any]]:
        """Return the budget to build it with, and its other options."""
        options: dict[str, Any] = dict(self.options)
        return options.pop("budget", self.budget), options

    def at(self, budgets: Sequence[int]) -> "list[MethodSpec]":
        """Return the method at each budget, or once where a budget changes nothing."""
        return [replace(self, budget=d) for d in dict.fromkeys(budgets)] if self.takes_budget else [self]

    def build(self, head_dim: int, max_len: int | None, seed: int | None = None, group: Any = None) -> Attention:
        """Build the module in evaluation mode. With a seed, parameters and draws depend on nothing else."""
        budget, options = self.settings()
        options |= {"head_dim": head_dim, "max_len": max_len, "budget": budget, "seed": seed, "group": group}
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
            return build(self.method, **options).eval()

    def __str__(self) -> str:
        return self.label + (f", d = {self.budget}" if self.budget else "")


def parse(text: str) -> MethodSpec:
    """Read a method with its options.

    Args:
        text: `name`, `name:option=value,option=value`, or `module:Class` with options behind another colon.

    Returns:
        The method, without a budget.

    Raises:
        ValueError: The method or an option does not exist, or an option is wrong.

    Example:
        >>> parse("cluster:num_pilots=8").label
        'Cluster sketch, 8 pilots'
    """
    name, _, rest = text.strip().partition(":")
    attribute, colon, behind = rest.partition(":")
    if name not in METHODS and rest and "=" not in attribute:
        name, rest = resolve(name, attribute), behind if colon else ""
    lookup("attention", name, METHODS)
    options: dict[str, Option] = {}
    for part in rest.split(",") if rest else ():
        option, equals, value = (word.strip() for word in part.partition("="))
        if not (option and equals and value):
            raise ValueError(f"{part!r} in {text!r} is not an option; expected {name}:option=value,option=value")
        if option in SHARED_OPTIONS:
            raise ValueError(f"{option!r} in {text!r} is set for all methods alike; leave it out")
        if option in options:
            raise ValueError(f"{option!r} is given twice in {text!r}; give it once")
        options[option] = _value(value)
    spec = MethodSpec(name, tuple(sorted(options.items())))
    try:
        replace(spec, budget=8 if spec.takes_budget else None).build(head_dim=8, max_len=8, seed=0)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return spec


def parse_all(texts: Iterable[str]) -> list[MethodSpec]:
    """Read several methods, each once, in order; a ValueError where there is none."""
    specs = list(dict.fromkeys(map(parse, texts)))
    if not specs:
        raise ValueError("methods is empty; give at least one")
    return specs


def resolve(module_name: str, attribute: str) -> str:
    """Add a method of a module to METHODS, and return its name there.

    Args:
        module_name: A module of the current folder or of the path.
        attribute: A subclass of `Method` in it, or a name in its own table METHODS.

    Returns:
        `module:Class`, or the name in the table.

    Raises:
        ValueError: There is no such module, or it has no such method.

    Example:
        >>> resolve("my_module", "MyMethod")  # doctest: +SKIP
        'my_module:MyMethod'
    """
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        known = ", ".join(METHODS)
        raise ValueError(
            f"{module_name!r} is neither a method nor a module that can be imported ({error}); methods: {known}"
        ) from error
    found = getattr(module, attribute, None)
    if isinstance(found, type) and issubclass(found, Method):
        name = f"{module_name}:{attribute}"
        summary = (found.__doc__ or attribute).strip().partition("\n")[0]
        entry = Entry(found, attribute, summary, "", "", random=True, has_budget="budget" in found.option_names())
    else:
        rows = getattr(module, "METHODS", {})
        if attribute not in rows:
            raise ValueError(f"{module_name!r} has no subclass of skeinformer.attention.Method called {attribute!r}")
        name, entry = attribute, rows[attribute]
        if METHODS.get(name, entry) is not entry:
            raise ValueError(f"{module_name!r} has a method {name!r}, a name that this library uses; rename it")
    METHODS[name] = entry
    return name


def _value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def _option_label(option: str, value: Option) -> str:
    """num_pilots=32 -> 32 pilots, sketch=srht -> SRHT, redraw=false -> no redraw, side=rows -> side rows."""
    words = option.replace("_", " ")
    if option == "sketch":
        return SKETCH_LABELS.get(str(value), str(value).replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{value} {words.removeprefix('num ')}" if words.startswith("num ") else f"{words} {value}"
