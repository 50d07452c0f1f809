"""Sketched attention in a PyTorch model that exists: `convert` changes its layers in place, `restore` undoes it.

A layer changes its class and nothing else: it stays the same object, with its parameters, hooks and attributes, so that
optimizers, wrappers and whoever else holds it go on as before. What it was is kept in the object, and so survives a
copy, a pickle and a second conversion.
"""

import warnings
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
from skeinformer.attention.methods import DEFAULT, no_group
from skeinformer.distributed.group import Group
from skeinformer.nn.attention import (
    DropoutNotice,
    MultiheadAttention,
    adds_keys,
    build_attention,
    check_self_attention,
    drops_weights,
    place,
)
from skeinformer.nn.calls import forget_calls
from skeinformer.nn.decision import AUTO, MinLength, check_min_length
from skeinformer.nn.encoder import change_encoders, restore_encoders
from skeinformer.nn.found import check_model, other_ways
from skeinformer.noise import layer_seed
from skeinformer.registry import check_flag, lookup

LayerFilter = Callable[[str, nn.Module], bool] | Iterable[str] | str | None
# what a converted layer has beside torch's
OWN_ATTRIBUTES = ("attention", "method", "min_length", "notice", "self_attention")
# what `restore` calls too: an apply of models that this package does not know; each gives the names that it has changed
ALSO_UNDONE: list[Callable[[nn.Module], list[str]]] = []
CAUSAL = "self-attention of a decoder layer, which is causal, stays exact"


@dataclass(frozen=True)
class Conversion:
    """What `convert` did: names of layers, and for those it left alone the reason. Printing it shows all of it."""

    method: str
    options: Mapping[str, object]
    converted: tuple[str, ...]
    left: Mapping[str, str]
    """Name to reason."""
    notes: tuple[str, ...] = ()
    decoder_cross_attention: bool = False
    self_attention: bool | None = None
    min_length: MinLength = AUTO

    def settings(self) -> dict[str, Any]:
        """The arguments by which `convert` does the same again to a model that was built alike, as JSON holds them.

        With these and a state_dict a converted model is saved: build, `convert(model, **settings)`, load.
        """
        return {
            "method": self.method,
            "filter": [escape(name) for name in self.converted],
            "decoder_cross_attention": self.decoder_cross_attention,
            "self_attention": self.self_attention,
            "min_length": self.min_length,
            **self.options,
        }

    def __str__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        total = len(self.converted) + len(self.left)
        where = "" if METHODS[self.method].exact_from == 0 else ", at all lengths"
        if where and self.min_length == AUTO:
            where = ", where that is faster than exact attention"
        elif where and self.min_length:
            where = f", from {self.min_length} tokens on"
        lines = [f"{len(self.converted)} of {total} attention layers attend by {self.method}({options}){where}"]
        lines += [f"  converted   {_shown(name)}" for name in self.converted]
        lines += [f"  left alone  {_shown(name)}: {reason}" for name, reason in self.left.items()]
        lines += [f"  note        {note}" for note in self.notes]
        return "\n".join(lines)


@dataclass(frozen=True)
class Before:
    """What a layer was: its class, and its attention if it was one of ours already."""

    kind: type[nn.MultiheadAttention]
    attention: Attention | None = None
    method: str = ""
    self_attention: bool | None = None
    min_length: MinLength = AUTO


