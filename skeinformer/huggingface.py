"""Sketched attention in Hugging Face models: `attn_implementation="skein"`.

    from skeinformer import huggingface

    huggingface.register(num_samples=256, num_pilots=32)
    model = AutoModel.from_pretrained(name, attn_implementation="skein")        # or
    model.set_attn_implementation("skein-cluster")

`skein` is Skeinformer; `skein-NAME` is the method NAME of METHODS. A layer is sketched where it is bidirectional and
its mask says only which keys are padding. Any other layer takes transformers' exact kernel, `sdpa`, with the mask that
it would have there; what neither can compute raises. `why_exact` and `refuse` hold the rules, docs/drop-in-hf.md the
table, and `watch` counts what a model's layers did.
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from skeinformer.attention import METHODS, Attention, build
from skeinformer.attention.reformer import shares_keys
from skeinformer.registry import check_count, check_flag, check_options, lookup

SKEINFORMER = "skeinformer"
SKETCHED = "sketched"
LAYERS = 1009  # above the number of layers: seeds of one model are not those of another
# set for each layer, not by the user: width and scale are the layer's, num_samples is the budget
OF_THE_LAYER = ("head_dim", "max_len", "budget", "scale")
# arguments of a model's attention that change its result and that sdpa would ignore or refuse
UNKNOWN_TO_SDPA = {
    "softcap": "a cap on the scores",
    "s_aux": "attention sinks",
    "cache": "a paged cache",
    "cu_seq_lens_q": "packed sequences",
}
# arguments of an attention module's forward by which it attends to another sequence
OTHER_SEQUENCE = {
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "context",
    "key",
    "keys",
    "k",
}

Given = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Settings:
    """What a registered name does."""

    method: str
    num_samples: int
    seed: int | None
    decoder_cross_attention: bool
    options: Given  # of the method
    names: frozenset[str]  # what a call may change by keyword
    exact_at_all_keys: bool  # whether as many samples as keys are exact attention


_modules = SimpleNamespace()  # made by `prepare`
_names: dict[tuple[object, ...], str] = {}  # of the modules
_watching: list[Counter[str]] = []
_warned: set[str] = set()


def register(
    method: str | None = None,
    *,
    num_samples: int = 256,
    seed: int | None = 0,
    decoder_cross_attention: bool = False,
    **options: object,
) -> tuple[str, ...]:
    """Make `skein` and the other names known to transformers, and return those that this call has set.

    With a `method`, only its name is set. Without one all are, and `options` go to the methods that have such an
    option. Calling again changes the settings of models that are already in use.

    num_samples: d, the budget. seed: evaluation is deterministic, a layer that knows its number (`layer_idx`) with
    draws of its own; None draws anew at every call, as training always does, from torch's global state.
    decoder_cross_attention: sketch the cross-attention of decoders too. It is exact by default: which keys are chosen
    depends on all queries, so that an earlier token would see a little of the later ones.
    """
    if method is not None:
        lookup("attention", method, METHODS)
        if reason := left_out(method):
            raise ValueError(f"{method!r} cannot stand in for a model's attention: {reason}")
    check_flag("decoder_cross_attention", decoder_cross_attention)
    chosen = list(available()) if method is None else [method]
    known = {name for other in chosen for name in option_names(other)} - {"num_samples", "seed"}
    check_options("register" if method is None else f"attention {method!r}", options, sorted(known))
    found: dict[str, Settings] = {}
    for other in chosen:
        own = option_names(other)
        kept = tuple((name, _hashable(value)) for name, value in options.items() if name in own)
        settings = Settings(other, num_samples, seed, decoder_cross_attention, kept, own, exact_at_all_keys(other))
        make(settings)  # raises for a wrong value
        found[name_of(other)] = settings
    for name, settings in found.items():
        AttentionInterface.register(name, partial(attention_forward, settings))
        AttentionMaskInterface.register(name, padding_mask)
    _warned.clear()
    return tuple(found)


def unregister() -> tuple[str, ...]:
    """Take all names out of transformers again, and return those that were there.

    A model that still has one raises a KeyError when it is called.
    """
    names = [name_of(method) for method in METHODS]
    gone = tuple(name for name in names if AttentionInterface._global_mapping.pop(name, None) is not None)
    for name in gone:
        AttentionMaskInterface._global_mapping.pop(name, None)
    return gone


def available() -> dict[str, str]:
    """The methods that can be registered, and their names for `attn_implementation`."""
    return {method: name_of(method) for method in METHODS if left_out(method) is None}


def name_of(method: str) -> str:
    """`skein` for Skeinformer, `skein-NAME` for the others."""
    return "skein" if method == SKEINFORMER else f"skein-{method}"


@cache
def left_out(method: str) -> str | None:
    """Why a method of METHODS is not registered, or None if it is."""
    if "n^2" in METHODS[method].cost:
        return "it takes quadratic time and gains nothing over 'sdpa'"
    module = build(method, head_dim=8, max_len=8, budget=8)
    if shares_keys(module):
        return "it shares queries and keys, which a pretrained model projects apart"
    if any(True for _ in module.parameters()):
        return "it has parameters of its own, which a pretrained model does not bring"
    return None


@cache
def option_names(method: str) -> frozenset[str]:
    """The options of a method that `register` and a call take."""
    return parameters(method).difference(OF_THE_LAYER) | {"num_samples", "seed"}


def exact_at_all_keys(method: str) -> bool:
    """Whether as many samples as keys are exact attention; an option of some methods sets the size in their place."""
    return METHODS[method].exact == "d >= m" and "num_samples" in parameters(method)


def parameters(method: str) -> frozenset[str]:
    """The names of all arguments of a method's module."""
    return frozenset(inspect.signature(METHODS[method].make).parameters)


