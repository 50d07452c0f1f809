"""Which layers of a Hugging Face model are sketched, which take transformers' exact kernel, and what is refused.

The rules of `skeinformer.huggingface`; docs/drop-in-hf.md has them as a table.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

from skeinformer.huggingface.settings import LayerSettings
from skeinformer.huggingface.stack import refuse_eager
from skeinformer.kernels.choice import recorded
from skeinformer.nn import decision
from skeinformer.nn.decision import AskedSizes
from skeinformer.nn.kept import constant_of_a_graph
from skeinformer.registry import check_options

# arguments that a model hands to its attention and that do not change what attention computes; what is neither here nor
# among those that `refuse_call` and `why_layer_is_exact` look at is refused, as one of UNKNOWN_TO_SDPA would be
HARMLESS = {
    # of the call of a model, which many hand on as they are
    *("input_ids", "inputs_embeds", "position_ids", "token_type_ids", "special_tokens_mask", "labels"),
    *("decoder_input_ids", "decoder_inputs_embeds", "decoder_position_ids", "decoder_attention_mask"),
    *("encoder_outputs", "past_key_values", "cache_position", "cache_params", "use_cache", "logits_to_keep"),
    *("num_items_in_batch", "return_dict", "output_hidden_states", "output_router_logits"),
    # used before attention, or by other kernels for their speed
    *("position_embeddings", "deterministic", "max_length_q", "max_length_k"),
}
CAUSAL, BY_CHOICE = "causal", "exact by the verdict"
LOOKED_AT = {"position_bias", "sliding_window", "output_attentions"}
# arguments that change the result and that sdpa would ignore or refuse
UNKNOWN_TO_SDPA = {
    "softcap": "a cap on the scores",
    "s_aux": "attention sinks",
    "cache": "a paged cache",
    "cu_seq_lens_q": "packed sequences",
    "cu_seq_lens_k": "packed sequences",
    "seq_idx": "packed sequences",
    "indices": "the keys that each query sees",
    "block_indices": "the blocks of keys that each query sees",
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


def padding_mask(
    *,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **options: Any,
) -> Tensor | None:
    """The mask of a bidirectional layer, (b, 1, 1, n_k), True = real; for any other pattern what `sdpa` would get.

    Both are what `sdpa` takes, so that a layer of the model that is set to it is right too. O(n) where a layer will be
    sketched. A pattern (causal, a window, packed sequences) has a row for each query, or None where the kernel's own
    causal mask does. So is the mask of a model that asks for all of it, to change it. A layer that is set to `eager`
    raises: none of these is for it.
    """
    refuse_eager(options.get("config"))
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, expected two dimensions, (batch, keys), or four"
        )
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip and not use_vmap:
        if attention_mask is None:
            return None
        if kv_offset == 0 and attention_mask.shape == (attention_mask.shape[0], kv_length):
            return attention_mask.bool()[:, None, None]
    options |= {"kv_length": kv_length, "kv_offset": kv_offset, "use_vmap": use_vmap, "attention_mask": attention_mask}
    options["allow_is_bidirectional_skip"] = allow_is_bidirectional_skip
    if mask_function is not None:
        options["mask_function"] = mask_function
    return sdpa_mask(**options)


def refuse_call(
    settings: LayerSettings, query: Tensor, key: Tensor, attention_mask: Tensor | None, kwargs: Mapping[str, Any]
) -> None:
    """Raise a ValueError for what neither a sketch nor transformers' exact kernel computes."""
    name = settings.name
    for argument, value in kwargs.items():
        if value is None or argument in HARMLESS or argument in LOOKED_AT:
            continue
        if meaning := UNKNOWN_TO_SDPA.get(argument):
            raise ValueError(f"attn_implementation={name!r} does not know {argument} ({meaning}); use 'eager'")
        try:
            check_options(f"{settings.method!r}", [argument], sorted(settings.option_names))
        except TypeError as error:
            raise ValueError(
                f"attn_implementation={name!r} does not know the argument {argument!r}, which may change what "
                f"attention computes; leave it out, or use 'sdpa'. {error}"
            ) from None
    if kwargs.get("output_attentions"):
        raise ValueError(f"attn_implementation={name!r} forms no attention weights to return; use 'eager' for them")
    window = kwargs.get("sliding_window")
    if attention_mask is None:
        if window is not None and window < key.shape[-2]:
            raise ValueError(f"a layer has a window of {window} keys, but no mask that limits it to them; use 'sdpa'")
        return
    expected = (query.shape[0], key.shape[-2])
    if attention_mask.dim() != 4 and (attention_mask.shape != expected or attention_mask.is_floating_point()):
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)} and dtype {attention_mask.dtype}; expected a "
            f"boolean mask of shape {expected} = (batch, keys), True = real, or one of four dimensions for 'sdpa'"
        )
    rows = attention_mask.dim() == 4 and (query.shape[-2] == 1 or as_padding(attention_mask) is None)
    if window is not None and not rows:
        raise ValueError(f"a layer has a window of {window} keys, but its mask covers only padding; use 'sdpa'")


