"""The gradient of a few exact rows over the keys of all ranks, for the keys of one."""

import torch
from torch import Tensor

from skeinformer.kernels.choice import by_hand, statistics_dtype
from skeinformer.kernels.fused import attend, attend_backward, virtual_gradients


def rows_backward(
    gradient: Tensor,  # (b, h, k, p_v), of the rows' output
    queries: Tensor,  # (b, h, k, p)
    key: Tensor,  # (b, h, n, p), those of this rank
    value: Tensor,
    log_weight: Tensor | None,
    output: Tensor,  # (b, h, k, p_v), over the keys of all ranks
    normalizer: Tensor,  # (b, h, k), likewise
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys give to the queries, and what they and their values get: fresh, in the precision of statistics.

    The sum of the first over ranks is the gradient of the queries. Time O(k n p).
    """
    dtype = statistics_dtype(key)
    if not by_hand(key, value):
        return _rows_backward_unfused(gradient, queries, key, value, log_weight, output, normalizer, scale)
    if key.dtype == torch.float16:  # products of queries, values and sums of gradients leave its range
        key, value = key.float(), value.float()
    gradient, queries, output = (x.to(key.dtype) for x in (gradient, queries, output))
    d_queries, d_key, d_value = attend_backward(gradient, queries, key, value, log_weight, output, normalizer, scale)
    return d_queries.to(dtype), d_key.to(dtype), d_value.to(dtype)


def _rows_backward_unfused(
    gradient: Tensor,
    queries: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    output: Tensor,
    normalizer: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Operation by operation: the k x n weights are formed."""
    dtype = statistics_dtype(key)
    gradient, queries, key, value, output = (x.to(dtype) for x in (gradient, queries, key, value, output))
    scores = scale * (queries @ key.mT) - normalizer[..., None]  # (b, h, k, n)
    if log_weight is not None:
        scores = scores + log_weight[..., None, :]
    weights = scores.exp()
    of_scores = weights * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True))
    return scale * (of_scores @ key), scale * (of_scores.mT @ queries), weights.mT @ gradient


def virtual_backward(
    gradient: Tensor,  # (b, h, n, p_v)
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    log_weight: Tensor | None,
    output: Tensor,
    normalizer: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attention over virtual keys, from this rank's queries, in the precision of statistics."""
    dtype = statistics_dtype(query)
    if normalizer is not None:
        found = virtual_gradients(gradient, query, keys, values, log_weight, output, normalizer, scale)
        return found[0].to(dtype), found[1].to(dtype), found[2].to(dtype)
    with torch.enable_grad():
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in (query, keys, values))
        d_query, d_keys, d_values = torch.autograd.grad(
            attend(q, k, v, log_weight, scale), (q, k, v), gradient.to(dtype)
        )
    return d_query, d_keys, d_values
