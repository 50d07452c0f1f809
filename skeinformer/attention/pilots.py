"""Pilot rows and importance: which queries are computed exactly, and which keys matter to them.

Lines 1 to 4 of Algorithm 1 of Chen et al. (2022). Everything that selects is in log space and carries no gradient.
"""

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.selection import Selection
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.kernels import pilots as kernels
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.merge import ExactRows
from skeinformer.kernels.ranges import log_row_norms
from skeinformer.kernels.rows import gather_rows

FAINTEST = 30.0  # a value of norm 0 counts as e^-30 of the largest: it adds nothing to B V, but its key has mass


class Pilots(NamedTuple):
    """Rows J of the attention, exact."""

    rows: Selection  # (b, h, P)
    queries: Tensor  # (b, h, P, p)
    output: Tensor  # (b, h, P, p_v), B_J V
    normalizer: Tensor  # (b, h, P), log of the row sums of A
    log_square: Tensor | None = None  # (b, h, n), log sum_J b_ji^2 where it came with the rest
    mass: Tensor | None = None  # (b, h, n), mean_J b_ji where it was asked for and came with the rest

    def as_rows(self) -> ExactRows:
        """What is written over an output."""
        return ExactRows(self.rows.indices, self.queries, self.output, self.normalizer)


class Instead(threading.local):
    """What computes pilots in place of `compute_pilots`, in this thread: without gradients, and with the mass."""

    def __init__(self) -> None:  # in every thread; a compiler would not see a default of the class become an attribute
        self.compute: Callable[[Tensor, Selection, VirtualKeys, float], Pilots] | None = None


instead = Instead()


def compute_pilots(
    query: Tensor, rows: Selection, source: VirtualKeys, scale: float, *, with_mass: bool = False
) -> Pilots:
    """B_J V and the row sums, lines 2 and 3. Time O(P n p), memory O((P + n) p)."""
    if instead.compute is not None:
        return instead.compute(query, rows, source, scale)
    queries = gather_rows(query, rows.indices)  # (b, h, P, p)
    formed = kernels.form_rows(queries, source.keys, source.values, rows.live, source.log_weight, scale, with_mass)
    return Pilots(rows, queries, *formed)


@torch.no_grad()
def log_importance(pilots: Pilots, source: VirtualKeys, scale: float, largest_norm: Tensor | None = None) -> Tensor:
    """log p_i of Eq. (5), up to a constant: 1/2 log sum_J b_ji^2 + log |v_i|; -inf for empty slots, else finite.

    A slot of weight w has a column w times as large. largest_norm: (b, h, 1), of `log_norms` where not all values are
    here. Time O(P n p), memory O(n).
    """
    log_square, log_norm = log_square_of(pilots, source, scale), log_norms(source.values)  # (b, h, n)
    largest = log_norm.amax(-1, keepdim=True) if largest_norm is None else largest_norm
    log_norm = torch.maximum(log_norm, largest - FAINTEST)
    log_probability = log_norm + log_square / 2
    return log_probability if source.log_weight is None else log_probability + source.log_weight


def log_norms(values: Tensor) -> Tensor:
    """log |v_i|, finite also where it is 0: (b, h, n), in the precision of statistics."""
    return log_row_norms(values, statistics_dtype(values)).clamp(-1000, 1000)


def log_square_of(pilots: Pilots, source: VirtualKeys, scale: float) -> Tensor:
    """log sum_J b_ji^2 over the live pilots, less that of the weights: (b, h, n)."""
    if pilots.log_square is not None:
        return pilots.log_square
    return log_column_sums(pilots, source.keys, scale, power=2)


@torch.no_grad()
def column_mass(pilots: Pilots, source: VirtualKeys, scale: float) -> Tensor:
    """mean_J b_ji, what the live pilots give to each slot on average: (b, h, n), 0 for empty slots."""
    if pilots.mass is not None:
        return pilots.mass
    count = pilots.rows.live.sum(-1, keepdim=True).clamp(min=1)  # (b, h, 1)
    log_sums = log_column_sums(pilots, source.keys, scale, power=1)
    log_mass = log_sums + source.log_weights() - count.to(log_sums.dtype).log()
    return log_mass.exp().where(pilots.rows.live.any(-1, keepdim=True), 0)


@torch.no_grad()
def log_column_sums(pilots: Pilots, keys: Tensor, scale: float, *, power: int) -> Tensor:
    """log sum_J (exp(s q_J . k_i) / (row sum of J))^power over live pilots for every key: (..., n)."""
    log_weight = -power * pilots.normalizer.to(statistics_dtype(keys))
    log_weight = torch.where(pilots.rows.live, log_weight, -torch.inf)  # (..., P)
    return kernels.log_column_sums(keys, pilots.queries, log_weight, power * scale)
