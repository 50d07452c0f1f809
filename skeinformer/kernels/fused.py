"""The fused kernel: softmax(s q k^T + w) v for weighted keys, the logs of its row sums, and its gradient.

w, the log weights, are (..., m), or None where all weights are 1, so that the kernel is spared a mask of zeros. They
carry no gradient and are float32, or float64 where the query is; -inf marks an empty slot. Leading dimensions are free.

The CPU's kernel takes them as a mask in any precision. Elsewhere a mask has the precision of the query, and rounding to
bfloat16 would cost more than the rest of the sketch. So in half precision, off the CPU, keys carry their weights:

    q' = [q, c, c, ..., 0]      k' = [k, hi, lo, ..., 0]      s c (hi + lo) = w

with hi and lo in the precision of the query. docs/devices.md lists which call is chosen where.
"""

from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from skeinformer.kernels.choice import forbid_double_backward, only_math_backend, statistics_dtype
from skeinformer.kernels.rows import LOWEST

COLUMNS = {torch.bfloat16: 3, torch.float16: 2}  # that hold a float32: of 8 bits each, and of 11
ALIGNED = 8  # the kernels of CUDA take widths that are multiples of it
WIDEST = 256  # the widest keys that the flash kernel takes
LOWEST_IN_COLUMNS = -60000.0  # stands for -inf in a column of keys: float16 can hold it
WEIGHTS_AT_ONCE = 2**26  # in the backward pass off the CPU
UNIT = 256.0  # c: in float16 the columns then reach log weights of -4e6 s, and are spaced by 1e-5 s
SMALLEST_SCALE = 2.0**-10  # that a column can still carry
# never cuDNN: it takes masks in another precision than the query's, and misreads them
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Route(NamedTuple):
    """How a fused kernel is called, and which."""

    weights: Literal["none", "mask", "columns"]  # log weights as a row added to the scores, or as columns of the keys
    columns: int  # how many
    width: int  # of queries, keys and values as it gets them
    kernel: Literal["cpu", "flash", "efficient", "scores"]  # which returns the logs of row sums; "scores": none does
    infinite: bool  # takes a weight of -inf, also in all slots of a row; else a large finite number empties a slot


class _KernelInputs(NamedTuple):
    """What a fused kernel takes: four dimensions, one width, rows dense in memory."""

    query: Tensor  # (B, h, n, width)
    keys: Tensor  # (B, h, m, width)
    values: Tensor  # (B, h, m, width)
    mask: Tensor | None  # (B, h, 1, m)
    scale: float
    empty: Tensor | None  # (..., 1), where no slot is live and the kernel does not see it by itself


