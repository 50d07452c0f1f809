"""The one call of the fused kernel: softmax(s q k^T + w) v for weighted keys, its normalizer and its gradient.

w, the log weights, are (..., m), or None where all weights are 1, so that the kernel is spared a mask of zeros. They
carry no gradient and are float32, or float64 where the query is; -inf marks an empty slot. Leading dimensions are free.

The CPU's kernel takes them as a mask in any precision. Elsewhere a kernel wants a mask in the precision of the query,
and a log weight rounded to bfloat16 costs more than the rest of the sketch. So in half precision, off the CPU, keys
carry their weights:

    q' = [q, c, c, ..., 0]      k' = [k, hi, lo, ..., 0]      s c (hi + lo) = w

with hi and lo in the precision of the query. docs/devices.md says which call is made where.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from skeinformer.kernels.choice import ALIGNED, Route, first_derivative, only_plain_kernel, route_of, statistics_dtype
from skeinformer.kernels.ranges import LOWEST

LOWEST_IN_COLUMNS = -60000.0  # a stand-in for -inf in a column of keys: float16 has it
UNIT = 256.0  # c: in float16 the columns then reach log weights of -4e6 s, and are spaced by 1e-5 s
SMALLEST_SCALE = 2.0**-10  # of what a column can still carry
# never cuDNN: it takes masks in another precision than the query's, and misreads them
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class _Call(NamedTuple):
    """What a fused kernel takes: four dimensions, one width, rows dense in memory."""

    query: Tensor  # (B, h, n, width)
    keys: Tensor  # (B, h, m, width)
    values: Tensor  # (B, h, m, width)
    mask: Tensor | None  # (B, h, 1, m)
    scale: float
    empty: Tensor | None  # (..., 1), where no slot is live and the kernel does not see it by itself


def attend(query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float) -> Tensor:
    """softmax(s q k^T + w) v, (..., n, p_v). No live slot gives 0. Time O(n m p), memory O(n p)."""
    call = _kernel_form(query, keys, values, log_weight, scale, route_of(query, values, log_weight))
    return _user_form(_sdpa(call.query, call.keys, call.values, call.mask, call.scale), query, values, call)


def attend_where(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """softmax(s q k^T) v over the keys that each query sees, 0 where it sees none: (b, h, n, p), (b, h or 1, n, m)."""
    found = route_of(query, values, None)
    q, k, v = (_widen(x, found.width) for x in (query, keys, values))
    if found.infinite:
        return _sdpa(q, k, v, seen, scale)[..., : values.shape[-1]]
    mask = query.new_zeros(()).where(seen, torch.finfo(query.dtype).min / 2)  # -inf in all of a row would become NaN
    output = _sdpa(q, k, v, mask, scale)[..., : values.shape[-1]]
    return output.masked_fill(~seen.any(-1, keepdim=True), 0)


def attend_with_normalizer(
    query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend`, and log sum_j exp(s q . k_j + w_j), (..., n), without gradient and 0 where no slot is live.

    The fused kernels of CPU and CUDA hand the normalizer over; elsewhere the n x m scores are formed.
    """
    found = route_of(query, values, log_weight)
    if found.normalizer == "scores":
        return attend_unfused(query, keys, values, log_weight, scale)
    call = _kernel_form(query, keys, values, log_weight, scale, found)
    output, normalizer, *_ = _forward(call, found)
    output = _user_form(first_derivative(output), query, values, call)
    normalizer = normalizer.detach()[..., : query.shape[-2]].reshape(output.shape[:-1])
    return output, normalizer if call.empty is None else normalizer.masked_fill(call.empty, 0)


