"""`attention_forward`: what transformers calls in every layer of a model whose attention has one of our names."""

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skeinformer.huggingface.rules import CAUSAL, as_padding, attends_elsewhere, refuse_call, why_layer_is_exact
from skeinformer.huggingface.settings import LayerSettings
from skeinformer.huggingface.stack import layer_number
from skeinformer.kernels.choice import first_derivative
from skeinformer.nn.decision import AskedSizes
from skeinformer.nn.functional import Given, asked_sizes, by_head, hashable
from skeinformer.nn.kept import KEPT, constant_of_a_graph, keep

SKETCHED = "sketched"
_watching: list[Counter[str]] = []
_warned: set[str] = set()
# by the identity of a configuration: it, and how many layers were causal; None once another was, or it has warned
_causal: dict[int, tuple[ref[Any] | None, int | None]] = {}


def attention_forward(
    settings: LayerSettings,
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
    """(b, n, h, p_v), and None for the weights, which are never formed."""
    given = tuple((name, hashable(kwargs.pop(name))) for name in settings.option_names if name in kwargs)
    refuse_call(settings, query, key, attention_mask, kwargs)
    sizes = sizes_of_call(settings, given)
    reason = why_layer_is_exact(settings, sizes, module, query, key, attention_mask, is_causal, kwargs)
    if not torch.compiler.is_compiling():
        _report(settings, module, reason, dropout)
    if reason is not None and settings.group is not None:
        raise ValueError(
            f"attn_implementation={settings.name!r} has a group, and this layer would be exact ({reason}): it would "
            "see the tokens of its own rank only; register without a group for this model"
        )
    if reason is not None:
        rest = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return exact_forward(module, query, key, value, attention_mask, rest), None
    masks = masks_of(module, query, key, attention_mask)
    layer = layer_number(module)
    method = getattr(KEPT, layer_name(settings, given, query.shape[-1], scaling, layer, module.training))
    groups = query.shape[1] // key.shape[1]
    # one call for each query head of a group: keys and values are never repeated
    outputs = [method(query[:, group::groups], key, value, **masks) for group in range(groups)]
    output = by_head(outputs)  # (b, h, n, p_v)
    return output.transpose(1, 2).contiguous(), None


def exact_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    options: Mapping[str, Any],
) -> Tensor:
    """(b, n, h, p_v) by transformers' exact kernel, which takes no mask of two dimensions."""
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask.bool()[:, None, None]  # (b, 1, 1, n_k)
    output: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **options)[0]
    return first_derivative(output)


def masks_of(module: nn.Module, query: Tensor, key: Tensor, attention_mask: Tensor | None) -> dict[str, Tensor | None]:
    """Which keys of a layer to be sketched are real, (b, n_k), and which queries, where they are the same tokens."""
    padding = as_padding(attention_mask)
    mask = None if padding is None else padding.expand(len(query), -1)
    return {"key_mask": mask, "query_mask": None if attends_elsewhere(module, query, key) else mask}


@constant_of_a_graph
def layer_name(
    settings: LayerSettings, given: Given, head_dim: int, scale: float | None, layer: int, training: bool
) -> str:
    """The name in KEPT of the method in the mode of the layer, with the options `given` in the call."""
    # True and 1, or 8 and 8.0, are equal, but not as options
    arguments = (settings, given, tuple(type(value) for _, value in given), head_dim, scale, layer, training)
    return keep(arguments, lambda: settings.build(given, head_dim, scale, layer).train(training))


@constant_of_a_graph
def sizes_of_call(settings: LayerSettings, given: Given) -> AskedSizes:
    """What `min_length="auto"` goes by in a call with such options.

    Or an error that names a wrong option.
    """
    for name, value in given:
        try:
            hash(value)
        except TypeError:
            raise TypeError(f"{name} must be a single value, got {value!r} of type {type(value).__name__}") from None
    return asked_sizes(getattr(KEPT, layer_name(settings, given, 8, None, 0, False)))


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


def warn_again() -> None:
    """Forget what names and models have warned of."""
    _warned.clear()
    _causal.clear()


def _report(settings: LayerSettings, module: nn.Module, reason: str | None, dropout: float) -> None:
    for counter in _watching:
        counter[reason or SKETCHED] += 1
    _warn_of_causal(settings, module, reason)
    if dropout and reason is None and settings.name not in _warned:
        _warned.add(settings.name)
        warnings.warn(
            f"attn_implementation={settings.name!r} has no attention dropout: the model's {dropout:g} is ignored in "
            "sketched layers; set it to 0 in the model's config to silence this",
            stacklevel=4,
        )


def _warn_of_causal(settings: LayerSettings, module: nn.Module, reason: str | None) -> None:
    """Warn once where as many layers as a model has were causal, and none was anything else."""
    config = getattr(module, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return
    known, calls = _causal.get(id(config), (None, 0))
    if known is None or known() is not config:
        known, calls = ref(config), 0
    if calls is None:  # it has warned, or has other layers
        return
    calls = calls + 1 if reason == CAUSAL else None
    layers = getattr(config, "num_hidden_layers", 1)
    if calls is not None and isinstance(layers, int) and calls >= layers:
        calls = None
        warnings.warn(
            f"attn_implementation={settings.name!r} sketches nothing in this model: its {layers} layers are causal, "
            "and stay exact. Sketches are for encoders, in which every query sees every key; use 'sdpa' here",
            stacklevel=5,
        )
    _causal[id(config)] = (known, calls)
