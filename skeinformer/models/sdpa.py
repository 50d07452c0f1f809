"""`scaled_dot_product_attention`: torch's function, computed by a sketch where that is faster.

`read_call` brings tensors and mask into the form of a `Call`, the policy computes it, and `match_layout` gives the
result torch's shape and strides. A call that cannot be sketched goes to torch with its original arguments.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.inputs import DTYPES
from skeinformer.kernels.choice import forbid_double_backward, needs_grad, suppress_sdpa_mode
from skeinformer.models import policy as reasons
from skeinformer.models.policy import Call, Certified, MinLength, Policy, notify_observer, padding_mask, shared_policy


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    method: str | None = None,
    budget: int | None = None,
    tolerance: float | None = None,
    min_length: MinLength = "auto",
    seed: int | None = 0,
    **options: Any,
) -> Tensor:
    """Compute `torch.nn.functional.scaled_dot_product_attention` by a method of METHODS, where that is faster.

    Torch computes the call where it is causal, where its mask is more than padding, where there is one query or no more
    keys than the budget, where tensors are not of one dtype and one batch, and where the sketch would be slower. The
    result has torch's shape, dtype and strides. Inside `torch.utils.checkpoint.checkpoint` use `use_reentrant=False`.

    Args:
        query, key, value: (b, ..., h, n, p), (b, ..., h, n_k, p), (b, ..., h, n_k, p_v), or (b, n, p) for one head.
        attn_mask: As in torch, or (b, n_k), True = real; where b is n or 1, that shape is read as torch's (n, n_k).
        dropout_p: Applied where the call is exact. A sketch ignores it, with a warning.
        is_causal, scale, enable_gqa: As in torch.
        method: A name of METHODS; "cluster" where there is no tolerance.
        budget: The sketch size d; None is the method's default.
        tolerance: The relative error that each head may have, instead of a method and its budget: a head gets the
            cheapest cluster sketch that keeps it, or exact attention.
        min_length: Calls with fewer queries or keys are exact; "auto" are those that a sketch would not speed up.
        seed: Equal calls give equal results; None draws afresh, as do calls that autograd records.
        **options: Those of the method.

    Returns:
        (b, ..., h, n, p_v), or (b, n, p_v) for one head.

    Raises:
        ValueError, TypeError: An unknown method or option, a method that needs parameters, or a wrong value.

    Example:
        >>> output = scaled_dot_product_attention(query, key, value, budget=64)
    """
    arguments = {"method": method, "budget": budget, "tolerance": tolerance, "min_length": min_length, "seed": seed}
    policy = policy_of_calls(**arguments, **options)
    if attn_mask is not None and is_batch_of_keys(attn_mask, query, key):
        attn_mask = attn_mask.reshape(query.shape[0], *(1,) * (query.dim() - 2), -1)  # (b, 1, .., 1, n_k)
    return attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, policy=policy)[0]


def policy_of_calls(**arguments: Any) -> Policy:
    """Return the policy with these arguments; calls of SDPA cannot be divided among ranks, as some stay exact."""
    if arguments.get("group") is not None:
        raise TypeError("calls of SDPA take no group; pass it to cluster_attention, convert or huggingface.register")
    return shared_policy(tuple(arguments.items()))


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    policy: Policy,
    call_index: int = 0,
    certify: bool = False,
) -> tuple[Tensor, str | None, Certified | None]:
    """Return the output of a call, the reason why the policy makes it exact, and by `certify` its error.

    The reason is None for a sketched call, and also for a call that is exact only because it is observed.
    """
    call = Call(query, key, value, scale=scale, dropout=dropout_p, number=call_index)
    call, reason = read_call(policy, call, attn_mask, is_causal, enable_gqa)
    if notify_observer(call, reason, call_index) or reason is not None:
        options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
        with suppress_sdpa_mode():  # a scope around this call does not see it again
            output = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        # torch's fused kernels have no second derivative: a caller that asks for it then gets a clear error
        return forbid_double_backward(output), reason, None
    output, certified = policy.certify(call) if certify else (policy.attend(call), None)
    if certified is not None:
        heads = query.shape[-3] if query.dim() > 3 else 1
        certified = certified._replace(
            error=certified.error.reshape(-1, heads), upper=certified.upper.reshape(-1, heads)
        )
    return match_layout(output, query, key, value, attn_mask), None, certified


def read_call(
    policy: Policy, call: Call, attn_mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> tuple[Call, str | None]:
    """Bring a call with torch's shapes and mask into the form of `Call`, and return it with the reason to be exact."""
    if policy.is_exact:
        return call, reasons.EXACT_METHOD
    if is_causal:
        return call, reasons.CAUSAL
    if reason := unsupported_inputs(policy, *call[:3], enable_gqa):
        return call, reason
    # a function has no training mode: where autograd records it, but a program that is exported is for inference
    call = call._replace(training=needs_grad(*call[:3]) and not torch.compiler.is_exporting())
    if reason := policy.reason_exact(call):
        return call, reason
    if attn_mask is not None and attn_mask.dim() > call.query.dim():
        return call, "the mask has more dimensions than the query"
    call, mask = with_four_dims(call, attn_mask)
    key_mask, reason = padding_mask(mask, call.query, call.key)  # last, because it may read numbers
    if mask is not None and reason == reasons.DIFFERS_BY_HEAD:
        call, mask = fold_heads(call, mask)
        key_mask, reason = padding_mask(mask, call.query, call.key)
    # the call does not say which queries are padding; methods for one sequence take the mask for both
    query_mask = None if policy.cross_attention else key_mask
    return call._replace(key_mask=key_mask, query_mask=query_mask), reason


