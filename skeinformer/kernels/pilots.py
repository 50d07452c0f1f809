"""A few exact rows over many keys, and what they give to each column: scores that stay in the cache."""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.choice import fast_form, statistics_dtype
from skeinformer.kernels.fused import attend_with_normalizer
from skeinformer.kernels.ranges import LOWEST
from skeinformer.kernels.rows import is_one_batch

CACHED = 2**19  # scores that are worked on at a time
PIECE = CACHED // 2  # likewise distances, and weights of rows: fresh memory takes longer than the products
HELD = 2**21  # scores that may be held at a time
FAINT = 1e-30  # a sum of squares below has lost digits, or all


class Formed(NamedTuple):
    """Exact rows b_J, and what they give to the columns where that came with them."""

    output: Tensor  # (..., P, p_v), B_J V
    normalizer: Tensor  # (..., P), log of the row sums of A
    log_square: Tensor | None = None  # (..., n), log sum_J b_ji^2 over live rows, less that of the weights
    mass: Tensor | None = None  # (..., n), mean_J b_ji over live rows


def rows_in_kernel(
    queries: Tensor,  # (..., P, p)
    keys: Tensor,
    values: Tensor,
    live: Tensor,  # (..., P)
    log_weight: Tensor | None,
    scale: float,
    with_mass: bool,
) -> Formed:
    """The rows by the fused kernel, which never forms them: the columns' sums have to be computed apart."""
    return Formed(*attend_with_normalizer(queries, keys, values, log_weight, scale))


@fast_form(rows_in_kernel, half=False)
def form_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    live: Tensor,
    log_weight: Tensor | None,
    scale: float,
    with_mass: bool,
) -> Formed:
    """Each score is computed once, for the output, for the squares and for the mass if that is asked for.

    Where the rows of a head do not fit into the cache they stay in the kernel. The squares are None where they are too
    small for their precision.
    """
    if queries.shape[-2] * keys.shape[-2] > HELD:
        return rows_in_kernel(queries, keys, values, live, log_weight, scale, with_mass)
    return _form_rows(queries, keys, values, live, log_weight, scale, with_mass)


def _form_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    live: Tensor,
    log_weight: Tensor | None,
    scale: float,
    with_mass: bool,
) -> Formed:
    """A few heads at a time, one per thread or more, in one piece of memory: a fresh one costs more than a sum."""
    if queries.dim() == 4 and not (is_one_batch(keys) and is_one_batch(values)):
        # one example after the other: keys and values need not be copied into one batch
        weights = [None] * len(queries) if log_weight is None else list(log_weight)
        examples = zip(queries, keys, values, live, weights, strict=True)
        return _stack([_form_rows(*example, scale, with_mass) for example in examples])
    *batch, num_rows, width = queries.shape
    m, p_v = values.shape[-2:]
    queries = queries.reshape(-1, num_rows, width) * scale  # (B, P, p)
    keys, values, live = keys.reshape(-1, m, width), values.reshape(-1, m, p_v), live.reshape(-1, num_rows, 1)
    log_weight = None if log_weight is None else log_weight.reshape(-1, 1, m)
    output = values.new_empty(len(queries), num_rows, p_v)
    normalizer = values.new_empty(len(queries), num_rows, 1)
    squares = values.new_empty(len(queries), 1, m)
    mass = values.new_empty(len(queries), 1, m) if with_mass else None
    heads = min(max(CACHED // (num_rows * m), torch.get_num_threads()), 8 * HELD // (num_rows * m), len(queries))
    held = values.new_empty(heads, num_rows, m)
    for i in range(0, len(queries), heads):
        at = slice(i, i + heads)
        scores = torch.bmm(queries[at], keys[at].mT, out=held[: len(queries) - i])  # (heads, P, m)
        if log_weight is not None:
            scores += log_weight[at]
        largest = scores.amax(-1, keepdim=True)  # (heads, P, 1)
        if log_weight is not None:
            largest.clamp_(min=LOWEST)
        row_sum = scores.sub_(largest).exp_().sum(-1, keepdim=True)
        if log_weight is not None:
            largest.masked_fill_(row_sum == 0, 0)  # nothing is live: an output of 0 and a normalizer of 0
            row_sum.masked_fill_(row_sum == 0, 1)
        torch.bmm(scores, values[at], out=output[at]).div_(row_sum)
        torch.add(largest, row_sum.log(), out=normalizer[at])
        inverse = row_sum.reciprocal_().mul_(live[at])
        if mass is not None:
            torch.bmm(inverse.mT, scores, out=mass[at])
        torch.bmm(inverse.square_().mT, scores.square_(), out=squares[at])
    faint = squares < FAINT if log_weight is None else (squares < FAINT) & (log_weight > -torch.inf)
    log_square = None if bool(faint.any()) else squares.log_()
    if log_square is not None and log_weight is not None:
        log_square -= 2 * log_weight.where(log_weight > -torch.inf, 0)
    log_square = None if log_square is None else log_square.view(*batch, m)
    mass = None if mass is None else mass.div_(live.sum(-2, keepdim=True).clamp(min=1)).view(*batch, m)
    return Formed(output.view(*batch, num_rows, p_v), normalizer.view(*batch, num_rows), log_square, mass)


def _stack(parts: list[Formed]) -> Formed:
    """What was formed of each example; a field that one of them lacks is None."""
    fields = ([x for x in of_all if x is not None] for of_all in zip(*parts, strict=True))
    output, normalizer, log_square, mass = (torch.stack(x) if len(x) == len(parts) else None for x in fields)
    assert output is not None
    assert normalizer is not None
    return Formed(output, normalizer, log_square, mass)


def column_sums_in_kernel(keys: Tensor, queries: Tensor, log_weight: Tensor, scale: float) -> Tensor:
    """The normalizer of attention the other way round: keys ask, the queries answer. A product too many is computed."""
    return attend_with_normalizer(keys, queries, queries, log_weight, scale)[1]


@fast_form(column_sums_in_kernel)
def log_column_sums(keys: Tensor, queries: Tensor, log_weight: Tensor, scale: float) -> Tensor:
    """log sum_J exp(s q_J . k_i + w_J) for every key: (..., n, p), (..., P, p), (..., P) -> (..., n).

    By pieces of the keys whose scores stay in the cache.
    """
    dtype = statistics_dtype(keys)
    *batch, num_rows, width = queries.shape
    queries = queries.to(dtype).reshape(-1, num_rows, width) * scale  # (B, P, p)
    log_weight = log_weight.clamp(min=LOWEST).reshape(-1, num_rows, 1)  # (B, P, 1)
    log_sum = log_weight.new_empty(len(queries), keys.shape[-2])  # (B, n)
    step = max(CACHED // (len(queries) * num_rows), 64)
    held = queries.new_empty(len(queries) * num_rows * step)  # one piece of memory: a fresh one costs more than a sum
    for piece, result in zip(torch.split(keys, step, -2), torch.split(log_sum, step, -1), strict=True):
        scores = held[: len(queries) * num_rows * piece.shape[-2]].view(len(queries), num_rows, -1)  # (B, P, step)
        piece = piece.to(dtype).reshape(len(queries), -1, width)  # (B, step, p)
        torch.bmm(queries, piece.mT, out=scores).add_(log_weight)
        largest = scores.amax(-2, keepdim=True)  # (B, 1, step)
        torch.sum(scores.sub_(largest).exp_(), -2, out=result).log_().add_(largest[:, 0])
    return log_sum.reshape(*batch, -1)
