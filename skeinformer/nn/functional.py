"""`scaled_dot_product_attention` with torch's signature, sketched where that is possible and wins, else by torch.

`Settings` say how calls are sketched, `decide` which are not, and `sketch_call` computes one. `skeinformer.sketched`
and `skeinformer.compare` go by the same three.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property
from operator import index
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention import METHODS, Attention, build
from skeinformer.attention.inputs import clear_padding, prepare
from skeinformer.attention.methods import DEFAULT
from skeinformer.kernels.choice import first_derivative, no_autocast, recorded
from skeinformer.kernels.inside import inside
from skeinformer.nn.decision import AUTO, AskedSizes, MinLength, check_min_length, why_exact
from skeinformer.nn.kept import KEPT, constant_of_a_graph, keep
from skeinformer.nn.shapes import Four, as_torch, padding_of, to_four, unusual
from skeinformer.noise import from_seed, layer_seed
from skeinformer.registry import check_options, lookup

Given = tuple[tuple[str, Any], ...]

OF_THE_CALL = {  # what a method may take and is no option here, and why
    "scale": "every call brings its own scale",
    "max_len": "a call may have any length, so that methods with a weight for each position cannot be taken",
}
EXACT = "softmax"


@dataclass(frozen=True)
class Settings:
    """How calls of `scaled_dot_product_attention` are sketched."""

    method: str
    budget: int | None
    """None is the method's own default, or what another option sets."""
    min_length: MinLength
    seed: int | None
    options: Given
    """Those of the method."""

    def __post_init__(self) -> None:
        lookup("attention", self.method, METHODS)
        if self.method != EXACT and (reason := left_out(self.method)):
            raise ValueError(f"{self.method!r} cannot stand in for scaled_dot_product_attention: {reason}")
        refuse_of_the_call(f"attention {self.method!r}", dict(self.options))
        known = [name for name in METHODS[self.method].option_names() if name not in OF_THE_CALL]
        check_options(f"attention {self.method!r}", dict(self.options), [*known, "min_length", "seed"])
        check_min_length(self.min_length)
        self.build(8, seed=layer_seed(self.seed, 0))  # raises for a wrong value

    def build(self, head_dim: int, scale: float | None = None, seed: int | None = None) -> Attention:
        """The method as a module in evaluation mode; without a seed it draws anew unless it is given noise."""
        options = dict(self.options)
        if "scale" in METHODS[self.method].option_names():
            options["scale"] = scale
        module = build(self.method, head_dim=head_dim, budget=self.budget, seed=seed, **options).eval()
        if any(True for _ in module.parameters()):
            raise ValueError(
                f"{self.method!r} with these options adds parameters, which the model was not trained with; leave out "
                "the options that add them, or choose another method"
            )
        return module

    @cached_property
    def sizes(self) -> AskedSizes:
        """What `min_length="auto"` goes by."""
        return asked_sizes(self.build(8))

    def __str__(self) -> str:
        given = {**({} if self.budget is None else {"budget": self.budget}), **dict(self.options)}
        return f"{self.method}({', '.join(f'{name}={value!r}' for name, value in given.items())})"


