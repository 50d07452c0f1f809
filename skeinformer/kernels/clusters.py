"""Nearest centers and sums over clusters."""

import math

import torch
from torch import Tensor

from skeinformer.kernels.choice import fast_form
from skeinformer.kernels.pilots import CACHED, PIECE
from skeinformer.kernels.rows import add_rows_, batches, gather_rows, is_one_batch, pieces

HEADS = 4  # heads at a time for each thread, which then keeps to its own part of the memory
FEWEST_KEYS = 64  # of each head at a time
LARGE = 1e30  # turns a difference of scores into more than the number of a cluster


def first_of_all_scores(keys: Tensor, direction: Tensor, offset: Tensor) -> Tensor:
    """argmax_c k . direction_c + offset_c from all n x d scores."""
    return (keys @ direction.mT + offset[..., None, :]).argmax(-1)


@fast_form(first_of_all_scores)
def first_of_largest(keys: Tensor, direction: Tensor, offset: Tensor) -> Tensor:
    """argmax_c k . direction_c + offset_c: (..., n, p), (..., d, p), (..., d) -> (..., n).

    By pieces of the keys whose scores stay in the cache, and without the slow argmax: less the largest score and times
    a large number, all but the largest are far below zero, and the largest of that plus the number of the center is
    the number wanted.
    """
    if keys.dim() == 4 and not is_one_batch(keys):  # one example after the other: keys need not be copied
        return torch.stack([first_of_largest(keys[i], direction[i], offset[i]) for i in range(len(keys))])
    *batch, n, width = keys.shape
    d = direction.shape[-2]
    keys, direction, offset = keys.reshape(-1, n, width), direction.reshape(-1, d, width), offset.reshape(-1, d, 1)
    last = torch.arange(d - 1, -1, -1, dtype=keys.dtype)[:, None]  # (d, 1): counted from the end, the first is largest
    found = keys.new_empty(len(keys), n)
    most = max(PIECE // (d * FEWEST_KEYS), 1)
    count = min(HEADS * torch.get_num_threads(), most, len(keys))  # heads at a time
    step = min(max(PIECE // (d * count), FEWEST_KEYS), n)  # keys of each at a time
    count = min(max(PIECE // (d * step), count), len(keys))
    held = keys.new_empty(count * d * step)  # one piece of memory: a fresh one costs more than a sum
    for i in range(0, len(keys), count):
        at = slice(i, i + count)
        for piece, result in zip(torch.split(keys[at], step, 1), torch.split(found[at], step, 1), strict=True):
            scores = held[: len(piece) * d * piece.shape[1]].view(len(piece), d, -1)  # (count, d, step)
            torch.baddbmm(offset[at], direction[at], piece.mT, out=scores)
            scores.sub_(scores.amax(1, keepdim=True))
            torch.amax(torch.add(last, scores, alpha=LARGE, out=scores), 1, out=result)
    return found.nan_to_num_().neg_().add_(d - 1).clamp_(0, d - 1).long().view(*batch, n)


def scattered_sums(x: Tensor, assignment: Tensor, d: int) -> Tensor:
    """Sums of rows over clusters, number by number."""
    zeros = x.new_zeros(*x.shape[:-2], d, x.shape[-1])
    return zeros.scatter_add(-2, assignment[..., None].expand_as(x), x)


@fast_form(scattered_sums, differentiable=True)
def cluster_sums(x: Tensor, assignment: Tensor, d: int) -> Tensor:
    """Sums of rows over clusters: (..., n, p), (..., n) -> (..., d, p)."""
    return add_rows_(x.new_zeros(*x.shape[:-2], d, x.shape[-1]), assignment, x)


def whole_weighted_sums(
    keys: Tensor, values: Tensor, weight: Tensor, assignment: Tensor, d: int, with_product: bool
) -> tuple[Tensor, Tensor | None]:
    """`weighted_sums` of all heads at once; gradients flow to keys and values."""
    dtype, width = weight.dtype, keys.shape[-1]
    values = values.to(dtype)
    both = torch.cat([keys.to(dtype), values], -1) * weight[..., None]  # (b, h, n, p + p_v)
    return cluster_sums(both, assignment, d), both[..., :width].mT @ values if with_product else None


@fast_form(whole_weighted_sums)
def weighted_sums(
    keys: Tensor, values: Tensor, weight: Tensor, assignment: Tensor, d: int, with_product: bool
) -> tuple[Tensor, Tensor | None]:
    """Sums over clusters of w_j [k_j, v_j], (b, h, d, p + p_v), and sum_j w_j k_j v_j^T, (b, h, p, p_v), if asked for.

    By pieces of heads.
    """
    dtype, width, batch = weight.dtype, keys.shape[-1], keys.shape[:-2]
    sums = weight.new_zeros(*batch, d, width + values.shape[-1])
    product = weight.new_empty(*batch, width, values.shape[-1])
    held = weight.new_empty(0)  # one piece of memory: a fresh one costs more than a sum
    for k, v, w, cluster, total, of_head in pieces(CACHED, keys, values, weight[..., None], assignment, sums, product):
        shape = (*k.shape[:-1], sums.shape[-1])
        held = held if held.numel() >= math.prod(shape) else held.new_empty(math.prod(shape))
        both = held[: math.prod(shape)].view(shape)
        torch.mul(k, w, out=both[..., :width])
        torch.mul(v, w, out=both[..., width:])
        add_rows_(total, cluster, both)
        if with_product:
            for weighted, x, result in batches(both[..., :width], v.to(dtype), of_head):
                torch.bmm(weighted.mT, x, out=result)
    return sums, product if with_product else None


def weighted_row_of_all(x: Tensor, weight: Tensor) -> Tensor:
    """`weighted_row` as one product."""
    return (weight[..., None, :] @ x.to(weight.dtype)).to(x.dtype)


@fast_form(weighted_row_of_all, differentiable=True)
def weighted_row(x: Tensor, weight: Tensor) -> Tensor:
    """sum_i weight_i x_i, summed in the precision of the weights: (..., n, p), (..., n) -> (..., 1, p).

    One example after the other where a product of all would copy x first.
    """
    wide = x.to(weight.dtype)
    if x.dim() == 4 and not is_one_batch(wide):
        return torch.stack([weight[i, ..., None, :] @ wide[i] for i in range(len(x))]).to(x.dtype)
    return weighted_row_of_all(x, weight)


def add_of_clusters_(
    total: Tensor,  # (b, h, n, p)
    of_cluster: Tensor,  # (b, h, d, p)
    assignment: Tensor,
    weight: Tensor,
    x: Tensor | None = None,  # (b, h, n, p_v)
    across: Tensor | None = None,  # (b, h, p_v, p)
) -> None:
    """total_j += w_j (of_cluster_c(j) + x_j across), in place, a few heads at a time."""
    product = [] if x is None or across is None else [x, across]
    for added, mine, cluster, w, *factors in pieces(CACHED, total, of_cluster, assignment, weight, *product):
        each = gather_rows(mine, cluster)
        if factors:
            for part, y, by in batches(each, factors[0].to(each.dtype), factors[1]):
                part.baddbmm_(y, by)
        if added.dtype == w.dtype:
            added.addcmul_(w[..., None], each)
        else:  # small weights and large sums meet in the wider precision
            added += each.mul_(w[..., None]).to(added.dtype)