def attend_unfused(
    query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend_with_normalizer`, operation by operation: O(n m) scores in memory."""
    dtype = statistics_dtype(query)
    if log_weight is None:
        log_weight = keys.new_zeros(keys.shape[:-1], dtype=dtype)
    log_weight = log_weight.detach()
    scores = scale * (query.to(dtype) @ keys.to(dtype).mT) + log_weight[..., None, :]
    empty = (log_weight == -torch.inf).all(-1)[..., None]  # (..., 1)
    scores = scores.masked_fill(empty[..., None], 0)  # (..., n, m)
    normalizer = scores.logsumexp(-1)  # (..., n)
    output = (scores - normalizer[..., None]).exp() @ values.to(dtype)
    output = output.to(query.dtype).masked_fill(empty[..., None], 0)  # (..., n, p_v)
    return output, normalizer.detach().masked_fill(empty, 0)


def attend_backward(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weight: Tensor | None,
    output: Tensor,
    normalizer: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for query, keys and values, from those of `attend_with_normalizer`'s output. On a CPU, equal widths.

    A row whose normalizer is +inf counts as constant. The results are fresh tensors.
    """
    mask = None if log_weight is None else log_weight[..., None, :]  # (b, h, 1, m)
    query, keys, values = (_widen(x, x.shape[-1]) for x in (query, keys, values))
    return _cpu_backward(gradient, query, keys, values, mask, output, normalizer, scale)


def virtual_gradients(
    gradient: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    weight: Tensor | None,
    output: Tensor,
    normalizer: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward`; those of virtual keys and values, sums over many queries, may be wider than float16."""
    if query.dtype != torch.float16:
        return attend_backward(gradient, query, keys, values, weight, output, normalizer, scale)
    dR, q, k, v, R = (x.float() for x in (gradient, query, keys, values, output))
    d_query, d_keys, d_values = attend_backward(dR, q, k, v, weight, R, normalizer, scale)
    return d_query.to(query.dtype), d_keys, d_values


def row_gradients(
    queries: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """What a few rows give to keys and values, given the gradient of their output: fresh tensors.

    Queries, gradient and results are in the precision of statistics. Time O(d n p). The fused kernels of CPU and CUDA
    hold O(n p); elsewhere the d x n weights are formed.
    """
    dtype = statistics_dtype(keys)
    if route_of(keys, values, log_weight).normalizer == "scores":
        return _row_gradients_unfused(queries, keys, values, log_weight, gradient, scale)
    if keys.dtype == torch.float16:  # products of queries, values and sums of gradients leave its range
        keys, values = keys.float(), values.float()
    queries, gradient = queries.to(keys.dtype), gradient.to(keys.dtype)
    d_keys, d_values = _row_gradients_fused(queries, keys, values, log_weight, gradient, scale)
    return d_keys.to(dtype), d_values.to(dtype)


def _row_gradients_fused(
    queries: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    found, strides_known = route_of(queries, values, log_weight), not torch.compiler.is_compiling()
    # this is part of a backward pass, in which a compiler that asks for strides leaves autocast in a wrong state
    call = _kernel_form(queries, keys, values, log_weight, scale, found, strides_known)
    gradient = gradient if call.empty is None else gradient.masked_fill(call.empty[..., None], 0)
    gradient = _widen(gradient, found.width, strides_known).reshape(call.query.shape)
    d_keys, d_values = _backward(gradient, call, found)[1:]
    d_keys, d_values = d_keys[..., : keys.shape[-1]], d_values[..., : values.shape[-1]]
    return d_keys.reshape(keys.shape), d_values.reshape(values.shape)


def _row_gradients_unfused(
    queries: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    dtype = statistics_dtype(keys)
    queries, keys, values, gradient = (x.to(dtype) for x in (queries, keys, values, gradient))
    scores = scale * (queries @ keys.mT)  # (..., d, n)
    if log_weight is not None:
        scores = (scores + log_weight[..., None, :]).clamp(min=torch.finfo(dtype).min)
    weights = scores.softmax(-1)
    if log_weight is not None:
        weights = weights.masked_fill(log_weight[..., None, :] == -torch.inf, 0)
    of_weights = gradient @ values.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True))
    return scale * (of_scores.mT @ queries), weights.mT @ gradient


def _sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if query.device.type == "cpu" or only_plain_kernel():
        return first_derivative(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale))
    with sdpa_kernel(BACKENDS):
        return first_derivative(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale))


def _forward(call: _Call, found: Route) -> Any:
    """Output (B, h, n, width), normalizer (B, h, n or more), and what the kernel wants again for its gradient."""
    aten, (q, k, v, mask, scale, _) = torch.ops.aten, call
    if found.normalizer == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    if found.normalizer == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
    return aten._scaled_dot_product_efficient_attention(q, k, v, _as_bias(mask, q, k), True, 0.0, False, scale=scale)


def _backward(gradient: Tensor, call: _Call, found: Route) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for query, keys and values of `_forward`'s output."""
    aten, (q, k, v, mask, scale, _) = torch.ops.aten, call
    output, normalizer, *rest = _forward(call, found)
    if found.normalizer == "cpu":
        return _cpu_backward(gradient, q, k, v, mask, output, normalizer, scale)
    gradients: tuple[Tensor, Tensor, Tensor]
    if found.normalizer == "flash":
        *lengths, seed, offset, _ = rest
        kernel = aten._scaled_dot_product_flash_attention_backward
        gradients = kernel(gradient, q, k, v, output, normalizer, *lengths, 0.0, False, seed, offset, scale=scale)
        return gradients
    kernel, bias, wanted = aten._scaled_dot_product_efficient_attention_backward, _as_bias(mask, q, k), [True] * 3
    gradients = kernel(gradient, q, k, v, bias, output, normalizer, *rest, 0.0, [*wanted, False], False, scale=scale)[
        :3
    ]
    return gradients


def _cpu_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, output: Tensor, z: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    gradients: tuple[Tensor, Tensor, Tensor]
    gradients = kernel(gradient, q, k, v, output, z, 0.0, False, attn_mask=mask, scale=scale)
    return gradients


def _as_bias(mask: Tensor | None, query: Tensor, keys: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel takes it: for every query, its rows aligned in memory."""
    if mask is None:
        return None
    m = keys.shape[-2]
    return F.pad(mask, (0, -m % ALIGNED))[..., :m].expand(*query.shape[:-1], m)


def _kernel_form(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weight: Tensor | None,
    scale: float,
    found: Route,
    strides_known: bool = True,
) -> _Call:
    """What the fused kernel of the route takes."""
    mask = empty = None
    if log_weight is not None:
        mask = log_weight.detach()  # (..., m)
        if not found.infinite:  # a row of -inf alone would become NaN
            empty = (mask == -torch.inf).all(-1, keepdim=True)
            mask = mask.clamp(min=LOWEST)
    if mask is not None and found.columns:
        query, keys, scale = _with_columns(query, keys, mask, scale, found.columns)
        mask = None
    query, keys, values = (_widen(x, found.width, strides_known) for x in (query, keys, values))
    mask = None if mask is None else mask[..., None, :]  # (..., 1, m)
    if query.dim() != 4:
        query, keys, values = (_four_dimensions(x) for x in (query, keys, values))
        mask = None if mask is None else _four_dimensions(mask)
    return _Call(query, keys, values, mask, scale, empty)


def _with_columns(
    query: Tensor, keys: Tensor, log_weight: Tensor, scale: float, count: int
) -> tuple[Tensor, Tensor, float]:
    """[q, c, ...], [k, hi, ...] and the scale: q' . k' = q . k + w / s."""
    if abs(scale) < SMALLEST_SCALE:
        query, scale = query * (8 * scale), 1 / 8
    unit = UNIT if scale > 0 else -UNIT
    parts = halves_of(
        log_weight.float().div(scale * unit).clamp(min=LOWEST_IN_COLUMNS), keys.dtype, count
    )  # (..., m, count)
    return F.pad(query, (0, count), value=unit), torch.cat([keys, parts.expand(*keys.shape[:-1], -1)], -1), scale


def halves_of(x: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """x as the sum of `count` numbers of half precision: (...) -> (..., count).

    Digits are cut off as bits: of a number that is rounded and taken back a compiler keeps the original.
    """
    kept = -(1 << (24 - (8 if dtype == torch.bfloat16 else 11)))
    parts = []
    for _ in range(count):
        parts.append((x.view(torch.int32) & kept).view(torch.float32))
        x = x - parts[-1]
    return torch.stack(parts, -1).to(dtype)


def _four_dimensions(x: Tensor) -> Tensor:
    """(..., n, p) -> (B, h or 1, n, p)."""
    return x.reshape(-1, x.shape[-3] if x.dim() > 3 else 1, *x.shape[-2:])


def _user_form(output: Tensor, query: Tensor, values: Tensor, call: _Call) -> Tensor:
    """The leading dimensions of the query and the width of the values, 0 where no slot is live."""
    output = output[..., : values.shape[-1]].reshape(*query.shape[:-1], -1)
    return output if call.empty is None else output.masked_fill(call.empty[..., None], 0)


def _widen(x: Tensor, width: int, strides_known: bool = True) -> Tensor:
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if strides_known and x.stride(-1) == 1 else x.contiguous()