class Attended(NamedTuple):
    """What stands for torch's result."""

    output: Tensor
    error: Tensor | None
    """The estimated relative error of each example and head, where it was asked for."""


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: str = DEFAULT,
    budget: int | None = None,
    min_length: MinLength = AUTO,
    seed: int | None = 0,
    **options: Any,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` by a method of METHODS: (..., h, n, p) -> (..., h, n, p_v).

    The arguments up to `enable_gqa` are torch's and mean the same; the shape, the dtype and the strides of the result
    are torch's. A mask may be boolean, True = real, or additive, and is sketched where it only says which keys are
    padding, the same for every query: (b, 1, 1, n_k), what broadcasts alike, or (b, n_k), which torch does not take.

    Computed exactly, by torch: causal attention, a mask that differs between queries or weighs keys, dropout, no more
    keys than the budget, tensors that are not of one floating dtype and one batch, and what is shorter than
    `min_length`; "auto" is where the sketch would not win. `budget` is d, None the method's own; `options` are those of
    `build`. Draws go by `seed`, so that equal calls give equal results; where gradients are recorded, and with None,
    they are drawn anew from torch's global state. Inside `torch.utils.checkpoint.checkpoint` take use_reentrant=False:
    the first pass of the other form records nothing, and would draw otherwise than the second.
    """
    given = tuple((name, hashable(value)) for name, value in options.items())
    settings = settings_of(method, budget, min_length, seed, given)
    if attn_mask is not None and is_padding_by_shape(attn_mask, query, key):
        attn_mask = attn_mask.reshape(query.shape[0], *(1,) * (query.dim() - 2), -1)  # (b, 1, .., 1, n_k)
    reason, mask = decide(settings, query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if reason is not None:
        return exactly(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    four = to_four(query, key, value, mask)
    return as_torch(sketch_call(settings, 0, four, scale).output, query, key, value, attn_mask)


def decide(
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    enable_gqa: bool,
) -> tuple[str | None, Tensor | None]:
    """Why a call is left to torch, or None where it is sketched; and then its mask of padding, (..., 1, n_k).

    The first reason that holds, in this order. The numbers of a mask are looked at last.
    """
    row = METHODS[settings.method]
    if row.exact_from == 0:
        return "the method is exact attention", None
    if is_causal:
        return "causal", None
    if dropout_p > 0:
        return "dropout", None
    if (reason := unusual(query, key, value, enable_gqa)) is not None:
        return reason, None
    (n, p), n_k = query.shape[-2:], key.shape[-2]
    if n == 1:
        return "one query", None
    if n != n_k and not row.cross_attention:
        return f"as many queries as keys is what {settings.method} takes", None
    budget, num_pilots, gradient = sizes_in_force(settings)
    gradients, device = recorded(query, key, value), query.device.type
    sizes = (n, n_k, budget, num_pilots, p)
    reason = why_exact(settings.min_length, *sizes, gradients, settings.method, device, gradient)
    if reason is not None or attn_mask is None:
        return reason, None
    mask, reason = padding_of(attn_mask, query, key)
    return reason, mask


def sketch_call(settings: Settings, number: int, four: Four, scale: float | None, certify: bool = False) -> Attended:
    """(b, h, n, p_v) of the call with this number among those of a model; with `certify` also its error."""
    query, key, value, key_mask = four
    width = index(query.shape[-1])  # a graph for all shapes takes it as a constant
    module: Attention = getattr(KEPT, module_name(settings, width, scale))
    groups = query.shape[1] // key.shape[1]
    seed = None if recorded(query, key, value) else layer_seed(settings.seed, number)
    masks: dict[str, Any] = {"key_mask": key_mask}
    masks["query_mask"] = None if METHODS[settings.method].cross_attention else key_mask
    outputs, errors = [], []
    for group in range(groups):  # one call for each query head of a group: keys and values are never repeated
        part = query[:, group::groups]
        noise = None
        if seed is not None:
            noise = module.draw_noise(part, key, from_seed((key.shape[0], key.shape[1]), seed, device=key.device))
        if certify:
            output, info = module.certify(part, key, value, noise=noise, **masks)
            errors.append(info.error)
        else:
            output = module(part, key, value, noise=noise, **masks)
        outputs.append(output)
    return Attended(by_head(outputs), by_head(errors) if errors else None)


def by_head(groups: list[Tensor]) -> Tensor:
    """Heads in the order of the queries, of what was computed for each head of a group."""
    return groups[0] if len(groups) == 1 else torch.stack(groups, 2).flatten(1, 2)


def exactly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """By torch; a `sketched` around us leaves it as it is."""
    with inside():
        return first_derivative(
            F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
        )


def exact_with_masks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """softmax(s Q K^T) V for (b, h, n, p) with our masks, (b, n), on torch's kernel; rows of padded queries are 0."""
    query, key, value, real, queries = prepare(query, key, value, key_mask, query_mask)
    mask = None if real is None else real[:, :, None]  # (b, 1, 1, n_k)
    with no_autocast(query.device):
        output = exactly(query, key, value, mask, dropout, False, scale, False)
    return clear_padding(output, queries)


def is_padding_by_shape(attn_mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask is (b, n_k) where torch, which reads (n, n_k), would find that it does not fit."""
    b, n = query.shape[0], query.shape[-2]
    fits = query.dim() > 2 and attn_mask.dim() == 2 and tuple(attn_mask.shape) == (b, key.shape[-2])
    return fits and b not in (1, n)


def settings_of(method: str, budget: int | None, min_length: MinLength, seed: int | None, given: Given) -> Settings:
    """What these arguments say, or an error that names a wrong one."""
    settings: Settings = getattr(KEPT, settings_name(method, budget, min_length, seed, given))
    return settings


@constant_of_a_graph
def settings_name(method: str, budget: int | None, min_length: MinLength, seed: int | None, given: Given) -> str:
    """The name in KEPT of what these arguments say, checked and made once."""
    arguments = (method, budget, min_length, seed, given)
    return keep(repr(arguments), lambda: Settings(*arguments))


@constant_of_a_graph
def module_name(settings: Settings, head_dim: int, scale: float | None) -> str:
    """The name in KEPT of the method for heads of this width."""
    return keep(repr((settings, head_dim, scale)), lambda: settings.build(head_dim, scale))


@constant_of_a_graph
def sizes_in_force(settings: Settings) -> AskedSizes:
    """What `min_length="auto"` goes by."""
    return settings.sizes


def asked_sizes(module: Attention) -> AskedSizes:
    """What `min_length="auto"` goes by."""
    num_pilots = getattr(module.options, "num_pilots", None) or 0
    return module.budget_in_force, num_pilots, getattr(module.options, "gradient", "keys")


@cache
def left_out(method: str) -> str | None:
    """Why a method of METHODS cannot stand in for a model's attention, or None if it can."""
    if METHODS[method].quadratic:
        return "it takes quadratic time and gains nothing over 'sdpa'"
    if METHODS[method].shares_keys:
        return "it shares queries and keys, which a pretrained model projects apart"
    if any(True for _ in build(method, head_dim=8, max_len=8, budget=8).parameters()):
        return "it has parameters of its own, which a pretrained model does not bring"
    return None


def refuse_of_the_call(owner: str, given: Iterable[str]) -> None:
    """Raise a TypeError that says why something is no option of a drop-in."""
    for name in given:
        if name in OF_THE_CALL:
            raise TypeError(f"{owner} takes no {name!r} here: {OF_THE_CALL[name]}; leave it out")


def hashable(value: Any) -> Any:
    """A list as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value