def convert(
    model: nn.Module,
    method: str = DEFAULT,
    *,
    filter: LayerFilter = None,
    decoder_cross_attention: bool = False,
    self_attention: bool | None = None,
    min_length: MinLength = AUTO,
    group: Any = None,
    **options: Any,
) -> Conversion:
    """Let every `nn.MultiheadAttention` in `model` attend by `method`, in place; the report says what changed.

    `options` are those of `skeinformer.nn.MultiheadAttention`: budget, num_pilots, gradient (what keys and values get
    in training), seed and the rest of `build`; layer i has the seed `seed * 1009 + i` (0 unless given; None draws anew
    in evaluation too). `filter` chooses layers: a predicate on (name, module), or patterns of names such as
    "encoder.layers.[01].*". A second call changes options. `self_attention` is that of the layer, None leaves it as it
    was; a decoder's cross-attention is never told. Calls shorter than `min_length` stay exact; "auto" are those that a
    sketch would not make faster, and 0 sketches all. With a `group` every rank passes its share of the tokens, and no
    call stays exact (docs/distributed.md).

    Left alone, with the reason in the report: the self-attention of `nn.TransformerDecoderLayer`, which is causal, and
    its cross-attention, unless the method goes row by row or `decoder_cross_attention` says so; subclasses with a
    forward of their own; parametrized or quantized weights. Nothing is changed if anything raises.
    """
    check_model(model)
    check_flag("decoder_cross_attention", decoder_cross_attention)
    check_self_attention(self_attention)
    check_min_length(min_length)
    if group is not None and not lookup("attention", method, METHODS).sequence_parallel:
        raise ValueError(no_group(method))
    layers, aliases = attention_layers(model)
    left = reasons(model, layers, choose_layers(layers, aliases, filter), method, decoder_cross_attention)
    shared = {} if group is None else {"group": share_layers(group, model, layers, left)}
    attentions: dict[str, Attention] = {}
    seed = options.get("seed", 0)
    for index, (name, layer) in enumerate(layers.items()):
        if name not in left:
            own = {**options, **shared, "seed": layer_seed(seed, index)}
            attentions[name] = build_attention(layer, method, **own)
    notice = DropoutNotice()
    crossing = {id(decoder.multihead_attn) for decoder in decoders(model)}
    for name, attention in attentions.items():
        own_sequence = None if id(layers[name]) in crossing else self_attention
        change(layers[name], attention, method, notice, own_sequence, min_length)
    change_encoders(model)
    notes = [f"{alias} is the same layer as {_shown(name)}" for alias, name in aliases.items()]
    changed = {name: (layers[name], attention) for name, attention in attentions.items()}
    notes += notes_on(model, method, changed, min_length)
    if shared:
        notes.append(f"tokens are divided among {shared['group'].size} ranks: every call attends by {method}")
    if not layers:
        notes.append(other_ways(model))
        warnings.warn(f"nothing was converted: {notes[-1]}", stacklevel=2)
    elif not attentions and CAUSAL in left.values():
        warnings.warn(
            f"nothing was converted: {list(left.values()).count(CAUSAL)} of {len(left)} attention layers of "
            f"{type(model).__name__} are causal, and stay exact. Sketches are for attention in which every query sees "
            "every key; print the report for all reasons",
            stacklevel=2,
        )
    told = (decoder_cross_attention, self_attention, min_length)
    return Conversion(method, options, tuple(attentions), left, tuple(notes), *told)


def restore(model: nn.Module) -> tuple[str, ...]:
    """Undo `convert` and `apply` in `model`, in place: all as it was; weights as they are now.

    Returns the names of the layers that it changed back. Copies and unpickled models can be restored too.
    """
    check_model(model)
    others = [name for undo in (forget_calls, *ALSO_UNDONE) for name in undo(model)]
    return (*restore_layers(model), *others)


def restore_layers(model: nn.Module) -> tuple[str, ...]:
    """The layers of torch alone: classes, attributes and flags as they were."""
    restored = []
    for name, layer in attention_layers(model)[0].items():
        before: Before | None = layer.__dict__.pop("_before", None)
        if before is None:
            continue
        restored.append(name)
        if before.attention is not None:
            ours = cast(MultiheadAttention, layer)
            ours.attention, ours.method = place(before.attention, layer), before.method
            ours.self_attention, ours.min_length = before.self_attention, before.min_length
        else:
            for attribute in OWN_ATTRIBUTES:
                delattr(layer, attribute)
            layer.__class__ = before.kind
    restore_encoders(model)
    return tuple(restored)