def route(
    device: str, dtype: torch.dtype, width: int, value_width: int, weighted: bool, *, recent: bool = True
) -> Route:
    """Choose the call for tensors on a type of device: a pure function, whose table is in docs/devices.md.

    The widths are p and p_v. weighted: whether there are log weights. recent: whether a GPU has compute capability 8
    (Ampere) or more; older ones have no flash kernel and none for bfloat16.
    """
    if device == "cpu":
        return Route("mask" if weighted else "none", 0, max(width, value_width), "cpu", True)
    columns = COLUMNS.get(dtype, 0) if weighted else 0
    weights: Literal["none", "mask", "columns"] = "none" if not weighted else "columns" if columns else "mask"
    width = max(width + columns, value_width)
    if device == "cuda":
        width = -(-width // ALIGNED) * ALIGNED
    if device != "cuda" or dtype == torch.float64 or (dtype == torch.bfloat16 and not recent):
        return Route(weights, columns, width, "scores", False)
    flash = dtype in COLUMNS and recent and width <= WIDEST
    return Route(weights, columns, width, "flash" if flash else "efficient", False)


def route_of(query: Tensor, values: Tensor, log_weight: Tensor | None) -> Route:
    """Choose the call for these tensors."""
    kind, recent = query.device.type, True
    if kind == "cuda" and torch.cuda.is_available():
        recent = torch.cuda.get_device_properties(query.device).major >= 8
    return route(kind, query.dtype, query.shape[-1], values.shape[-1], log_weight is not None, recent=recent)


def attend(query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float) -> Tensor:
    """Compute softmax(s q k^T + w) v, (..., n, p_v); 0 without a live slot. Time O(n m p), memory O(n p)."""
    call = _kernel_inputs(query, keys, values, log_weight, scale, route_of(query, values, log_weight))
    return _to_caller(_sdpa(call.query, call.keys, call.values, call.mask, call.scale), query, values, call)


def attend_where(query: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float) -> Tensor:
    """Attend over the keys that each query sees, 0 where it sees none: (b, h, n, p), seen (b, h or 1, n, m)."""
    chosen = route_of(query, values, None)
    q, k, v = (_widen(x, chosen.width) for x in (query, keys, values))
    # -inf in all of a row would become NaN
    mask = seen if chosen.infinite else query.new_zeros(()).where(seen, torch.finfo(query.dtype).min / 2)
    output = _sdpa(q, k, v, mask, scale)[..., : values.shape[-1]]
    return output if chosen.infinite else output.masked_fill(~seen.any(-1, keepdim=True), 0)


def attend_with_lse(
    query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend`, and log sum_j exp(s q . k_j + w_j), (..., n), without gradient, 0 without a live slot.

    The fused kernels of CPU and CUDA return these logs; elsewhere the n x m scores are formed.
    """
    if query.device.type == "cpu":
        return _attend_on_cpu(query, keys, values, log_weight, scale)
    chosen = route_of(query, values, log_weight)
    if chosen.kernel == "scores":
        return attend_unfused(query, keys, values, log_weight, scale)
    call = _kernel_inputs(query, keys, values, log_weight, scale, chosen)
    aten, (q, k, v, mask, s, _) = torch.ops.aten, call
    if chosen.kernel == "flash":
        output, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=s)
    else:
        if mask is not None:  # this kernel takes it for every query, with its rows aligned in memory
            mask = F.pad(mask, (0, -(m := k.shape[-2]) % ALIGNED))[..., :m].expand(*q.shape[:-1], m)
        output, lse, *_ = aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, False, scale=s)
    output = _to_caller(forbid_double_backward(output), query, values, call)
    lse = lse.detach()[..., : query.shape[-2]].reshape(output.shape[:-1])
    return output, lse if call.empty is None else lse.masked_fill(call.empty, 0)


def _attend_on_cpu(
    query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend_with_lse` by the CPU's kernel, which wants one width and takes log weights as a mask."""
    chosen = Route("mask", 0, max(query.shape[-1], values.shape[-1]), "cpu", True)
    call = _kernel_inputs(query, keys, values, log_weight, scale, chosen)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, lse = kernel(*call[:3], 0.0, False, attn_mask=call.mask, scale=scale)
    output = _to_caller(forbid_double_backward(output), query, values, call)
    return output, lse.detach().reshape(query.shape[:-1])


def attend_unfused(
    query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend_with_lse`, operation by operation: O(n m) scores in memory."""
    dtype = statistics_dtype(query)
    log_weight = keys.new_zeros(keys.shape[:-1], dtype=dtype) if log_weight is None else log_weight.detach()
    scores = scale * (query.to(dtype) @ keys.to(dtype).mT) + log_weight[..., None, :]
    empty = (log_weight == -torch.inf).all(-1)[..., None]  # (..., 1)
    scores = scores.masked_fill(empty[..., None], 0)  # (..., n, m)
    lse = scores.logsumexp(-1)  # (..., n)
    output = (scores - lse[..., None]).exp() @ values.to(dtype)
    output = output.to(query.dtype).masked_fill(empty[..., None], 0)  # (..., n, p_v)
    return output, lse.detach().masked_fill(empty, 0)


def attend_backward(
    dR: Tensor, query: Tensor, keys: Tensor, values: Tensor, w: Tensor | None, R: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, keys and values, fresh tensors, from dR, that of `attend_with_lse`'s output R.

    R and the logs of the row sums may be those over the keys of all ranks. A row whose log is +inf counts as
    constant. Sums over many tokens leave the range of float16: there, and where it is computed operation by operation,
    the gradients are float32. On a CPU by the fused kernel, elsewhere a part of the queries at a time.
    """
    p, p_v, on_cpu = query.shape[-1], values.shape[-1], query.device.type == "cpu"
    if query.dtype == torch.float16 or not on_cpu:
        dtype = statistics_dtype(query)
        dR, query, keys, values, R = (x.to(dtype) for x in (dR, query, keys, values, R))
    if not on_cpu:
        return _backward_unfused(dR, query, keys, values, w, R, lse, scale)
    dR, query, keys, values, R = (_widen(x, max(p, p_v)) for x in (dR, query, keys, values, R))
    mask = None if w is None else w[..., None, :]  # (b, h, 1, m)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    d_query, d_keys, d_values = kernel(dR, query, keys, values, R, lse, 0.0, False, attn_mask=mask, scale=scale)
    return (d_query, d_keys, d_values) if p == p_v else (d_query[..., :p], d_keys[..., :p], d_values[..., :p_v])


def _backward_unfused(
    dR: Tensor, query: Tensor, keys: Tensor, values: Tensor, w: Tensor | None, R: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`attend_backward` operation by operation, for so many queries at a time that their weights fit."""
    d_query, d_keys, d_values = (torch.zeros_like(x) for x in (query, keys, values))
    step = max(1, WEIGHTS_AT_ONCE // keys.shape[:-1].numel())
    for start in range(0, query.shape[-2], step):
        q, dr, r, z, dq = (x[..., start : start + step, :] for x in (query, dR, R, lse[..., None], d_query))
        weights = scale * (q @ keys.mT) - z  # (b, h, step, m)
        weights = (weights if w is None else weights + w[..., None, :]).exp()
        d_scores = weights * (dr @ values.mT - (dr * r).sum(-1, keepdim=True))
        dq += scale * (d_scores @ keys)
        d_keys += scale * (d_scores.mT @ q)
        d_values += weights.mT @ dr
    return d_query, d_keys, d_values


def _sdpa(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    with nullcontext() if query.device.type == "cpu" or only_math_backend() else sdpa_kernel(BACKENDS):
        return forbid_double_backward(F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale))


def _kernel_inputs(
    query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float, chosen: Route
) -> _KernelInputs:
    mask, empty = None if log_weight is None else log_weight.detach(), None  # (..., m)
    if mask is not None and not chosen.infinite:  # a row of -inf alone would become NaN
        mask, empty = mask.clamp(min=LOWEST), (mask == -torch.inf).all(-1, keepdim=True)
    if mask is not None and chosen.columns:
        query, keys, scale = _with_columns(query, keys, mask, scale, chosen.columns)
        mask = None
    query, keys, values = (_widen(x, chosen.width) for x in (query, keys, values))
    mask = None if mask is None else mask[..., None, :]  # (..., 1, m)
    if query.dim() != 4:
        query, keys, values = (_four_dimensions(x) for x in (query, keys, values))
        mask = None if mask is None else _four_dimensions(mask)
    return _KernelInputs(query, keys, values, mask, scale, empty)


def _with_columns(query: Tensor, keys: Tensor, w: Tensor, scale: float, count: int) -> tuple[Tensor, Tensor, float]:
    """Return [q, c, ...], [k, hi, ...] and the scale: q' . k' = q . k + w / s."""
    if abs(scale) < SMALLEST_SCALE:
        query, scale = query * (8 * scale), 1 / 8
    unit = UNIT if scale > 0 else -UNIT
    columns = w.float().div(scale * unit).clamp(min=LOWEST_IN_COLUMNS)
    parts = split_digits(columns, keys.dtype, count)  # (..., m, count)
    return F.pad(query, (0, count), value=unit), torch.cat([keys, parts.expand(*keys.shape[:-1], -1)], -1), scale


def split_digits(x: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """Write x as the sum of `count` numbers of half precision: (...) -> (..., count).

    Digits are cut off as bits: of a number that is rounded and cast back a compiler uses the original.
    """
    bits = -(1 << (24 - (8 if dtype == torch.bfloat16 else 11)))
    parts = []
    for _ in range(count):
        parts.append((x.view(torch.int32) & bits).view(torch.float32))
        x = x - parts[-1]
    return torch.stack(parts, -1).to(dtype)


def _four_dimensions(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-3] if x.dim() > 3 else 1, *x.shape[-2:])  # (..., n, p) -> (B, h or 1, n, p)


def _to_caller(output: Tensor, query: Tensor, values: Tensor, call: _KernelInputs) -> Tensor:
    """Return the leading dimensions of the query and the width of the values, 0 where no slot is live."""
    output = output if output.shape[-1] == values.shape[-1] else output[..., : values.shape[-1]]
    if query.dim() != 4:
        output = output.reshape(*query.shape[:-1], -1)
    return output if call.empty is None else output.masked_fill(call.empty[..., None], 0)


def _widen(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
