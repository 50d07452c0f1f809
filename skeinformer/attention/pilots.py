"""Pilot rows and importance: which queries are computed exactly, and which keys matter to them.

Lines 1 to 4 of Algorithm 1 of Chen et al. (2022). Everything that selects is in log space and carries no gradient.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


def compute_pilots(
    query: Tensor, rows: Selection, source: VirtualKeys, scale: float, *, with_mass: bool = False
) -> Pilots:
    """B_J V and the row sums, lines 2 and 3. Time O(P n p), memory O((P + n) p)."""
    if _kept.pilots is not None:
        return _kept.pilots.extend(query, rows, source, scale)
    queries = gather_rows(query, rows.indices)  # (b, h, P, p)
    formed = kernels.form_rows(queries, source.keys, source.values, rows.live, source.log_weight, scale, with_mass)
    return Pilots(rows, queries, *formed)


class KeptPilots:
    """The pilots of the last call: those of the next one, on the same tensors, are computed only as far as new."""

    def __init__(self) -> None:
        self.last: Pilots | None = None

    def extend(self, query: Tensor, rows: Selection, source: VirtualKeys, scale: float) -> Pilots:
        """The pilots of `rows`, with what they give to the columns. Ranks of one draw begin with the same rows."""
        last, count = self.last, rows.indices.shape[-1]
        known = 0 if last is None else last.rows.indices.shape[-1]
        if last is None or known > count or not torch.equal(rows.indices[..., :known], last.rows.indices):
            last, known = None, 0
        if last is None or known < count:
            more = Selection(rows.indices[..., known:], rows.live[..., known:])
            queries = gather_rows(query, more.indices)
            formed = kernels.form_rows(
                queries, source.keys, source.values, more.live, source.log_weight, scale, with_mass=True
            )
            new = Pilots(more, queries, *formed)
            new = new._replace(log_square=log_square_of(new, source, scale), mass=column_mass(new, source, scale))
            last = new if last is None else _joined(last, new)
        self.last = last
        return last


def _joined(first: Pilots, second: Pilots) -> Pilots:
    """The pilots of both."""
    pairs = zip(first[1:4], second[1:4], (-2, -2, -1), strict=True)
    queries, output, normalizer = (torch.cat([x, y], dim) for x, y, dim in pairs)
    rows = Selection(*(torch.cat(pair, -1) for pair in zip(first.rows, second.rows, strict=True)))
    (square, mass), (more_square, more_mass) = _columns(first), _columns(second)
    counts = [x.rows.live.sum(-1, keepdim=True).to(mass.dtype) for x in (first, second)]
    mass = (mass * counts[0] + more_mass * counts[1]) / (counts[0] + counts[1]).clamp(min=1)
    return Pilots(rows, queries, output, normalizer, torch.logaddexp(square, more_square), mass)


def _columns(pilots: Pilots) -> tuple[Tensor, Tensor]:
    assert pilots.log_square is not None
    assert pilots.mass is not None
    return pilots.log_square, pilots.mass


class _Kept(threading.local):
    def __init__(self) -> None:  # in every thread; a compiler would not see a default of the class become an attribute
        self.pilots: KeptPilots | None = None


_kept = _Kept()


@contextmanager
def kept_pilots(pilots: KeptPilots) -> Iterator[None]:
    """Inside, calls on the same tensors, whose draws begin alike, compute each pilot row once. Without gradients."""
    before, _kept.pilots = _kept.pilots, pilots
    try:
        yield
    finally:
        _kept.pilots = before


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
