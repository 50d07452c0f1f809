"""The models of transformers that are being called: each is the `self` of a method on the stack."""

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from skeinformer.nn.kept import constant_of_a_graph

# of each model that was called, what in it attends by a configuration: to look at all modules takes too long
_attending: WeakKeyDictionary[nn.Module, list[ref[nn.Module]]] = WeakKeyDictionary()
_places: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # of layers that do not know their number


def callers(frame: FrameType | None) -> Iterator[PreTrainedModel]:
    """The models in whose methods we are, the innermost first."""
    while frame is not None:
        if isinstance(found := frame.f_locals.get("self"), PreTrainedModel):
            yield found
        frame = frame.f_back


def attending(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that may attend by name: transformers chooses the attention by `module.config`."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "config", None), PreTrainedConfig):
            yield name, module


def layer_number(module: nn.Module) -> int:
    """i of a layer, by which it draws: its `layer_idx`, or its place among the modules like it in the called model."""
    own: int | None = getattr(module, "layer_idx", None)
    if own is None:
        return place_of(module) if hasattr(module, "config") else 0  # else it is no layer of a model
    return own


@constant_of_a_graph
def place_of(module: nn.Module) -> int:
    """The place among modules of one class and one configuration; outside of a model in the order of their calls."""
    if module not in _places:
        models = reversed(list(callers(inspect.currentframe())))
        holds = next((list(model.modules()) for model in models if any(module is x for x in model.modules())), None)
        known = [*_places, module] if holds is None else holds
        alike = (x for x in known if type(x) is type(module) and getattr(x, "config", None) is module.config)
        _places.update({x: i for i, x in enumerate(alike) if holds is not None or x is module})
    return _places[module]


def refuse_eager(config: Any) -> None:
    """Raise where a layer of the model that makes a mask was set to `eager`, which would add the mask as a number.

    config: by which the mask is made. A part of another kind makes its own.
    """
    if torch.compiler.is_compiling() or (model := next(callers(inspect.currentframe()), None)) is None:
        return
    if model not in _attending:
        _attending[model] = [ref(module) for _, module in attending(model)]
    for found in _attending[model]:
        module = found()
        own: Any = getattr(module, "config", None)
        if own is not config and type(own) is type(config) and own._attn_implementation == "eager":
            raise ValueError(
                f"a layer of {type(model).__name__}, a {type(module).__name__}, is set to 'eager', but the masks of "
                f"{config._attn_implementation!r} are boolean, and 'eager' would add them to the scores; set the "
                "layer to 'sdpa'"
            )