def unsupported_inputs(policy: Policy, query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    """Return why such tensors go to torch, which may raise for them, or None where a sketch can take them."""
    if not all(isinstance(x, Tensor) and not x.is_nested and x.layout == torch.strided for x in (query, key, value)):
        return "nested or sparse tensors"
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        return "tensors of several dtypes, or of one that is not floating"
    if not query.device == key.device == value.device:
        return "tensors of several devices"
    if not query.dim() == key.dim() == value.dim():
        return "query, key and value differ in their number of dimensions"
    if query.dim() < 3:
        return "two dimensions, without a batch: pass (1, n, p)"
    if 0 in (*query.shape, *key.shape, *value.shape) or query.shape[-1] != key.shape[-1]:
        return "tensors without elements, or queries and keys of several widths"
    if key.shape[-2] != value.shape[-2]:
        return "keys and values differ in their number of tokens"
    lead = -3 if enable_gqa and query.dim() >= 4 else -2  # the dimensions before it are alike
    if query.shape[:lead] != key.shape[:lead] or key.shape[:-2] != value.shape[:-2]:
        return "keys or values are broadcast over examples or heads: expand them, or use enable_gqa=True"
    if lead == -3 and query.shape[-3] % key.shape[-3]:
        return "the number of query heads is no multiple of that of key heads"
    if query.shape[-2] != key.shape[-2] and not policy.cross_attention:
        return f"{policy.method} takes as many queries as keys"
    return None


def is_batch_of_keys(attn_mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Return whether a mask is (b, n_k), and cannot be torch's (n, n_k) or (1, n_k)."""
    b, n = query.shape[0], query.shape[-2]
    return query.dim() > 2 and tuple(attn_mask.shape) == (b, key.shape[-2]) and b not in (1, n)


def with_four_dims(call: Call, attn_mask: Tensor | None) -> tuple[Call, Tensor | None]:
    """Reshape (..., h, n, p) to (b, h, n, p) and (b, n, p) to (b, 1, n, p), and the mask likewise."""
    dims, lead = call.query.dim(), call.query.shape[:-3]
    if dims == 4:
        return call, attn_mask
    if attn_mask is not None:
        attn_mask = attn_mask.reshape(*(1,) * (dims - attn_mask.dim()), *attn_mask.shape)
        attn_mask = attn_mask[:, None] if dims == 3 else attn_mask.expand(*lead, -1, -1, -1).flatten(0, -4)
    query, key, value = (x[:, None] if dims == 3 else x.reshape(-1, *x.shape[-3:]) for x in call[:3])
    return call._replace(query=query, key=key, value=value), attn_mask


def fold_heads(call: Call, attn_mask: Tensor) -> tuple[Call, Tensor]:
    """Make every head an example of its own, for a mask (b, h, n, n_k) that differs between heads but not queries."""
    query, key, value = call[:3]
    groups = query.shape[1] // key.shape[1]
    key, value = (x if groups == 1 else x.repeat_interleave(groups, 1) for x in (key, value))
    mask = attn_mask[..., :1, :].expand(*query.shape[:2], -1, -1)  # (b, h, 1, n_k)
    query, key, value, mask = (x.reshape(-1, 1, *x.shape[-2:]) for x in (query, key, value, mask))  # (b h, 1, ..)
    return call._replace(query=query, key=key, value=value), mask


def match_layout(output: Tensor, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Return the output with torch's shape and strides: its fused kernels lay it out like the query."""
    width = output.shape[-1]
    output = output.reshape(*query.shape[:-1], width)
    fused = query.dim() == 4 and width == query.shape[-1] and (attn_mask is None or attn_mask.dim() != 3)
    if not fused or not all(x.stride(-1) == 1 for x in (query, key, value)):
        return output.contiguous()
    if output.stride() == query.stride():
        return output
    like = torch.empty_like(query, dtype=output.dtype)
    return output if output.stride() == like.stride() else like.copy_(output)
