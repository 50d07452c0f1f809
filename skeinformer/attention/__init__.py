"""Every attention behind one interface: METHODS is the one table, `build` makes a module from a name."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skeinformer.attention.base import Attention
from skeinformer.attention.budget import choose_num_samples
from skeinformer.attention.exact import Softmax, VMean
from skeinformer.attention.skein import Skeinformer, SkeinInfo, SkeinNoise, skein_attention
from skeinformer.attention.sketched import Sketched
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.registry import check_options, lookup

PAPER = "Chen et al. 2022"


@dataclass(frozen=True)
class Method:
    """A row of the table: how to make the module, and what to know about it. Calling it makes the module."""

    make: Callable[..., Attention]
    summary: str
    paper: str
    cost: str  # time of a forward pass
    exact: str  # at full budget
    masks: str = "padding anywhere"
    cross_attention: bool = True
    random: bool = False
    options: Mapping[str, object] = field(default_factory=dict)  # what this row sets; a caller's options win

    def __call__(self, **options: object) -> Attention:
        return self.make(**{**self.options, **options})


def _skein(summary: str, **options: object) -> Method:
    exact, cost = ("no, unbiased", "O(n^2 p)") if options.get("row_norm") == "none" else ("d >= m", "O(n d p)")
    return Method(Skeinformer, summary, PAPER, cost, exact, random=True, options=options)


METHODS: dict[str, Method] = {
    "softmax": Method(Softmax, "exact attention on the fused kernel", "Vaswani et al. 2017", "O(n^2 p)", "always"),
    "softmax_dropout": Method(
        Softmax,
        "exact attention, dropout on its weights in training",
        "Vaswani et al. 2017",
        "O(n^2 p)",
        "in evaluation",
        random=True,
        options={"dropout": 0.1},
    ),
    "vmean": Method(VMean, "the mean of the values, a rank-one baseline", PAPER, "O(n p)", "no"),
    "sketched": Method(
        Sketched,
        "D^-1 A S S^T V, or D^-1 S S^T A V, with any sketch S",
        PAPER,
        "O(n^2 p)",
        "no, unbiased",
        random=True,
    ),
    "skeinformer": _skein("column sampling, adaptive row normalization, pilot reutilization"),
    "skeinformer_uniform": _skein("columns sampled uniformly, no pilots", columns="uniform", reuse_pilots=False),
    "skeinformer_no_norm": _skein("no row normalization", row_norm="none", reuse_pilots=False),
    "skeinformer_simple_norm": _skein("normalized over the selected columns", row_norm="simple", reuse_pilots=False),
    "skeinformer_no_reuse": _skein("pilot rows not written to the output", reuse_pilots=False),
}


def build(name: str, *, head_dim: int, max_len: int | None = None, budget: int = 256, **options: object) -> Attention:
    """The attention called `name`: every name takes head_dim, max_len, budget and seed, and options of its own."""
    method = lookup("attention", name, METHODS)
    parameters = inspect.signature(method.make).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        check_options(f"attention {name!r}", options, [parameter.name for parameter in parameters])
    return method(head_dim=head_dim, max_len=max_len, budget=budget, **options)


__all__ = [
    "METHODS",
    "Attention",
    "Method",
    "SkeinInfo",
    "SkeinNoise",
    "Skeinformer",
    "VirtualKeys",
    "build",
    "choose_num_samples",
    "skein_attention",
]
