"""Pilot rows and importance: which queries are computed exactly, and which keys matter to them.

Lines 1 to 5 of Algorithm 1 of Chen et al. (2022). Everything that selects is in log space and carries no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.virtual_keys import VirtualKeys, attend_with_normalizer, statistics_dtype
from skeinformer.noise import gumbel
from skeinformer.sketch.base import gather_rows

FAINTEST = 30.0  # a value of norm 0 counts as e^-30 of the largest: it adds nothing to B V, but its key has mass


class Selection(NamedTuple):
    """Distinct indices in order of rank; `live` is False where there were fewer candidates than places."""

    indices: Tensor  # (..., k)
    live: Tensor  # (..., k)

    def marked(self, size: int) -> Tensor:
        """The indices as (..., size), -1 for an empty slot."""
        index = self.indices.where(self.live, -1)
        return torch.nn.functional.pad(index, (0, size - index.shape[-1]), value=-1)


class Pilots(NamedTuple):
    """Rows J of the attention, exact."""

    rows: Selection  # (b, h, P)
    queries: Tensor  # (b, h, P, p)
    output: Tensor  # (b, h, P, p_v), B_J V
    normalizer: Tensor  # (b, h, P), log of the row sums of A


def top(score: Tensor, k: int) -> Selection:
    """The k largest scores; -inf never counts as chosen."""
    values, index = score.topk(min(k, score.shape[-1]), -1)
    return Selection(index, values > -torch.inf)


def uniform_rows(u: Tensor, mask: Tensor | None, k: int) -> Selection:
    """k real positions, uniformly without replacement: the largest of their uniform numbers. O(n).

    The paper draws pilots with replacement; without concentrates at least as well (Hoeffding 1963) and cannot hold a
    row twice. The next ranks of the same numbers are a uniform sample of the rest.
    """
    return top(u if mask is None else u.where(mask, -torch.inf), k)


def compute_pilots(query: Tensor, rows: Selection, source: VirtualKeys, scale: float) -> Pilots:
    """B_J V and the row sums, lines 2 and 3. Time O(P n p), no P x n matrix."""
    queries = gather_rows(query, rows.indices)  # (b, h, P, p)
    output, normalizer = attend_with_normalizer(queries, source, scale)
    return Pilots(rows, queries, output, normalizer)


@torch.no_grad()
def log_importance(pilots: Pilots, source: VirtualKeys, scale: float) -> Tensor:
    """log p_i of Eq. (5), up to a constant: 1/2 log sum_J b_ji^2 + log |v_i|; -inf for empty slots, else finite.

    The sum over pilots is attention the other way round: keys ask, pilot queries answer, with scale 2s and log weights
    -2 log(row sum), and its log is the normalizer of that call. A slot of weight w has a column w times as large.
    Time O(P n p), memory O(n).
    """
    dtype = statistics_dtype(pilots.queries)
    log_weight = torch.where(pilots.rows.live, -2 * pilots.normalizer.to(dtype), -torch.inf)
    transposed = VirtualKeys(pilots.queries, pilots.queries, log_weight)
    _, log_square = attend_with_normalizer(source.keys, transposed, 2 * scale)  # (b, h, n)
    norm: Tensor = torch.linalg.vector_norm(source.values, dim=-1, dtype=dtype)  # (b, h, n)
    log_norm = norm.log().clamp(-100, 100)
    log_norm = log_norm.maximum(log_norm.amax(-1, keepdim=True) - FAINTEST)
    log_probability = 0.5 * log_square + log_norm
    return log_probability if source.log_weight is None else log_probability + source.log_weight


@torch.no_grad()
def sample_without_replacement(log_probability: Tensor, u: Tensor, d: int) -> Selection:
    """d distinct indices with probabilities p, line 5: the d largest of log p + Gumbel noise. O(n), fixed shapes."""
    return top(log_probability + gumbel(u), d)
