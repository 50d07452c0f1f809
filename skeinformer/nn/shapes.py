"""Tensors and masks of `scaled_dot_product_attention` as our methods take them, and the result as torch lays it out."""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.inputs import DTYPES
from skeinformer.kernels.choice import at_hand

NEVER = -1e4  # a number of an additive mask that leaves nothing of a weight

DIFFERS = "the mask differs between queries"
WEIGHS = "the mask is more than padding"
UNSEEN = "an additive mask, which is not looked at on this device or in a compiled graph"


class Four(NamedTuple):
    """Inputs of four dimensions."""

    query: Tensor  # (b, h, n, p)
    key: Tensor  # (b, h_kv, n_k, p)
    value: Tensor  # (b, h_kv, n_k, p_v)
    key_mask: Tensor | None  # (b, n_k), True = real


def unusual(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    """What is not as in plain tensors of one floating dtype, one device, one batch and fitting widths; None if all is.

    Torch computes what it takes of these, and says what is wrong with the others.
    """
    tensors = (query, key, value)
    if not all(isinstance(x, Tensor) and not x.is_nested and x.layout == torch.strided for x in tensors):
        return "nested or sparse tensors"
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return "tensors of several dtypes, or of one that is not floating"
    if not query.device == key.device == value.device:
        return "tensors of several devices"
    if not query.dim() == key.dim() == value.dim():
        return "query, key and value differ in their number of dimensions"
    if query.dim() < 3:
        return "two dimensions, without a batch: give it as (1, n, p)"
    if 0 in (*query.shape, *key.shape, *value.shape) or query.shape[-1] != key.shape[-1]:
        return "tensors without elements, or queries and keys of several widths"
    heads = -3 if enable_gqa and query.dim() >= 4 else -2
    if query.shape[:heads] != key.shape[:heads] or key.shape[:-1] != value.shape[:-1]:
        return "keys or values are broadcast over examples or heads: expand them, or use enable_gqa=True"
    if heads == -3 and query.shape[-3] % key.shape[-3]:
        return "heads of queries are no multiple of those of keys"
    return None


def padding_of(attn_mask: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor | None, str | None]:
    """The mask as (..., 1, n_k), True = real, where it only says which keys are padding; else None and the reason.

    Whether rows, and heads, are alike is looked up where that is cheap: on a CPU, outside of compiled graphs. Elsewhere
    shape and strides tell.
    """
    if attn_mask.dim() < 2 or attn_mask.dim() > query.dim() or attn_mask.requires_grad:
        return None, WEIGHS
    wanted = (*query.shape[:-1], key.shape[-2])[-attn_mask.dim() :]
    if any(size not in (1, whole) for size, whole in zip(attn_mask.shape, wanted, strict=True)):
        return None, WEIGHS  # it does not fit: torch says so
    mask = attn_mask[..., :1, :]
    has_rows = attn_mask.shape[-2] != 1 and attn_mask.stride(-2) != 0
    if has_rows and not (at_hand(attn_mask) and bool((attn_mask == mask).all())):
        return None, DIFFERS
    if mask.dim() >= 3 and query.dim() >= 4 and mask.shape[-3] != 1:  # of heads
        first = mask[..., :1, :, :]
        alike = mask.stride(-3) == 0 or (at_hand(mask) and bool((mask == first).all()))
        mask = first if alike else mask
    mask = mask.expand(*mask.shape[:-1], key.shape[-2])
    if mask.dtype == torch.bool:
        return mask, None
    if not mask.is_floating_point():
        return None, WEIGHS
    if not at_hand(attn_mask):
        return None, UNSEEN
    real = mask == 0
    if not bool((real | (mask <= NEVER)).all()):
        return None, WEIGHS
    # where all keys are masked by finite numbers, their weights are those without a mask
    alone = ~real.any(-1, keepdim=True)
    return (None, WEIGHS) if bool((alone & (mask > -torch.inf)).any()) else (real, None)


def to_four(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Four:
    """(..., h, n, p) as (b, h, n, p), (b, n, p) as (b, 1, n, p), and a mask (..., 1, n_k) as (b, n_k).

    A mask that may differ between heads makes each head an example of its own.
    """
    if query.dim() == 3:
        query, key, value = (x[:, None] for x in (query, key, value))
        mask = mask[:, None] if mask is not None and mask.dim() == 3 else mask
    lead = query.shape[:-2]
    if mask is not None:
        mask = mask.reshape(*(1,) * (query.dim() - mask.dim()), *mask.shape)  # as many dimensions as the query
        if mask.shape[-3] != 1:  # of heads
            groups = query.shape[-3] // key.shape[-3]
            key, value = ((x.repeat_interleave(groups, -3) if groups > 1 else x) for x in (key, value))
            query, key, value = (x.reshape(-1, 1, *x.shape[-2:]) for x in (query, key, value))
            return Four(query, key, value, mask[..., 0, :].expand(*lead, -1).reshape(query.shape[0], -1))
        mask = mask[..., 0, 0, :].expand(*lead[:-1], -1)  # (..., n_k)
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
    return Four(query, key, value, None if mask is None else mask.reshape(query.shape[0], -1))


def as_torch(output: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """The output of four dimensions in the shape of the query, and in memory as torch's kernels leave it.

    The fused kernels lay it out like the query; what they do not take comes out contiguous.
    """
    width = output.shape[-1]
    output = output.reshape(*query.shape[:-1], width)
    fused = query.dim() == 4 and width == query.shape[-1] and (attn_mask is None or attn_mask.dim() != 3)
    if not fused or not all(x.stride(-1) == 1 for x in (query, key, value)):
        return output.contiguous()
    if output.stride() == query.stride():
        return output
    like = torch.empty_like(query, dtype=output.dtype)
    return output if output.stride() == like.stride() else like.copy_(output)
