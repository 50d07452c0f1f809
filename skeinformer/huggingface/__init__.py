"""Sketched attention in Hugging Face models: `attn_implementation="skein"`.

    from skeinformer import huggingface

    huggingface.register(budget=256, num_pilots=32)
    model = AutoModel.from_pretrained(name, attn_implementation="skein")        # or
    model.set_attn_implementation("skein-cluster")

`skein` is Skeinformer; `skein-NAME` is the method NAME of METHODS. A layer is sketched where it is bidirectional and
its mask says only which keys are padding. Any other layer takes transformers' exact kernel, `sdpa`, with the mask that
it would have there; what neither can compute raises. `huggingface_rules` holds the rules, docs/drop-in-hf.md the table,
and `watch` counts what a model's layers did.
"""

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from itertools import count
from operator import index
from os import PathLike
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skeinformer.attention import METHODS, Attention, build
from skeinformer.huggingface.rules import (
    SKEINFORMER,
    Given,
    Settings,
    as_padding,
    attends_elsewhere,
    name_of,
    padding_mask,
    refuse,
    why_exact,
)
from skeinformer.registry import check_count, check_flag, check_options, lookup

__all__ = [
    "SKEINFORMER",
    "SKETCHED",
    "Settings",
    "as_padding",
    "attends_elsewhere",
    "attention_forward",
    "available",
    "exact_at_all_keys",
    "left_out",
    "load_pretrained",
    "make",
    "name_of",
    "option_names",
    "padding_mask",
    "refuse",
    "register",
    "save_pretrained",
    "unregister",
    "watch",
    "why_exact",
]

SKETCHED = "sketched"
LAYERS = 1009  # above the number of layers: seeds of one model are not those of another
# set for each layer, not by the user: width and scale are the layer's, budget is the budget
OF_THE_LAYER = ("head_dim", "max_len", "budget", "scale")
MODULES = 1024  # the most that are kept: every seed of a call makes one for each layer
_registered: dict[str, Settings] = {}
_modules = SimpleNamespace()  # made by `prepare`
_names: dict[tuple[object, ...], str] = {}  # of the modules, the oldest first
_numbers = count()  # never the same again: a compiled model may still look for an old name
_watching: list[Counter[str]] = []
_warned: set[str] = set()