def layers_remembered(model: nn.Module) -> Callable[[], None]:
    """What makes the attention layers and encoders again what they are now."""
    kept = [
        (module, type(module), dict(vars(module)), dict(module._modules))
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoder | nn.TransformerEncoderLayer)
    ]

    def put_back() -> None:
        for module, kind, attributes, children in kept:
            module.__class__ = kind
            for table, before in ((vars(module), attributes), (module._modules, children)):
                table.clear()
                table.update(before)

    return put_back


def attention_layers(model: nn.Module) -> tuple[dict[str, nn.MultiheadAttention], dict[str, str]]:
    """The attention layers by name, each object once under its first name, and the first name for every other name."""
    first: dict[int, str] = {}
    layers: dict[str, nn.MultiheadAttention] = {}
    aliases: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if not isinstance(module, nn.MultiheadAttention):
            continue
        if id(module) in first:
            aliases[name] = first[id(module)]
        else:
            first[id(module)], layers[name] = name, module
    return layers, aliases


def choose_layers(
    layers: Mapping[str, nn.MultiheadAttention], aliases: Mapping[str, str], filter: LayerFilter
) -> set[str]:
    """The first names of layers that a filter lets through under any name; ValueError for a pattern that fits none."""
    first = {**{name: name for name in layers}, **aliases}
    if filter is None:
        return set(layers)
    if callable(filter):
        return {first[name] for name in first if filter(name, layers[first[name]])}
    chosen: set[str] = set()
    for pattern in [filter] if isinstance(filter, str) else filter:
        found = {first[name] for name in first if fnmatchcase(name, pattern)}
        if not found:
            names = ", ".join(map(_shown, first)) or "none"
            raise ValueError(f"filter pattern {pattern!r} matches no attention layer; the model has: {names}")
        chosen |= found
    return chosen


def reasons(
    model: nn.Module,
    layers: Mapping[str, nn.MultiheadAttention],
    chosen: set[str],
    method: str,
    decoder_cross_attention: bool,
) -> dict[str, str]:
    """The layers to leave alone, by name, each with the reason."""
    entry = lookup("attention", method, METHODS)
    crosses = entry.cross_attention
    left = {}
    for name, layer in layers.items():
        reason = why_not(layer)
        if name not in chosen:
            now = f"; it attends by {layer.method}" if isinstance(layer, MultiheadAttention) else ""
            reason = f"not chosen by filter{now}"
        elif any(layer is decoder.self_attn for decoder in decoders(model)):
            reason = CAUSAL
        elif any(layer is decoder.multihead_attn for decoder in decoders(model)):
            if not crosses:
                reason = f"cross-attention, and {method} is a pattern over one sequence"
            elif not entry.row_by_row and not decoder_cross_attention:
                reason = (
                    f"cross-attention of a decoder, where a row by {method} would depend on later rows; "
                    "decoder_cross_attention=True converts it"
                )
        elif not crosses and adds_keys(layer):
            reason = f"add_bias_kv or add_zero_attn adds keys, and {method} is a pattern over one sequence"
        if reason is not None:
            left[name] = reason
    return left


def share_layers(
    group: Any, model: nn.Module, layers: Mapping[str, nn.MultiheadAttention], left: Mapping[str, str]
) -> Group:
    """The group, where all layers take it: one that is left alone would attend to the tokens of its own rank only."""
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no nn.MultiheadAttention, so nothing would be converted, and with a group its "
            "attention would see the tokens of its own rank only; call cluster_attention(..., group=group) in it, or "
            "for a model of transformers huggingface.register(..., group=group)"
        )
    for name, reason in left.items():
        raise ValueError(
            f"{_shown(name)} would stay as it is ({reason}), and with a group it would attend to the tokens of its own "
            "rank only; convert every attention layer, or none"
        )
    return Group.of(group)


def decoders(model: nn.Module) -> list[nn.TransformerDecoderLayer]:
    """The decoder layers of torch in the model."""
    return [module for module in model.modules() if isinstance(module, nn.TransformerDecoderLayer)]


