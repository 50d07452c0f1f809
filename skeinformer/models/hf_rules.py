"""Which layers of a Hugging Face model are sketched, exact or refused; docs/drop-in-hf.md has the rules as a table."""

import inspect
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from skeinformer.kernels.choice import constant_in_graphs
from skeinformer.models.policy import CAUSAL, EXACT_METHOD, Call, Policy, padding_mask

NAME = "skein"

# arguments of attention that do not change its result; any other one is refused, because it may
HARMLESS = {
    # arguments of the model's call, which many models hand on as they are
    *("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "special_tokens_mask", "labels"),
    *("decoder_input_ids", "decoder_inputs_embeds", "decoder_position_ids", "decoder_attention_mask"),
    *("encoder_outputs", "past_key_values", "cache_position", "cache_params", "use_cache", "logits_to_keep"),
    *("num_items_in_batch", "return_dict", "output_hidden_states", "output_router_logits"),
    # used before attention, or by other kernels for their speed
    *("position_embeddings", "deterministic", "max_length_q", "max_length_k"),
}
UNDERSTOOD = {"position_bias", "sliding_window", "output_attentions"}  # by `check_call` and `read_layer`
# arguments of an attention module's forward by which it attends to another sequence
OTHER_SEQUENCE = {"key_value_states", "encoder_hidden_states", "cross_attention_states", "context", "key", "keys", "k"}


def make_mask(**options: Any) -> Tensor | None:
    """Return the mask of a bidirectional layer, (b, 1, 1, n_k), True = real; for any other pattern the mask of sdpa.

    It takes O(n) memory, that of sdpa O(n^2). A model that changes its mask asks for the whole mask, and gets it.
    """
    mask: Tensor | None = options.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        shape = tuple(mask.shape)
        raise ValueError(f"attention_mask has shape {shape}, expected two dimensions, (batch, keys), or four")
    is_bidirectional = options.get("mask_function") is bidirectional_mask_function and not options.get("use_vmap")
    fits = mask is None or (not options.get("kv_offset") and mask.shape[1] == options["kv_length"])
    can_skip = is_bidirectional and options.get("allow_is_bidirectional_skip")
    return four_dimensions(mask) if can_skip and fits else sdpa_mask(**options)


def check_call(query: Tensor, key: Tensor, attention_mask: Tensor | None, arguments: Mapping[str, Any]) -> None:
    """Raise a ValueError for what neither a sketch nor transformers' exact kernel computes."""
    mask, window, expected = attention_mask, arguments.get("sliding_window"), (query.shape[0], key.shape[-2])
    for name in {name for name, x in arguments.items() if x is not None} - HARMLESS - UNDERSTOOD:
        message = f"attn_implementation={NAME!r} does not support the argument {name!r}, which may change what"
        raise ValueError(f"{message} attention computes; leave it out, or use 'eager'")
    if arguments.get("output_attentions"):
        raise ValueError(f"attn_implementation={NAME!r} forms no attention weights to return; use 'eager' for them")
    if mask is not None and mask.dim() != 4 and (mask.shape != expected or mask.is_floating_point()):
        described = f"shape {tuple(mask.shape)} and dtype {mask.dtype}"
        raise ValueError(f"attention_mask has {described}; expected booleans of shape {expected}")
    if mask is None and window is not None and window < key.shape[-2]:
        raise ValueError(f"a layer has a window of {window} keys, but no mask that limits it to them; use 'sdpa'")
    # by shape alone: the mask of a window that reaches all keys of this batch has a row for each query too
    if mask is not None and window is not None and (mask.dim() != 4 or query.shape[-2] > 1 == mask.shape[2]):
        raise ValueError(f"a layer has a window of {window} keys, but its mask covers only padding; use 'sdpa'")


def read_layer(
    policy: Policy, module: nn.Module, call: Call, attention_mask: Tensor | None, arguments: Mapping[str, Any]
) -> tuple[Call, str | None]:
    """Return the call with its masks, and the reason why such a layer stays exact, or None."""
    if policy.is_exact:
        return call, EXACT_METHOD
    is_causal = arguments.get("is_causal")
    # as in transformers, a layer that does not say is causal
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        return call, CAUSAL
    for argument in ("position_bias", "sliding_window"):
        if arguments.get(argument) is not None:
            return call, argument.replace("_", " ")
    key_mask, reason = padding_mask(four_dimensions(attention_mask), call.query, call.key)
    if reason is not None:
        return call, reason
    crosses = is_cross_attention(module, call.query, call.key)
    call = call._replace(key_mask=key_mask, query_mask=key_mask if crosses is False else None)
    if crosses is not False and not policy.cross_attention:
        return call, "cross-attention"
    if crosses is not False and is_in_decoder(module, crosses) and not policy.decoder_cross_attention:
        return call, "cross-attention of a decoder"
    return call, policy.reason_exact(call)


def four_dimensions(attention_mask: Tensor | None) -> Tensor | None:
    """Return a mask of padding, (b, n_k), as (b, 1, 1, n_k), and any other mask unchanged."""
    if attention_mask is None or attention_mask.dim() != 2:
        return attention_mask
    return attention_mask.bool()[:, None, None]


def is_cross_attention(module: nn.Module, query: Tensor, key: Tensor) -> bool | None:
    """Return whether keys are of another sequence than queries, None where it may be and nothing says it."""
    if query.shape[-2] != key.shape[-2]:
        return True
    if hasattr(module, "is_cross_attention"):
        return bool(module.is_cross_attention)
    if "Cross" in type(module).__name__:
        return True
    if hasattr(module, "is_decoder"):  # a layer of a decoder that is not causal attends to the encoder
        return bool(module.is_decoder)
    return None if takes_another_sequence(type(module)) else False


def is_in_decoder(module: nn.Module, crosses: bool | None) -> bool:
    """Return whether the module may be part of a decoder, as cross-attention is unless it says that it is not."""
    if hasattr(module, "is_decoder"):
        return bool(module.is_decoder)
    config = getattr(module, "config", None)
    return bool(crosses or getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False))


@constant_in_graphs
def takes_another_sequence(kind: type[nn.Module]) -> bool:
    return not OTHER_SEQUENCE.isdisjoint(inspect.signature(kind.forward).parameters)


def layer_number(module: nn.Module) -> int:
    """Return the number by which a layer draws: its `layer_idx`, or its place among layers like it in the model."""
    if (number := getattr(module, "layer_idx", None)) is not None:
        return int(number)
    return _place(module) if hasattr(module, "config") else 0  # without a config it is no layer of a model


_places: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # of layers without a layer_idx


@constant_in_graphs
def _place(module: nn.Module) -> int:
    """Return the place among modules of one class and configuration; without a model, in the order of their calls."""
    if module not in _places:
        candidates, frame = [*_places, module], inspect.currentframe()
        while frame is not None:  # find the outermost model on the stack that has the module
            model = frame.f_locals.get("self")
            if isinstance(model, PreTrainedModel) and any(module is x for x in model.modules()):
                candidates = list(model.modules())
            frame = frame.f_back
        alike = [x for x in candidates if type(x) is type(module) and getattr(x, "config", None) is module.config]
        _places[module] = alike.index(module)
    return _places[module]
