"""Distinct indices, chosen by rank: uniformly, or with given probabilities. O(n), fixed shapes, no gradient."""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.choice import exporting, holds
from skeinformer.noise import gumbel


class Selection(NamedTuple):
    """Distinct indices in order of rank; `live` is False where there were fewer candidates than places."""

    indices: Tensor  # (..., k)
    live: Tensor  # (..., k)

    def marked(self, size: int) -> Tensor:
        """The indices as (..., size), -1 for an empty slot."""
        index = self.indices.where(self.live, -1)
        return torch.nn.functional.pad(index, (0, size - index.shape[-1]), value=-1)


def at_most(k: int, n: int) -> int:
    """min(k, n), decided now: in a graph with symbolic lengths `min` would stay a symbol."""
    return k if k <= n else n


def count_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """The number of real tokens of (..., n, p), (b, 1, 1); of all tokens without a mask, (1, 1, 1)."""
    if mask is None:
        return torch.zeros(1, 1, 1, dtype=torch.long, device=x.device) + x.shape[-2]
    return mask.sum(-1, keepdim=True)


def top(score: Tensor, k: int) -> Selection:
    """The k largest scores; -inf never counts as chosen. Of fewer than k all, in their order of rank.

    An exported graph may have to take lengths below k and above: there are always k places then, and an empty one
    repeats the last index. It has no gradient.
    """
    n = score.shape[-1]
    if exporting() and not holds(n >= k):
        values, index = torch.nn.functional.pad(score, (0, k), value=-torch.inf).topk(k, -1)
        return Selection(index.clamp(max=n - 1), values > -torch.inf)
    values, index = score.topk(at_most(k, n), -1)
    return Selection(index, values > -torch.inf)


def uniform_rows(u: Tensor, mask: Tensor | None, k: int) -> Selection:
    """k real positions, uniformly without replacement: the largest of their uniform numbers.

    The paper draws pilots with replacement; without concentrates at least as well (Hoeffding 1963) and cannot hold a
    row twice. The next ranks of the same numbers are a uniform sample of the rest.
    """
    return top(u if mask is None else u.where(mask, -torch.inf), k)


@torch.no_grad()
def sample_without_replacement(log_probability: Tensor, u: Tensor, d: int) -> Selection:
    """d distinct indices with probabilities p, line 5: the d largest of log p + Gumbel noise."""
    return top(log_probability + gumbel(u), d)
