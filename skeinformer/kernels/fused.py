"""The one call of the fused kernel: softmax(s q k^T + w) v for weighted keys, its normalizer and its gradient.

w, the log weights, are (..., m), or None where all weights are 1, so that the kernel is spared a mask of zeros. They
carry no gradient and are float32, or float64 where the query is; -inf marks an empty slot. Leading dimensions are free.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.kernels.choice import has_normalizer, statistics_dtype, takes_float32_weights


def attend(query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float) -> Tensor:
    """softmax(s q k^T + w) v, (..., n, p_v). No live slot gives 0. Time O(n m p), memory O(n p)."""
    if log_weight is not None and not takes_float32_weights(query):
        return attend(query.float(), keys.float(), values.float(), log_weight, scale).to(query.dtype)
    q, k, v, mask = _kernel_form(query, keys, values, log_weight)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return _user_form(output, query, values)


def attend_with_normalizer(
    query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend`, and log sum_j exp(s q . k_j + w_j), (..., n), without gradient and 0 where no slot is live.

    The fused CPU kernel hands the normalizer over; elsewhere the n x m scores are formed.
    """
    if not has_normalizer(query):
        return attend_unfused(query, keys, values, log_weight, scale)
    q, k, v, mask = _kernel_form(query, keys, values, log_weight)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, normalizer = kernel(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    output = _user_form(output, query, values)
    return output, normalizer.detach().reshape(output.shape[:-1])


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
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, keys, values = (_widen(x, x.shape[-1]) for x in (query, keys, values))
    gradients: tuple[Tensor, Tensor, Tensor] = kernel(
        gradient, query, keys, values, output, normalizer, 0.0, False, attn_mask=mask, scale=scale
    )
    return gradients


def row_gradients(
    queries: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """What a few rows give to keys and values, given the gradient of their output: fresh tensors.

    Queries, gradient and results are in the precision of statistics. Time O(d n p). The fused CPU kernel holds O(n p);
    elsewhere the d x n weights are formed.
    """
    dtype = statistics_dtype(keys)
    if not has_normalizer(queries):
        return _row_gradients_unfused(queries, keys, values, log_weight, gradient, scale)
    if keys.dtype != dtype:  # in half precision, in units in which sums of gradients are of moderate size
        unit = gradient.abs().amax((-2, -1), keepdim=True)
        unit = unit.where(unit > 0, 1)
        half = (queries.to(keys.dtype), keys, values, log_weight, (gradient / unit).to(keys.dtype), scale)
        d_keys, d_values = _row_gradients_fused(*half)
        return d_keys.to(dtype) * unit, d_values.to(dtype) * unit
    return _row_gradients_fused(queries, keys, values, log_weight, gradient, scale)


def _row_gradients_fused(
    queries: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    p, p_v = keys.shape[-1], values.shape[-1]
    width = max(p, p_v)
    queries, keys, values, gradient = (_widen(x, width) for x in (queries, keys, values, gradient))
    output, normalizer = attend_with_normalizer(queries, keys, values, log_weight, scale)
    _, d_keys, d_values = attend_backward(gradient, queries, keys, values, log_weight, output, normalizer, scale)
    return d_keys[..., :p], d_values[..., :p_v]


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


def _kernel_form(
    query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the fused kernels take: four dimensions, values as wide as keys, rows dense in memory."""
    width = max(query.shape[-1], values.shape[-1])
    if log_weight is not None:
        log_weight = log_weight.detach()[..., None, :]  # (..., 1, m)
    query, keys, values = (_widen(x, width) for x in (query, keys, values))
    if query.dim() == 4:
        return query, keys, values, log_weight
    if log_weight is not None:
        log_weight = log_weight.reshape(-1, 1, *log_weight.shape[-2:])
    query, keys, values = (x.reshape(-1, 1, *x.shape[-2:]) for x in (query, keys, values))  # (prod(...), 1, n, width)
    return query, keys, values, log_weight


def _user_form(output: Tensor, query: Tensor, values: Tensor) -> Tensor:
    """The leading dimensions of the query and the width of the values."""
    return output[..., : values.shape[-1]].reshape(*query.shape[:-1], -1)


def _widen(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
