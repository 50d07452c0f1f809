"""Methods with options, as the command line writes them: `skeinformer:num_pilots=32` is Skeinformer with 32 pilots."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from skeinformer.attention import METHODS, build
from skeinformer.checks import lookup

BAG_OF_TOKENS = "bag_of_tokens"  # a model without attention
Option = int | float | bool | str
# labels of sketches whose name is not what a reader calls them
SKETCH_LABELS = {
    "srht": "SRHT",
    "subsampling": "sub-sampling",
    "subsampling_without": "sub-sampling without replacement",
}


@dataclass(frozen=True)
class MethodSpec:
    """A method and the options that differ from its defaults, in the order of their names."""

    method: str
    options: tuple[tuple[str, Option], ...] = ()

    @property
    def options_text(self) -> str:
        """The options as the command line writes them, or an empty text."""
        return ",".join(f"{name}={str(x).lower() if isinstance(x, bool) else x}" for name, x in self.options)

    @property
    def spec(self) -> str:
        """The text that `parse_method` reads as this."""
        return f"{self.method}:{self.options_text}" if self.options else self.method

    @property
    def label(self) -> str:
        """The name for readers: "Skeinformer, 32 pilots"."""
        row = METHODS.get(self.method)
        name = self.method.replace("_", " ").capitalize() if row is None else row.label
        return ", ".join([name, *(_option_label(option, value) for option, value in self.options)])

    @property
    def has_budget(self) -> bool:
        """Whether the recipe's budget changes anything: not for V-mean, nor where an option sets the size."""
        row = METHODS.get(self.method)
        return row is not None and row.has_budget and not self._has_size

    def settings(self, budget: int | None) -> tuple[int | None, dict[str, Any]]:
        """Return the budget to build it with, and its other options. An option that sets the size leaves no budget."""
        options: dict[str, Any] = dict(self.options)
        own: int | None = options.pop("budget", None)
        return (own if self._has_size else budget), options

    @property
    def _has_size(self) -> bool:
        row = METHODS.get(self.method)
        sizes = {"budget", *(() if row is None else row.method.size_options)}
        return not sizes.isdisjoint(dict(self.options))


def parse_method(spec: str) -> MethodSpec:
    """Read `name` or `name:option=value,option=value`; a ValueError names what the method does not take."""
    method, colon, rest = spec.strip().partition(":")
    lookup("attention", method, {**METHODS, BAG_OF_TOKENS: None})
    options: dict[str, Option] = {}
    for part in rest.split(",") if colon else ():
        name, equals, value = (text.strip() for text in part.partition("="))
        if not (name and equals and value):
            raise ValueError(f"{part!r} in {spec!r} is not an option; expected {method}:option=value,option=value")
        if name in ("head_dim", "max_len", "seed", "group"):
            raise ValueError(f"{name!r} in {spec!r} is the same for all methods; leave it out")
        if name in options:
            raise ValueError(f"{name!r} is given twice in {spec!r}; give it once")
        options[name] = _parse_value(value)
    parsed = MethodSpec(method, tuple(sorted(options.items())))
    if method == BAG_OF_TOKENS:
        if options:
            raise ValueError(f"{BAG_OF_TOKENS} has no options; got {spec!r}")
        return parsed
    budget, others = parsed.settings(8)
    try:
        build(method, head_dim=8, max_len=8, budget=budget, seed=0, **others)
    except TypeError as error:
        raise ValueError(str(error)) from error
    return parsed


def _parse_value(text: str) -> Option:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return text


def _option_label(option: str, value: Option) -> str:
    """Return 32 pilots for num_pilots=32, SRHT for sketch=srht, no redraw for redraw=false, side rows for side=rows."""
    words = option.replace("_", " ")
    if option == "sketch":
        return SKETCH_LABELS.get(str(value), str(value).replace("_", " "))
    if isinstance(value, bool):
        return words if value else f"no {words}"
    return f"{value} {words.removeprefix('num ')}" if words.startswith("num ") else f"{words} {value}"
