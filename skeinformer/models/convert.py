"""Sketched attention in a PyTorch model that exists: `convert` changes its layers in place, `restore` undoes it.

A layer changes its class and gets three attributes: it stays the same object with the same parameters and hooks. The
object remembers what it was, and so do its copies and pickles.
"""

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from glob import escape
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.utils import parametrize

from skeinformer.attention import METHODS, Attention
from skeinformer.attention.inputs import DTYPES
from skeinformer.checks import check_flag
from skeinformer.models.layers import MultiheadAttention, build_attention, place, unsuitable_keys
from skeinformer.models.policy import MinLength, Policy

LayerFilter = Callable[[str, nn.Module], bool] | Iterable[str] | str | None
OWN_ATTRIBUTES = ("attention", "policy", "index")  # what our layer has and torch's does not
CAUSAL_LAYER = "self-attention of a decoder layer, which is causal, stays exact"


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: names of layers, for those it skipped the reason, and notes. Printing it shows all of it."""

    policy: Policy
    converted: tuple[str, ...]
    skipped: Mapping[str, str]  # name to reason
    notes: tuple[str, ...] = ()

    def arguments(self) -> dict[str, Any]:
        """Return arguments, for JSON, that convert a model again: build, `convert(model, **arguments)`, load."""
        return {**self.policy.fields(), "filter": [escape(name) for name in self.converted]}

    def __str__(self) -> str:
        total, min_length = len(self.converted) + len(self.skipped), self.policy.min_length
        where = f", from {min_length} tokens on" if min_length else ", at all lengths"
        where = ", where that is faster than exact attention" if min_length == "auto" else where
        where = "" if self.policy.is_exact or self.policy.group is not None else where
        lines = [f"{len(self.converted)} of {total} attention layers attend by {self.policy}{where}"]
        lines += [f"  converted   {_shown(name)}" for name in self.converted]
        lines += [f"  skipped     {_shown(name)}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)


def convert(
    model: nn.Module,
    method: str | None = None,
    *,
    filter: LayerFilter = None,
    decoder_cross_attention: bool = False,
    min_length: MinLength = "auto",
    tolerance: float | None = None,
    group: Any = None,
    **options: Any,
) -> Conversion:
    """Let every `nn.MultiheadAttention` in `model` attend by `method`, in place.

    Skipped, with the reason in the report: the self-attention of `nn.TransformerDecoderLayer`, which is causal;
    subclasses with a forward of their own; parametrized or quantized weights. A second call changes the options.
    Nothing is changed if anything raises.

    Args:
        model: The model.
        filter: The layers to convert: a predicate on (name, module), or patterns of names, "encoder.layers.[01].*".
        decoder_cross_attention: Convert the cross-attention of decoders also where a row would depend on later rows.
        method, min_length, **options: As in `MultiheadAttention`. Layer i draws by `seed * 1009 + i`.
        tolerance: The relative error that each head may have, instead of a method and its sizes.
        group: A ProcessGroup or one-dimensional DeviceMesh. Every rank then passes its share of the tokens.

    Returns:
        A report of the layers that were converted and skipped.

    Raises:
        ValueError, TypeError: An option that is unknown or that a layer cannot have, or a pattern that fits no layer.

    Example:
        >>> print(convert(model, "cluster", budget=64))
    """
    check_model(model)
    check_flag("decoder_cross_attention", decoder_cross_attention)
    options |= {"decoder_cross_attention": decoder_cross_attention, "group": group}
    policy = Policy.for_layer(method, min_length=min_length, tolerance=tolerance, **options)
    layers, first_names = attention_layers(model)
    decoders = [module for module in model.modules() if isinstance(module, nn.TransformerDecoderLayer)]
    causal, crossing = [decoder.self_attn for decoder in decoders], [decoder.multihead_attn for decoder in decoders]
    chosen, skipped = choose_layers(layers, first_names, filter), {}
    for name, layer in layers.items():
        if name not in chosen:
            current = f"; it attends by {layer.method}" if isinstance(layer, MultiheadAttention) else ""
            skipped[name] = f"not chosen by filter{current}"
        elif reason := skip_reason(layer, policy, is_causal=layer in causal, crosses=layer in crossing):
            skipped[name] = reason
    if group is not None and (skipped or not layers):
        name, reason = next(iter(skipped.items()), (type(model).__name__, "it has no nn.MultiheadAttention"))
        why = f"{_shown(name)} would stay as it is ({reason}), and attend to the tokens of its own rank only"
        raise ValueError(f"{why}: convert every layer, or none; a model of transformers takes huggingface.register")
    # all are built before any layer changes, in case that one raises
    attentions = {name: build_attention(x, policy) for name, x in layers.items() if name not in skipped}
    for index, (name, layer) in enumerate(layers.items()):
        if name not in attentions:
            continue
        changed: Any = layer
        if "_before" not in vars(layer):
            kind, ours = changed.__class__, isinstance(layer, MultiheadAttention)
            changed._before = kind, {field: getattr(layer, field) for field in OWN_ATTRIBUTES if ours}
            changed.__class__ = kind if ours else sketched_class(kind)
        changed.attention, changed.policy, changed.index = attentions[name], policy, index
    for module in model.modules():  # torch's encoders pack padded input, for which they go around our layers
        packs = isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False)
        if packs and any(isinstance(part, MultiheadAttention) for part in module.modules()):
            vars(module).update(_use_nested_tensor_before=module.use_nested_tensor, use_nested_tensor=False)
    notes = [f"{name} is the same layer as {_shown(first)}" for name, first in first_names.items() if name != first]
    added = sum(parameter.numel() for attention in attentions.values() for parameter in attention.parameters())
    if added:
        notes.append(f"{added} new parameters need training: give them to the optimizer, convert before wrapping")
    if not layers:
        notes.append(other_ways(model))
        warnings.warn(f"nothing was converted: {notes[-1]}", stacklevel=2)
    elif not attentions and (num_causal := list(skipped.values()).count(CAUSAL_LAYER)):
        which = f"{num_causal} of {len(skipped)} attention layers of {type(model).__name__} are causal"
        warnings.warn(f"nothing was converted: {which}, and stay exact", stacklevel=2)
    return Conversion(policy, tuple(attentions), skipped, tuple(notes))


def restore(model: nn.Module) -> tuple[str, ...]:
    """Undo `convert` and `huggingface.sketch` in `model`, also a copy or one that was unpickled; weights stay.

    Returns:
        The names of the layers, and of the models of transformers, that changed.
    """
    check_model(model)
    restored = []
    for name, layer in attention_layers(model)[0].items():
        if "_before" not in layer.__dict__:
            continue
        kind, attributes = layer.__dict__.pop("_before")
        for attribute in OWN_ATTRIBUTES:
            delattr(layer, attribute)
        for attribute, value in attributes.items():
            setattr(layer, attribute, place(value, layer) if isinstance(value, Attention) else value)
        layer.__class__ = kind
        restored.append(name)
    for module in model.modules():
        if "_use_nested_tensor_before" in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop("_use_nested_tensor_before")
    huggingface = sys.modules.get("skeinformer.models.huggingface")
    return (*restored, *(huggingface.restore_models(model) if huggingface else ()))


def attention_layers(model: nn.Module) -> tuple[dict[str, nn.MultiheadAttention], dict[str, str]]:
    """Return the attention layers by their first names, and the first name for each name of a layer."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.MultiheadAttention)}
    first = {id(layer): name for name, layer in layers.items()}
    names = model.named_modules(remove_duplicate=False)
    return layers, {name: first[id(module)] for name, module in names if id(module) in first}