def why_layer_is_exact(
    settings: LayerSettings,
    sizes: AskedSizes,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    is_causal: bool | None,
    kwargs: Mapping[str, Any],
) -> str | None:
    """Why a layer takes the exact kernel, or None where it is sketched. The first that holds, in this order.

    sizes: those of the call.
    """
    if settings.row.exact_from == 0:
        return BY_CHOICE
    # as transformers has it: a layer that does not say is causal
    if getattr(module, "is_causal", True) if is_causal is None else is_causal:
        return CAUSAL
    if kwargs.get("position_bias") is not None:
        return "position bias"
    if kwargs.get("sliding_window") is not None:
        return "sliding window"
    if attention_mask is not None and as_padding(attention_mask) is None:
        return "mask is more than padding"
    if query.shape[-2] == 1 and settings.group is None:
        return "one query"
    crosses = is_cross_attention(module, query, key)
    if crosses is not False:
        if not settings.row.cross_attention:
            return "cross-attention"
        if in_decoder(module, crosses) and not settings.decoder_cross_attention:
            return "cross-attention of a decoder"
    if settings.group is not None:
        return None  # how many tokens there are, other ranks know
    (n, p), n_k, device = query.shape[-2:], key.shape[-2], query.device.type
    gradients = module.training or recorded(query, key)
    budget, num_pilots, gradient = sizes
    numbers = (n, n_k, budget, num_pilots, p)
    return decision.why_exact(settings.min_length, *numbers, gradients, settings.method, device, gradient)


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
    """Whether the keys may be of another sequence than the queries: then the mask says nothing about queries."""
    return is_cross_attention(module, query, key) is not False


def is_cross_attention(module: nn.Module, query: Tensor, key: Tensor) -> bool | None:
    """Whether the keys are of another sequence, by their numbers or by what the module says of itself.

    None where its forward takes another sequence and nothing says whether it was given one.
    """
    if query.shape[-2] != key.shape[-2]:
        return True
    if hasattr(module, "is_cross_attention"):
        return bool(module.is_cross_attention)
    if "Cross" in type(module).__name__:
        return True
    if hasattr(module, "is_decoder"):  # what is not causal in a decoder attends to the encoder
        return bool(module.is_decoder)
    return None if takes_another_sequence(type(module)) else False


def in_decoder(module: nn.Module, crosses: bool | None) -> bool:
    """Whether the module may be part of a decoder, whose queries must not see later ones.

    Cross-attention is, unless the module says that it is not: a config need not name a decoder as one (GPT-2).
    """
    if hasattr(module, "is_decoder"):
        return bool(module.is_decoder)
    config = getattr(module, "config", None)
    return bool(crosses or getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False))


@constant_of_a_graph
def takes_another_sequence(kind: type[nn.Module]) -> bool:
    """Whether the forward of such a module has an argument for another sequence."""
    return not OTHER_SEQUENCE.isdisjoint(inspect.signature(kind.forward).parameters)