@contextmanager
def watch() -> Iterator[Counter[str]]:
    """Count what the layers of all models do meanwhile: "sketched", or why one was exact.

    Gradient checkpointing counts a layer twice, a compiled model is not counted.
    """
    counter: Counter[str] = Counter()
    _watching.append(counter)
    try:
        yield counter
    finally:
        _watching[:] = [other for other in _watching if other is not counter]


def padding_mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask of a bidirectional layer as it is, (b, n_k), True = real; for any other pattern what `sdpa` would get.

    O(n) where the layer will be sketched. A pattern (causal, a window, packed sequences) is a mask of four dimensions,
    or None where the kernel's own causal mask does.
    """
    if mask_function is bidirectional_mask_function and not use_vmap:
        if attention_mask is None:
            return None
        if kv_offset == 0 and attention_mask.shape == (attention_mask.shape[0], kv_length):
            return attention_mask
    options |= {"kv_length": kv_length, "kv_offset": kv_offset, "use_vmap": use_vmap, "attention_mask": attention_mask}
    if mask_function is not None:
        options["mask_function"] = mask_function
    return sdpa_mask(**options)


def attention_forward(
    settings: Settings,
    module: nn.Module,
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h_kv, n_k, p)
    value: Tensor,  # (b, h_kv, n_k, p_v)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: (b, n, h, p_v), and None for the weights, which are never formed."""
    given = {name: kwargs.pop(name) for name in settings.names if kwargs.get(name) is not None}
    refuse(settings, query, key, attention_mask, kwargs)
    num_samples = given.get("num_samples", settings.num_samples)
    reason = why_exact(settings, num_samples, module, query, key, attention_mask, is_causal, kwargs)
    if not torch.compiler.is_compiling():
        _report(settings, reason, dropout)
    if reason is not None:
        if attention_mask is not None and attention_mask.dim() == 2:
            attention_mask = attention_mask.bool()[:, None, None]  # (b, 1, 1, n_k)
        rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **rest)[0]
        return output, None
    padding = as_padding(attention_mask)
    mask = None if padding is None else padding.expand(len(query), -1)
    layer = getattr(module, "layer_idx", None) or 0
    options = tuple((name, _hashable(option)) for name, option in given.items())
    place = prepare(settings, options, query.shape[-1], scaling, layer, module.training)
    method = getattr(_modules, place)
    masks = {"key_mask": mask, "query_mask": None if attends_elsewhere(module, query, key) else mask}
    groups = query.shape[1] // key.shape[1]
    # one call for each query head of a group: keys and values are never repeated
    outputs = [method(query[:, group::groups], key, value, **masks) for group in range(groups)]
    output = outputs[0] if groups == 1 else torch.stack(outputs, 2).flatten(1, 2)  # (b, h, n, p_v)
    return output.transpose(1, 2).contiguous(), None


def refuse(
    settings: Settings, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: Mapping[str, Any]
) -> None:
    """Raise a ValueError for what neither a sketch nor transformers' exact kernel computes."""
    name = name_of(settings.method)
    for argument, meaning in UNKNOWN_TO_SDPA.items():
        if kwargs.get(argument) is not None:
            raise ValueError(f"attn_implementation={name!r} does not know {argument} ({meaning}); use 'eager'")
    if kwargs.get("output_attentions"):
        raise ValueError(f"attn_implementation={name!r} forms no attention weights to return; use 'eager' for them")
    window = kwargs.get("sliding_window")
    if attention_mask is None:
        if window is not None and window < key.shape[-2]:
            raise ValueError(f"a layer has a window of {window} keys, but its mask does not say so; use 'sdpa'")
        return
    if attention_mask.dim() == 4:
        return
    expected = (query.shape[0], key.shape[-2])
    if attention_mask.shape != expected or attention_mask.is_floating_point():
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and dtype {attention_mask.dtype}; expected a "
            f"boolean mask of shape {expected} = (batch, keys), True = real, or one of four dimensions for 'sdpa'"
        )
    if window is not None:
        raise ValueError(f"a layer has a window of {window} keys, but its mask is only one of padding; use 'sdpa'")


