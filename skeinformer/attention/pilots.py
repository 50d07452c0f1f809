"""Pilot rows and importance: which queries are computed exactly, and which keys matter to them.

Lines 1 to 4 of Algorithm 1 of Chen et al. (2022), in log space. Where ranks share the sequence, each computes the rows
of all pilots over its own keys. With lse_r the log of a row's sum there,

    lse = log sum_r exp(lse_r)        B_J V = sum_r exp(lse_r - lse) (B_J V)_r

and lse is all that the mass and the importance of keys need: the second sum may wait for the next exchange.
"""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.rows import Rows
from skeinformer.attention.virtual_keys import VirtualKeys, attend_with_lse
from skeinformer.distributed.world import World
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import log_row_norms

FAINTEST = 30.0  # a value of norm 0 counts as e^-30 of the largest: it adds nothing to B V, but its key has mass


class Pilots(NamedTuple):
    """Rows J of the attention, exact."""

    rows: Rows  # (b, h, P)
    queries: Tensor  # (b, h, P, p)
    output: Tensor  # (b, h, P, p_v), B_J V
    lse: Tensor  # (b, h, P), the logs of the row sums of A


@torch.no_grad()
def compute_pilots(
    rows: Rows, queries: Tensor, source: VirtualKeys, scale: float, steps: ModuleType, world: World, *, with_mass: bool
) -> tuple[Pilots, Tensor, Tensor | None]:
    """Compute B_J V (this rank's part of it), log p_i = 1/2 log sum_J b_ji^2 + log |v_i| and mean_J b_ji. O(P n p)."""
    (keys, values, log_weight), live = source, rows.live
    log_norm = log_row_norms(values, statistics_dtype(values))  # (b, h, n_k)
    largest = log_norm.amax(-1, keepdim=True).clamp_(-1000, 1000)
    if world.size == 1:
        output, lse, log_square, mass = steps.pilot_attention(queries, keys, values, live, log_weight, scale, with_mass)
    else:
        output, lse = rows_of_this_rank(queries, source, scale)
        all_lse, all_largest = world.gather("row sums", lse, largest)
        largest = all_largest.amax(0)
        output, lse = share_of_rows(output, lse, all_lse)
        log_square, mass = steps.column_sums(queries, keys, lse, live, log_weight, scale, with_mass)
    log_importance = torch.maximum(log_norm, largest - FAINTEST).add_(log_square, alpha=0.5)
    if log_weight is not None:
        log_importance += log_weight
    return Pilots(rows, queries, output, lse), log_importance, mass


def rows_of_this_rank(queries: Tensor, source: VirtualKeys, scale: float) -> tuple[Tensor, Tensor]:
    """Compute rows over this rank's keys, (b, h, k, p_v), and the logs of their sums, (b, h, k); -inf without a key."""
    output, lse = attend_with_lse(queries, source, scale)
    if source.log_weight is not None:
        lse = lse.where((source.log_weight > -torch.inf).any(-1, keepdim=True), -torch.inf)
    return output, lse


def share_of_rows(output: Tensor, lse: Tensor, all_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's part of rows over the keys of all ranks, and lse over them, 0 without a key."""
    total = all_lse.logsumexp(0)
    total = total.where(total > -torch.inf, 0)
    return output.to(lse.dtype) * (lse - total).exp()[..., None], total