def why_not(layer: nn.MultiheadAttention) -> str | None:
    """The reason why this layer cannot be converted, or None."""
    kind = MultiheadAttention if isinstance(layer, MultiheadAttention) else nn.MultiheadAttention
    if "forward" in layer.__dict__:
        return "its forward was replaced on the object itself; convert first, then apply what replaces it"
    if type(layer).forward is not kind.forward:
        return f"{type(layer).__name__} is a subclass with a forward of its own"
    if parametrize.is_parametrized(layer) or parametrize.is_parametrized(layer.out_proj):
        return "its weights are parametrized"
    weight = layer.out_proj.weight
    if not isinstance(layer.out_proj, nn.Linear) or not isinstance(weight, Tensor) or weight.dtype not in DTYPES:
        return "its weights are quantized, or its output projection is not a plain nn.Linear"
    taken = [name for name in OWN_ATTRIBUTES if hasattr(layer, name)]
    if taken and kind is nn.MultiheadAttention:
        return f"it has an attribute {taken[0]!r} of its own"
    return None


def change(
    layer: nn.MultiheadAttention,
    attention: Attention,
    method: str,
    notice: DropoutNotice,
    self_attention: bool | None,
    min_length: MinLength,
) -> None:
    """Give one layer its attention; the first time also its class, and remember what it was."""
    if "_before" not in layer.__dict__:
        if isinstance(layer, MultiheadAttention):
            layer.__dict__["_before"] = Before(
                type(layer), layer.attention, layer.method, layer.self_attention, layer.min_length
            )
        else:
            kind: type = type(layer)
            layer.__dict__["_before"] = Before(kind)
            layer.__class__ = sketched_class(kind)
    ours = cast(MultiheadAttention, layer)
    ours.attention, ours.method, ours.notice, ours.min_length = attention, method, notice, min_length
    ours.self_attention = getattr(ours, "self_attention", None) if self_attention is None else self_attention


def notes_on(
    model: nn.Module,
    method: str,
    changed: Mapping[str, tuple[nn.MultiheadAttention, Attention]],
    min_length: MinLength,
) -> list[str]:
    """What a user should know about the layers that changed."""
    notes = []
    if METHODS[method].quadratic and METHODS[method].exact_from != 0 and min_length == AUTO:
        notes.append(f"{method} takes quadratic time and is never faster: every call is exact, unless min_length=0")
    added = sum(parameter.numel() for _, attention in changed.values() for parameter in attention.parameters())
    if added:
        notes.append(f"{added} new parameters need training: give them to the optimizer, convert before wrapping")
    rates = {layer.dropout for layer, _ in changed.values()} - {0.0}
    if rates and not drops_weights(method):
        shown = ", ".join(f"{rate:g}" for rate in sorted(rates))
        notes.append(f"dropout on attention weights ({shown}) is not applied in training: no weights are formed")
    crossing = [decoder.multihead_attn for decoder in decoders(model)]
    if not METHODS[method].row_by_row and any(layer is cross for layer, _ in changed.values() for cross in crossing):
        notes.append(
            f"in a decoder's cross-attention by {method} a row may depend on later rows, of which pilots or landmarks "
            "are taken; skeinformer_uniform and performer go row by row"
        )
    return notes


@cache
def sketched_class(kind: type) -> type[MultiheadAttention]:
    """The class of a converted layer: ours, or for a subclass without a forward of its own, ours before that one."""
    if kind is nn.MultiheadAttention:
        return MultiheadAttention

    def reduce(layer: nn.Module, protocol: Any) -> tuple[Any, ...]:
        # a class made here has no name to be found by: copies and pickles find it by the class it was made from
        reduced = cast(tuple[Any, ...], object.__reduce_ex__(layer, protocol))
        return (_empty, (kind,), *reduced[2:])

    return type(f"Sketched{kind.__name__}", (MultiheadAttention, kind), {"__reduce_ex__": reduce})


def _empty(kind: type) -> nn.Module:
    made = sketched_class(kind)
    return made.__new__(made)


def _shown(name: str) -> str:
    return name or "the model itself"