def why_exact(
    settings: Settings,
    num_samples: int,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    kwargs: Mapping[str, Any],
) -> str | None:
    """Why a layer takes the exact kernel, or None where it is sketched. The first that holds, in this order."""
    # as transformers has it: a layer that does not say is causal
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        return "causal"
    if kwargs.get("position_bias") is not None:
        return "position bias"
    if kwargs.get("sliding_window") is not None:
        return "sliding window"
    if attention_mask is not None and as_padding(attention_mask) is None:
        return "mask is more than padding"
    if query.shape[-2] == 1:
        return "one query"
    if attends_elsewhere(module, query, key):
        if not METHODS[settings.method].cross_attention:
            return "cross-attention"
        if in_decoder(module) and not settings.decoder_cross_attention:
            return "cross-attention of a decoder"
    if settings.exact_at_all_keys and num_samples >= key.shape[-2]:
        return "no more keys than samples"
    return None


def as_padding(attention_mask: Tensor | None) -> Tensor | None:
    """The mask as (b, n_k) where it only says which keys are padding, else None.

    That is one of two dimensions, or a boolean one of four that is the same for all heads and queries by its shape.
    """
    if attention_mask is None or attention_mask.dim() == 2:
        return None if attention_mask is None else attention_mask.bool()
    if attention_mask.dtype == torch.bool and attention_mask.shape[1:3] == (1, 1):
        return attention_mask[:, 0, 0]
    return None


def attends_elsewhere(module: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether the keys may be of another sequence than the queries: then the mask says nothing about queries.

    By their numbers, by what the module says of itself, or because its forward takes another sequence and nothing says
    that it was not given one.
    """
    if query.shape[-2] != key.shape[-2]:
        return True
    if hasattr(module, "is_cross_attention"):
        return bool(module.is_cross_attention)
    if "Cross" in type(module).__name__:
        return True
    if hasattr(module, "is_decoder"):  # what is not causal in a decoder attends to the encoder
        return bool(module.is_decoder)
    return bool(takes_another_sequence(type(module)))


def in_decoder(module: nn.Module) -> bool:
    """Whether the module may be part of a decoder, whose queries must not see later ones."""
    if hasattr(module, "is_decoder"):
        return bool(module.is_decoder)
    config = getattr(module, "config", None)
    return bool(getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False))


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def takes_another_sequence(kind: type[nn.Module]) -> bool:
    """Whether the forward of such a module has an argument for another sequence."""
    return not OTHER_SEQUENCE.isdisjoint(inspect.signature(kind.forward).parameters)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def prepare(
    settings: Settings,
    given: Given,
    head_dim: int,
    scale: float | None,
    layer: int,
    training: bool,
) -> str:
    """Make the method as a module in the mode of the layer, once for layers that are alike: its name in `_modules`.

    `given` are the options of the call. A compiler takes the name as a constant; it could not take the module itself,
    nor make one.
    """
    arguments = (settings, given, head_dim, scale, layer, training)
    if arguments not in _names:
        _names[arguments] = f"module_{len(_names)}"
        setattr(_modules, _names[arguments], make(settings, given, head_dim, scale, layer).train(training))
    return _names[arguments]


def make(
    settings: Settings,
    given: Given = (),
    head_dim: int = 8,
    scale: float | None = None,
    layer: int = 0,
) -> Attention:
    """The method as a module, with the options of a call before those that were registered."""
    options = {"num_samples": settings.num_samples, "seed": settings.seed, **dict(settings.options), **dict(given)}
    budget, seed = options.pop("num_samples"), options.pop("seed")
    check_count("num_samples", budget)
    if "scale" in parameters(settings.method):
        options["scale"] = scale
    if isinstance(seed, int):
        seed = seed * LAYERS + layer
    module = build(settings.method, head_dim=head_dim, budget=budget, seed=seed, **options)
    if any(True for _ in module.parameters()):
        raise ValueError(f"{settings.method!r} with these options has parameters of its own, which nothing has trained")
    return module


def _report(settings: Settings, reason: str | None, dropout: float) -> None:
    for counter in _watching:
        counter[reason or SKETCHED] += 1
    name = name_of(settings.method)
    if dropout and reason is None and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"attn_implementation={name!r} has no attention dropout: the model's {dropout:g} is ignored in sketched "
            "layers; set it to 0 in the model's config to silence this",
            stacklevel=3,
        )


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
