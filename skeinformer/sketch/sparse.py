"""Sparse random maps, drawn by their non-zeros: neither drawing nor applying forms an n x d matrix."""

import math

import torch
from torch import Tensor

from skeinformer.checks import check_count, check_number
from skeinformer.noise import integer, sign
from skeinformer.sketch.base import Noise, SparseSketch

TRUNCATION = 1e-9  # bound on the probability that a column of a very sparse S has more non-zeros than slots


def sparse_embedding_shapes(n: int, d: int, *, num_nonzeros: int) -> tuple[tuple[int, int], ...]:
    check_count("num_nonzeros", num_nonzeros)
    return ((n, min(num_nonzeros, d)),) * 2


def sparse_embedding(noise: Noise, n: int, d: int, *, dtype: torch.dtype, num_nonzeros: int) -> SparseSketch:
    """Build S with s = num_nonzeros entries +-1/sqrt(s) in each row, in distinct random columns; s is at most d.

    Cohen, Nelson and Woodruff (2016); s = 1 is the count sketch. Drawing costs O(n s^2), applying O(n s p).
    """
    weight = sign(noise[1]).to(dtype) / math.sqrt(min(num_nonzeros, d))
    return SparseSketch(n, d, distinct_integers(noise[0], d), weight, by_row=True)


def distinct_integers(u: Tensor, high: int) -> Tensor:
    """Draw a random set of s integers in [0, high) by Floyd's algorithm, O(s^2): (..., s) -> (..., s)."""
    chosen = u.new_empty(*u.shape[:-1], 0, dtype=torch.long)
    for k in range(u.shape[-1]):
        bound = high - u.shape[-1] + k
        candidate = integer(u[..., k : k + 1], bound + 1)
        is_chosen = (chosen == candidate).any(-1, keepdim=True)
        chosen = torch.cat((chosen, torch.where(is_chosen, bound, candidate)), -1)  # (..., k + 1)
    return chosen


def very_sparse_shapes(n: int, d: int, *, density: float | None) -> tuple[tuple[int, int], ...]:
    if density is not None and not 0 < check_number("density", density, "a number in (0, 1] or None") <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}; None gives 1/sqrt(n)")
    slots = num_slots(n, d, 1 / math.sqrt(n) if density is None else density)
    return (slots, d), (slots, d)


def very_sparse(noise: Noise, n: int, d: int, *, dtype: torch.dtype, density: float | None = None) -> SparseSketch:
    """Build S with independent entries: +-1/sqrt(d density), each sign with probability density / 2, otherwise 0.

    Li, Hastie and Church (2006), whose s is 1 / density, by default sqrt(n). The gaps between the non-zeros of a column
    are geometric; slots past row n are empty. Drawing costs O(n d density), applying p times that.
    """
    density = 1 / math.sqrt(n) if density is None else density
    decay = math.log1p(-density) if density < 1 else -math.inf
    gap = torch.floor(torch.log(noise[0].double()) / decay) + 1  # (..., slots, d), P(gap > k) = (1 - density)^k
    row = gap.cumsum(-2) - 1
    inside = row < n
    index = row.where(inside, 0).long().mT  # (..., d, slots)
    weight = torch.where(inside, sign(noise[1]).double(), 0.0).mT / math.sqrt(d * density)
    return SparseSketch(n, d, index, weight.to(dtype))


def num_slots(n: int, d: int, density: float) -> int:
    """Return a number of slots that is enough for all d columns, Binomial(n, density), with probability 1 - 1e-9."""
    exponent = math.log(d / TRUNCATION)  # Bernstein's inequality: P(count > mean + t) <= exp(-t^2 / (2 var + 2 t / 3))
    variance = n * density * (1 - density)
    excess = exponent / 3 + math.sqrt((exponent / 3) ** 2 + 2 * exponent * variance)
    return min(n, math.ceil(n * density + excess))