def choose_layers(layers: Mapping[str, nn.Module], first_names: Mapping[str, str], filter: LayerFilter) -> set[str]:
    if filter is None or callable(filter):
        return {first for name, first in first_names.items() if filter is None or filter(name, layers[first])}
    chosen: set[str] = set()
    for pattern in [filter] if isinstance(filter, str) else filter:
        matches = {first for name, first in first_names.items() if fnmatchcase(name, pattern)}
        if not matches:
            names = ", ".join(map(_shown, first_names)) or "none"
            raise ValueError(f"filter pattern {pattern!r} matches no attention layer; the model has: {names}")
        chosen |= matches
    return chosen


def skip_reason(layer: nn.MultiheadAttention, policy: Policy, *, is_causal: bool, crosses: bool) -> str | None:
    """Return why a layer is not converted, or None; `crosses` where it is the cross-attention of a decoder."""
    method, entry, projection = policy.method, METHODS[policy.method], layer.out_proj
    ours = isinstance(layer, MultiheadAttention)
    forward = MultiheadAttention.forward if ours else nn.MultiheadAttention.forward
    is_parametrized = parametrize.is_parametrized(layer) or parametrize.is_parametrized(projection)
    is_plain = isinstance(projection, nn.Linear) and isinstance(projection.weight, Tensor)
    taken = next((name for name in (*OWN_ATTRIBUTES, "method") if hasattr(layer, name)), None)
    later_rows = crosses and not entry.row_by_row and not policy.decoder_cross_attention
    reasons = {  # the first that holds is returned
        CAUSAL_LAYER: is_causal,
        f"cross-attention, and {method} is a pattern over one sequence": crosses and not policy.cross_attention,
        f"cross-attention of a decoder, where a row by {method} would depend on later rows; "
        "decoder_cross_attention=True converts it": later_rows,
        (keys_reason := unsuitable_keys(layer, policy)): keys_reason is not None,
        "its forward was replaced on the object itself; convert first, then replace it": "forward" in vars(layer),
        f"{type(layer).__name__} is a subclass with a forward of its own": type(layer).forward is not forward,
        "its weights are parametrized": is_parametrized,
        "its weights are quantized, or its output projection is not a plain nn.Linear": not is_plain
        or projection.weight.dtype not in DTYPES,
        f"it has an attribute {taken!r} of its own": taken is not None and not ours,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {type(model).__name__}; of a pipeline pass pipeline.model")


def other_ways(model: nn.Module) -> str:
    attentions = Counter(type(x).__name__ for x in model.modules() if "attention" in type(x).__name__.lower())
    names = ", ".join(f"{count} {name}" for name, count in attentions.most_common(3)) or "no module called attention"
    ways = "inside `with skeinformer.sketched():`; a model of transformers takes skeinformer.huggingface.sketch"
    what = f"{type(model).__name__} has no torch.nn.MultiheadAttention ({names})"
    return f"{what}. Its calls of torch's SDPA are sketched {ways}"


@cache
def sketched_class(kind: type) -> type[MultiheadAttention]:
    """Return the class of a converted layer: ours, or for a subclass without a forward of its own, ours before it."""
    if kind is nn.MultiheadAttention:
        return MultiheadAttention

    def reduce(layer: nn.Module, protocol: Any) -> tuple[Any, ...]:
        # copies and pickles look up a class by its name, and no module has this one: they make it again from `kind`
        reduced = cast(tuple[Any, ...], object.__reduce_ex__(layer, protocol))
        return (_empty_layer, (kind,), *reduced[2:])

    return type(f"Sketched{kind.__name__}", (MultiheadAttention, kind), {"__reduce_ex__": reduce})


def _empty_layer(kind: type) -> nn.Module:
    return sketched_class(kind).__new__(sketched_class(kind))


def _shown(name: str) -> str:
    return name or "the model itself"
