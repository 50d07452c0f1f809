"""Contenders: a name of METHODS or RIVALS with options, as the command line writes them, and as a reader calls them.

`skeinformer:num_pilots=32` is Skeinformer with 32 pilots; `sketched:sketch=srht,side=rows` has two options. The budget
d, the head width, the longest sequence and the seed belong to the experiment and are not options of a contender.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from skeinformer.attention import METHODS, Attention, Method, build
from skeinformer.registry import lookup

Option = int | float | bool | str

OFFERED: dict[str, Method] = dict(METHODS)  # by name; `offer` adds to them

OF_THE_EXPERIMENT = ("head_dim", "max_len", "budget", "seed")
WITHOUT_BUDGET = {"softmax", "softmax_dropout", "vmean", "linear_transformer"}
# options that fix the size which the budget would otherwise decide
INSTEAD_OF_BUDGET = {
    "num_samples",
    "num_features",
    "num_landmarks",
    "factor",
    "block_size",
    "window",
    "stride",
    "num_blocks",
    "chunk_size",
}
LABELS = {
    "softmax": "Standard",
    "softmax_dropout": "Standard, dropout",
    "vmean": "V-mean",
    "bigbird": "Big Bird",
    "blockbert": "BlockBERT",
    "linformer_jlt": "Linformer, unreduced JLT",
    "informer_mask": "Informer, padding mask",
    "skeinformer_uniform": "Skeinformer, uniform sampling",
    "skeinformer_no_norm": "Skeinformer, no row normalization",
    "skeinformer_simple_norm": "Skeinformer, simple row normalization",
    "skeinformer_no_reuse": "Skeinformer, no pilot reutilization",
    "cluster": "Cluster sketch",
    "sparse_transformer": "Sparse Transformer",
    "linear_transformer": "Linear Transformer",
    "wildcat": "WildCat",
    "hyperattention": "HyperAttention",
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
        name = LABELS.get(self.method, self.method.replace("_", " ").capitalize())
        return ", ".join([name, *(_described(option, value) for option, value in self.options)])


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
    contender: Contender, *, head_dim: int, max_len: int | None, budget: int | None, seed: int | None = None
) -> Attention:
    """The module, in evaluation mode. With a `seed`, its parameters start from it and its draws are deterministic.

    With a seed torch's global random state stays as it was. `budget` may be None where `has_budget` is False.
    """
    options: dict[str, Any] = {**dict(contender.options), "head_dim": head_dim, "max_len": max_len, "seed": seed}
    if budget is not None:
        options["budget"] = budget
    if seed is None:
        return build(contender.method, table=OFFERED, **options).eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(contender.method, table=OFFERED, **options).eval()


def has_budget(contender: Contender) -> bool:
    """Does the budget d change anything? Not for exact attention or V-mean, nor where an option gives the size."""
    fixed = any(name in INSTEAD_OF_BUDGET for name, _ in contender.options)
    return contender.method not in WITHOUT_BUDGET and not fixed


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
        return LABELS.get(str(value), str(value).replace("_", " "))
    return f"{value} {words.removeprefix('num ')}" if words.startswith("num ") else f"{words} {value}"
