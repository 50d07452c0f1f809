"""Steps of a sketch operation by operation, for devices other than a CPU; for CPUs `loops.py` has the same."""

import torch
from torch import Tensor

from skeinformer.kernels.fused import attend_with_lse


def pilot_attention(
    queries: Tensor, keys: Tensor, values: Tensor, live: Tensor | None, w: Tensor | None, scale: float, with_mass: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Exact rows b_J of attention and what they give to each key: B_J V, lse, log sum_J b_ji^2, mean_J b_ji."""
    output, lse = attend_with_lse(queries, keys, values, w, scale)
    return output, lse, *column_sums(queries, keys, lse, live, w, scale, with_mass)


def column_sums(
    queries: Tensor, keys: Tensor, lse: Tensor, live: Tensor | None, w: Tensor | None, scale: float, with_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """log sum_J b_ji^2, less the weights, and mean_J b_ji, (b, h, n): attention where keys ask, without the scores."""
    queries = queries.to(keys.dtype)
    minus_lse = -lse if live is None else (-lse).where(live, -torch.inf)  # (b, h, P)
    log_square = attend_with_lse(keys, queries, queries, 2 * minus_lse, 2 * scale)[1]
    if not with_mass:
        return log_square, None
    log_mass = attend_with_lse(keys, queries, queries, minus_lse, scale)[1]
    count = lse.new_full((), queries.shape[-2]) if live is None else live.sum(-1, keepdim=True)  # (b, h, 1)
    log_mass = log_mass if w is None else log_mass + w
    return log_square, (log_mass - count.clamp(min=1).to(lse.dtype).log()).exp().where(count > 0, 0)


def nearest_center(keys: Tensor, direction: Tensor, offset: Tensor) -> Tensor:
    """argmax_c k . direction_c - offset_c / 2: (b, h, n, p), (B, d, p), (B, d, 1) -> (b, h, n), for B = b h heads."""
    return (keys.flatten(0, 1) @ direction.mT - offset.mT / 2).argmax(-1).view(keys.shape[:-1])  # scores (B, n, d)


def cluster_sums(
    keys: Tensor, values: Tensor, weight: Tensor, assignment: Tensor, d: int, with_product: bool
) -> tuple[Tensor, Tensor | None]:
    """Sums over clusters of w_j [k_j, v_j], (B, d, p + p_v), and sum_j w_j k_j v_j^T, (B, p, p_v), if wanted."""
    keys, values, weight, assignment = (x.flatten(0, 1) for x in (keys, values, weight, assignment))
    values = values.to(weight.dtype)
    both = torch.cat([keys.to(weight.dtype), values], -1) * weight[..., None]  # (B, n, p + p_v)
    sums = both.new_zeros(len(both), d, both.shape[-1]).scatter_add_(-2, assignment[..., None].expand_as(both), both)
    return sums, both[..., : keys.shape[-1]].mT @ values if with_product else None


def weighted_row(x: Tensor, weight: Tensor) -> Tensor:
    """sum_i weight_i x_i, in the precision of the weights: (b, h, n, p), (b, h, n) -> (b, h, 1, p)."""
    return weight[..., None, :] @ x.to(weight.dtype)


def add_cluster_gradients_(
    total: Tensor, y: Tensor, assignment: Tensor, weight: Tensor, x: Tensor | None = None, across: Tensor | None = None
) -> None:
    """total_j += w_j (y_c(j) + x_j across), in place."""
    each = y.gather(-2, assignment[..., None].expand(*assignment.shape, y.shape[-1]))
    if x is not None and across is not None:
        each = each + x.to(each.dtype) @ across
    total += (each * weight[..., None]).to(total.dtype)
