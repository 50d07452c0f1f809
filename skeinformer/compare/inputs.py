"""What a model is called with: its arguments by name, which rows of its output are real, and its random numbers."""

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

# arguments that say which tokens are real, and whether by True; of an encoder, and of a decoder that reads one
ENCODER = (("attention_mask", True), ("src_key_padding_mask", False))
DECODER = (("decoder_attention_mask", True), ("tgt_key_padding_mask", False))
# arguments of a model whose output is a decoder's
OF_A_DECODER = {"decoder_input_ids", "decoder_inputs_embeds", "decoder_attention_mask", "tgt", "tgt_key_padding_mask"}


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model on a dict, a tuple or a single argument; a dict among them is a copy, for models that write into it."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*(dict(x) if isinstance(x, dict) else x for x in _positional(inputs)))


def named_inputs(model: nn.Module, inputs: Any) -> dict[str, Any]:
    """The arguments by the names that the model's forward has for them; those without one by `args`, a tuple."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    try:
        return dict(_signature(model).bind(*_positional(inputs)).arguments)
    except TypeError:  # not these arguments
        return {"args": _positional(inputs)}


def mask_of_inputs(model: nn.Module, inputs: Any, returned: Any) -> Tensor | None:
    """Which rows of what the model returns are real, (b, n), where the inputs say so; else None, which is all."""
    given = named_inputs(model, inputs)
    for x in list(given.values()):  # a SentenceTransformer has all of them in one
        given |= x if isinstance(x, dict) else {}
    known = {*given, *_signature(model).parameters}
    decodes = not OF_A_DECODER.isdisjoint(known) or (
        isinstance(returned, Mapping) and returned.get("encoder_last_hidden_state") is not None
    )
    for name, real in DECODER if decodes else ENCODER:
        found = given.get(name)
        if isinstance(found, Tensor) and found.dim() == 2:
            return (found != 0) == real
    return None


def warn_of_padding(model: nn.Module, inputs: Any, output: Tensor) -> None:
    """Warn where an argument that is no mask by its name tells the rows of the output (b, n, width) apart."""
    shapes = (output.shape[:2], output.shape[:2][::-1]) if output.dim() == 3 else ()
    names = {name for name, _ in (*ENCODER, *DECODER)}
    for name, x in named_inputs(model, inputs).items():
        for y in x if isinstance(x, tuple | list) else (x,):
            if name not in names and isinstance(y, Tensor) and y.shape in shapes and _is_mask(y, name == "args"):
                warnings.warn(
                    f"the input {name!r} looks like a mask of padding, but all rows of the output are compared. Give "
                    "mask=, of shape (b, n) with True = real, to leave rows out, or all True if none is padding",
                    stacklevel=4,
                )


@contextmanager
def seeded(devices: Iterable[torch.device], seed: int) -> Iterator[None]:
    """Set torch's own generators of the processor and of these devices, of no others; afterwards they are as before."""
    generators = [_generator(device) for device in dict.fromkeys((torch.device("cpu"), *devices))]
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def _signature(model: nn.Module) -> inspect.Signature:
    """Of the model's forward; an empty one where it has none, as scripted modules."""
    try:
        return inspect.signature(model.forward)
    except (TypeError, ValueError):
        return inspect.Signature()


def _positional(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _is_mask(x: Tensor, unnamed: bool) -> bool:
    """Whether x has two values, boolean ones; 0 and 1 where not even its name is known."""
    if x.dtype != torch.bool and not (unnamed and not x.is_floating_point() and bool(((x == 0) | (x == 1)).all())):
        return False
    return bool((x != x[0, 0]).any())


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    module = torch.get_device_module(device)
    found: torch.Generator = module.default_generators[device.index]
    return found