def register(
    method: str | None = None,
    *,
    budget: int = 256,
    seed: int | None = 0,
    decoder_cross_attention: bool = False,
    **options: object,
) -> tuple[str, ...]:
    """Make `skein` and the other names known to transformers, and return those that this call has set.

    With a `method`, only its name is set. Without one all are, and `options` go to the methods that have such an
    option. Calling again changes the settings of models that are already in use.

    budget: d, the budget. seed: evaluation is deterministic, a layer that knows its number (`layer_idx`) with
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
    known = {name for other in chosen for name in option_names(other)} - {"budget", "seed"}
    check_options("register" if method is None else f"attention {method!r}", options, sorted(known))
    found: dict[str, Settings] = {}
    for other in chosen:
        own = option_names(other)
        kept = tuple((name, _hashable(value)) for name, value in options.items() if name in own)
        settings = Settings(other, budget, seed, decoder_cross_attention, kept, own, exact_at_all_keys(other))
        make(settings)  # raises for a wrong value
        found[name_of(other)] = replace(settings, budget=index(budget))
    for name, settings in found.items():
        _registered[name] = settings
        AttentionInterface.register(name, partial(attention_forward, settings))
        AttentionMaskInterface.register(name, padding_mask)
    _warned.clear()
    return tuple(found)


def unregister() -> tuple[str, ...]:
    """Forget all settings, and return their names. A model that still has such a name raises when called."""
    gone = tuple(_registered)
    _registered.clear()
    announce()
    return gone


def announce() -> None:
    """Let transformers know all names, so that a model that has one says what is missing until it is registered."""
    for name in available().values():
        AttentionInterface.register(name, partial(not_registered, name))
        AttentionMaskInterface.register(name, partial(not_registered, name))


def not_registered(name: str, *inputs: Any, **options: Any) -> NoReturn:
    """What stands for a name without settings, as attention and as mask."""
    raise RuntimeError(
        f"attn_implementation={name!r} is not registered: call skeinformer.huggingface.register() first, or load the "
        "model by skeinformer.huggingface.load_pretrained"
    )


def save_pretrained(model: Any, folder: str | PathLike[str], **options: Any) -> None:
    """`model.save_pretrained(folder, **options)`, and in `config.json` also its attention and what was registered.

    transformers leaves the attention out of the config, so that what it saves is loaded as an exact model. What is
    saved here is sketched when it is loaded again, or raises: by `load_pretrained` with these settings, by
    `from_pretrained` with those that are registered then.
    """
    names = names_in(model.config)
    settings = {name: plain(_registered[name]) for name in sorted(flat(names) & _registered.keys())}
    if not settings:
        raise ValueError(f"the model's attention is {names!r}, which is not of register(); use model.save_pretrained")
    json.dumps(settings)  # raises for what a file cannot hold, before there is one
    model.config.attn_implementation, model.config.skeinformer = names, settings
    try:
        model.save_pretrained(folder, **options)
    finally:
        del model.config.attn_implementation, model.config.skeinformer


def load_pretrained(name_or_folder: str | PathLike[str], kind: Any = AutoModel, **options: Any) -> Any:
    """`kind.from_pretrained(name_or_folder, **options)`, after registering the settings that `save_pretrained` saved.

    As always, they hold for all models that have the name.
    """
    found, _ = PreTrainedConfig.get_config_dict(name_or_folder, **options)
    # transformers' own save_pretrained keeps the settings of a model that was loaded with them, but not the name
    if not isinstance(settings := found.get("skeinformer"), dict) or "attn_implementation" not in found:
        raise ValueError(
            f"{name_or_folder} was not saved by skeinformer.huggingface.save_pretrained; use "
            "from_pretrained(..., attn_implementation='skein')"
        )
    for own in settings.values():
        register(**own)
    model = kind.from_pretrained(name_or_folder, **options)
    del model.config.skeinformer
    return model


def names_in(config: Any) -> Any:
    """The attention of a model as a config takes it: one name, or those of its parts where they differ."""
    name = config._attn_implementation
    parts = {part: names_in(own) for part in config.sub_configs if (own := getattr(config, part, None)) is not None}
    return name if all(other == name for other in parts.values()) else {"": name, **parts}


def flat(names: Any) -> set[str]:
    """All names in what `names_in` gives."""
    return {other for part in names.values() for other in flat(part)} if isinstance(names, dict) else {names}


def plain(settings: Settings) -> dict[str, Any]:
    """The arguments of `register` for these settings."""
    names = ("method", "budget", "seed", "decoder_cross_attention")
    return {**{name: getattr(settings, name) for name in names}, **dict(settings.options)}


def available() -> dict[str, str]:
    """The methods that can be registered, and their names for `attn_implementation`."""
    return {method: name_of(method) for method in METHODS if left_out(method) is None}


@cache
def left_out(method: str) -> str | None:
    """Why a method of METHODS is not registered, or None if it is."""
    if METHODS[method].quadratic:
        return "it takes quadratic time and gains nothing over 'sdpa'"
    if METHODS[method].shares_keys:
        return "it shares queries and keys, which a pretrained model projects apart"
    module = build(method, head_dim=8, max_len=8, budget=8)
    if any(True for _ in module.parameters()):
        return "it has parameters of its own, which a pretrained model does not bring"
    return None


@cache
def option_names(method: str) -> frozenset[str]:
    """The options of a method that `register` and a call take."""
    return parameters(method).difference(OF_THE_LAYER) | {"budget", "seed"}


def exact_at_all_keys(method: str) -> bool:
    """Whether as many samples as keys are exact attention; an option of some methods sets the size in their place."""
    return METHODS[method].exact_from == 1


def parameters(method: str) -> frozenset[str]:
    """The names of all arguments of a method's module."""
    return frozenset(METHODS[method].option_names())


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
    given = tuple((name, _hashable(kwargs.pop(name))) for name in settings.names if name in kwargs)
    refuse(settings, query, key, attention_mask, kwargs)
    budget = check_given(settings, given) if given else settings.budget
    reason = why_exact(settings, budget, module, query, key, attention_mask, is_causal, kwargs)
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
    place = prepare(settings, given, query.shape[-1], scaling, layer, module.training)
    method = getattr(_modules, place)
    masks = {"key_mask": mask, "query_mask": None if attends_elsewhere(module, query, key) else mask}
    groups = query.shape[1] // key.shape[1]
    # one call for each query head of a group: keys and values are never repeated
    outputs = [method(query[:, group::groups], key, value, **masks) for group in range(groups)]
    output = outputs[0] if groups == 1 else torch.stack(outputs, 2).flatten(1, 2)  # (b, h, n, p_v)
    return output.transpose(1, 2).contiguous(), None


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
    # True and 1, or 8 and 8.0, are equal, but not as options
    arguments = (settings, given, tuple(type(value) for _, value in given), head_dim, scale, layer, training)
    if arguments not in _names:
        module = make(settings, given, head_dim, scale, layer).train(training)
        while len(_names) >= MODULES:
            delattr(_modules, _names.pop(next(iter(_names))))
        _names[arguments] = f"module_{next(_numbers)}"
        setattr(_modules, _names[arguments], module)
    return _names[arguments]


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def check_given(settings: Settings, given: Given) -> int:
    """The number of samples of a call with such options, or an error that names the one that is wrong."""
    for name, value in given:
        try:
            hash(value)
        except TypeError:
            raise TypeError(f"{name} must be a single value, got {value!r} of type {type(value).__name__}") from None
    prepare(settings, given, 8, None, 0, False)
    return index(dict(given).get("budget", settings.budget))


def make(
    settings: Settings,
    given: Given = (),
    head_dim: int = 8,
    scale: float | None = None,
    layer: int = 0,
) -> Attention:
    """The method as a module, with the options of a call before those that were registered."""
    options = {"budget": settings.budget, "seed": settings.seed, **dict(settings.options), **dict(given)}
    budget, seed = options.pop("budget"), options.pop("seed")
    check_count("budget", budget)
    if "scale" in parameters(settings.method):
        options["scale"] = scale
    if isinstance(seed, int) and not isinstance(seed, bool):
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


announce()
