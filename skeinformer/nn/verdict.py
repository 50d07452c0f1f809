"""A verdict: what each attention layer of a model attends by, as `apply` takes it and as files hold it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from os import PathLike
from pathlib import Path
from typing import Any

from skeinformer.attention import METHODS
from skeinformer.nn.decision import AUTO, MinLength, check_min_length
from skeinformer.nn.functional import EXACT, Given, hashable
from skeinformer.registry import lookup

CALL = "call "  # begins the name of a call of `scaled_dot_product_attention`; its number follows


@dataclass(frozen=True)
class Choice:
    """What one layer attends by: a method with its options, or exactly."""

    method: str = EXACT
    budget: int | None = None
    """None is the method's own default, or what another option sets."""
    options: Given = ()
    """Those of the method."""

    @property
    def exact(self) -> bool:
        """Whether the layer is left to exact attention."""
        return METHODS[self.method].exact_from == 0

    def arguments(self) -> dict[str, Any]:
        """The options and the budget as a method takes them, without a budget where there is none."""
        return {**({} if self.budget is None else {"budget": self.budget}), **dict(self.options)}

    def __str__(self) -> str:
        if self.exact:
            return "exact"
        return f"{self.method}({', '.join(f'{name}={value!r}' for name, value in self.arguments().items())})"


@dataclass(frozen=True)
class Verdict:
    """Layers by name, each with its choice; a layer without one is exact. Printing it shows all of it."""

    layers: Mapping[str, Choice] = field(default_factory=dict)
    seed: int | None = 0
    """Layer i draws by `seed * 1009 + i`."""
    min_length: MinLength = AUTO
    """Shorter calls are exact; "auto" are those that a sketch would not make faster."""

    @property
    def sketched(self) -> tuple[str, ...]:
        """Names of the layers that are not exact."""
        return tuple(name for name, choice in self.layers.items() if not choice.exact)

    def of(self, names: Mapping[str, str]) -> "Verdict":
        """For these layers alone: from the names that they have here to those that they are given."""
        return replace(self, layers={new: self.layers[old] for old, new in names.items()})

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it, and as `apply` reads it."""
        layers = {name: {"method": choice.method, **choice.arguments()} for name, choice in self.layers.items()}
        return {"seed": self.seed, "min_length": self.min_length, "layers": layers}

    def json(self) -> str:
        """The same as text."""
        return json.dumps(self.to_dict(), indent=2)

    def save(self, path: str | PathLike[str]) -> None:
        """Write it to a file, which `apply` reads."""
        Path(path).write_text(self.json() + "\n", encoding="utf-8")

    def __str__(self) -> str:
        many = len(self.sketched)
        head = f"{many} of {len(self.layers)} attention layers sketched, {len(self.layers) - many} exact"
        if many and self.min_length == AUTO:
            head += "; a call that a sketch would not make faster is exact too"
        width = max(map(len, self.layers), default=0)
        return "\n".join([head, *(f"  {name:<{width}}  {choice}" for name, choice in self.layers.items())])


def read_verdict(found: Mapping[str, Any]) -> Verdict:
    """What `to_dict` gave, or an error that names what is wrong."""
    layers = found.get("layers")
    if not isinstance(layers, Mapping):
        raise ValueError(f"a verdict needs `layers`, the method of each layer by name; this one has {sorted(found)}")
    check_min_length(min_length := found.get("min_length", AUTO))
    choices = {}
    for name, given in layers.items():
        if not isinstance(given, Mapping) or "method" not in given:
            raise ValueError(
                f'layer {name!r} of the verdict is {given!r}, expected something like {{"method": "cluster"}}'
            )
        lookup("attention", given["method"], METHODS)
        options = {option: hashable(value) for option, value in given.items() if option not in ("method", "budget")}
        choices[str(name)] = Choice(given["method"], given.get("budget"), tuple(options.items()))
    return Verdict(choices, found.get("seed", 0), min_length)


def fit(wanted: Iterable[str], known: Iterable[str]) -> dict[str, str]:
    """The names of a verdict, each with the name of the layer in a model: the same, but for what stands before it.

    A verdict on a model also fits one that holds it or that it holds, as BertForSequenceClassification holds a
    BertModel: all names are longer, or all are shorter, by the same words.
    """
    wanted, there = list(wanted), dict.fromkeys(known)
    if not wanted:
        return {}
    first = wanted[0]
    shorter = [first[: i + 1] for i, letter in enumerate(first) if letter == "."]
    longer = [name.removesuffix(first) for name in there if name.endswith(f".{first}")]
    found = []
    for before, after in [("", ""), *((words, "") for words in shorter), *(("", words) for words in longer)]:
        names = {name: after + name.removeprefix(before) for name in wanted if name.startswith(before)}
        if len(names) == len(wanted) and all(name in there for name in names.values()):
            found.append(names)
    if len(found) == 1 or (found and list(found[0].values()) == wanted):
        return found[0]
    if found:
        places = ", ".join(names[first] for names in found)
        raise ValueError(
            f"several layers of the model fit {first!r} of the verdict: {places}; apply it to one part of the model"
        )
    missing = [name for name in wanted if name not in there]
    nearest = ", ".join(get_close_matches(missing[0], filter(None, there), n=4, cutoff=0)) or "none"
    raise ValueError(
        f"the verdict names layers that the model does not have, such as {missing[0]!r}; the nearest are {nearest}. "
        "Was it made on another model?"
    )
