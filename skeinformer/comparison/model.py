"""A model's inputs and outputs: how it is called, which rows are real, how far two outputs are apart."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.comparison.measure import Record

# arguments that are masks of an encoder, and of a decoder that reads one; whether True stands for a real token
ENCODER_MASKS = {"attention_mask": True, "src_key_padding_mask": False}
DECODER_MASKS = {"decoder_attention_mask": True, "tgt_key_padding_mask": False}
DECODER_ARGUMENTS = {"decoder_input_ids", "decoder_inputs_embeds", "tgt", *DECODER_MASKS}
# names of outputs, the first that a model returns is the main one
OUTPUTS = ("last_hidden_state", "logits", "pooler_output")


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call the model on a dict, a tuple or a single argument; a dict is copied, for models that write into it."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*(dict(x) if isinstance(x, dict) else x for x in _positional(inputs)))


def mask_of_inputs(model: nn.Module, inputs: Any, output: Any) -> Tensor | None:
    """Find which rows of the model's output are real, (b, n), in its inputs; None where they have no mask."""
    parameters, named = set(), dict(inputs) if isinstance(inputs, Mapping) else {}
    with suppress(TypeError, ValueError):  # a scripted module has no signature
        signature = inspect.signature(model.forward)
        parameters = set(signature.parameters)
        named = named or dict(signature.bind(*_positional(inputs)).arguments)
    for value in list(named.values()):  # a SentenceTransformer has all of them in one dict
        named |= value if isinstance(value, dict) else {}
    has_encoder = isinstance(output, Mapping) and output.get("encoder_last_hidden_state") is not None
    has_decoder = has_encoder or not DECODER_ARGUMENTS.isdisjoint({*named, *parameters})
    for name, real in (DECODER_MASKS if has_decoder else ENCODER_MASKS).items():
        mask = named.get(name)
        if isinstance(mask, Tensor) and mask.dim() == 2:
            return (mask != 0) == real
    return None


@contextmanager
def unchanged(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give the model and random state back as they are now, but for numbers in tensors; the context does so at once."""
    modules = list(model.modules())
    configs = [c for m in modules if hasattr(c := getattr(m, "config", None), "_attn_implementation_internal")]
    state = []
    for x in (*modules, *{id(c): c for c in configs}.values()):
        tables = {name: dict(table) for name, table in vars(x).items() if isinstance(table, dict)}
        state.append((x, type(x), dict(vars(x)), tables))  # tables: parameters, buffers, modules, hooks
    modes = [(module, module.training) for module in modules]
    devices = {x.device.index for x in (*model.parameters(), *model.buffers()) if x.device.type == "cuda"}

    def reset() -> None:
        for owner, kind, attributes, tables in state:
            if not isinstance(owner, torch.jit.ScriptModule):
                owner.__class__ = kind
                vars(owner).clear()
                vars(owner).update(attributes)
                for name, table in tables.items():
                    attributes[name].clear()
                    attributes[name].update(table)
        for module, training in modes:
            module.training = training

    try:
        with torch.random.fork_rng(devices=sorted(devices)):
            yield reset
    finally:
        reset()


def tensors_of(output: Any, logits: bool = False) -> dict[str, Tensor]:
    """Pick the floating-point tensors of an output by name; one without a name is "output", or "logits" by `logits`."""
    if isinstance(output, Mapping):
        tensors = {name: x for name, x in output.items() if _is_numbers(x)}
        return {name: tensors[name] for name in OUTPUTS if name in tensors} or dict(list(tensors.items())[:1])
    candidates = output if isinstance(output, tuple | list) else [output]
    return {"logits" if logits else "output": x for x in reversed(candidates) if _is_numbers(x)}


def compare_outputs(exact: Mapping[str, Tensor], sketched: Mapping[str, Tensor], mask: Tensor | None) -> Record:
    """Measure how far the sketched model's output is from the exact one's, over the real rows by `mask` (b, n).

    cosine: of each row of the main output, mean and least. change: of the main output, relative, Frobenius norm.
    logits_change: absolute, mean and largest. argmax_agreement: the share of rows of logits whose largest is the same.
    """
    if not exact:
        raise ValueError("the model returns no tensor of numbers to compare; wrap it in a module that returns one")
    rows = {name: (rows_of(exact[name], mask), rows_of(sketched[name], mask)) for name in exact}  # (rows, width) each
    main, (x, y) = next(iter(rows.items()))
    cosine = F.cosine_similarity(x, y, dim=-1)
    change = float((x - y).norm() / x.norm()) if x.norm() > 0 else 0.0
    record: Record = {"output": main, "cosine": float(cosine.mean()), "cosine_min": float(cosine.min())}
    record |= {"change": change, "logits_change": None, "logits_change_max": None, "argmax_agreement": None}
    if "logits" in rows:
        x, y = rows["logits"]
        moved, same = (x - y).abs(), (x.argmax(-1) == y.argmax(-1)).double()
        record |= {"logits_change": float(moved.mean()), "logits_change_max": float(moved.max())}
        record["argmax_agreement"] = float(same.mean())
    return record


def rows_of(x: Tensor, mask: Tensor | None) -> Tensor:
    """The real rows of x, (rows, width), in float64. The mask (b, n) fits x of shape (b, n, width) or (n, b, width)."""
    x = x.double()
    for real in () if mask is None or x.dim() != 3 else (mask, mask.T):
        if x.shape[:2] == real.shape:
            return x[real]
    return x[:, None] if x.dim() == 1 else x.flatten(0, -2)


def _positional(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)


def _is_numbers(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 0
