"""Sparse random maps: a few entries +-c per row (subspace embedding), or each entry non-zero with a small probability.

Both are drawn by their non-zeros, so that neither drawing nor applying ever touches an n x d matrix.
"""

import math

import torch
from torch import Tensor

from skeinformer import noise as noises
from skeinformer.noise import Rand
from skeinformer.registry import check_count
from skeinformer.sketch.base import SparseColumns, SparseRows, check_sketch_noise

TRUNCATION = 1e-9  # the largest probability that a very sparse S has a column with more non-zeros than slots


def sparse_embedding_noise(rand: Rand, n: int, d: int, *, num_nonzeros: int = 4) -> tuple[Tensor, ...]:
    """Uniform numbers for the columns and for the signs, (n, s) each: a longer sequence only appends rows."""
    check_count("num_nonzeros", num_nonzeros)
    s = min(num_nonzeros, d)
    return rand(n, s), rand(n, s)


def sparse_embedding(
    noise: tuple[Tensor, ...], n: int, d: int, *, dtype: torch.dtype, num_nonzeros: int = 4
) -> SparseRows:
    """S with s = num_nonzeros entries +-1/sqrt(s) in each row, in distinct random columns; s is at most d.

    The sparse oblivious subspace embedding of Cohen, Nelson and Woodruff (2016); s = 1 is the count sketch. Rows have
    norm 1, and different rows are uncorrelated by their signs. Drawing costs O(n s^2), applying O(n s p).
    """
    check_count("num_nonzeros", num_nonzeros)
    s = min(num_nonzeros, d)
    check_sketch_noise(noise, (n, s), (n, s))
    weight = noises.sign(noise[1]).to(dtype) / math.sqrt(s)
    return SparseRows(n, d, distinct_integers(noise[0], d), weight)


def distinct_integers(u: Tensor, high: int) -> Tensor:
    """A uniformly random set of s integers in [0, high): (..., s) -> (..., s). Their order is not uniform.

    Floyd's sampling: number k is uniform up to high - s + k, and that bound itself where it was taken. O(s^2) a set.
    """
    s = u.shape[-1]
    chosen = u.new_empty(*u.shape[:-1], 0, dtype=torch.long)
    for k in range(s):
        bound = high - s + k
        candidate = noises.integer(u[..., k : k + 1], bound + 1)
        taken = (chosen == candidate).any(-1, keepdim=True)
        chosen = torch.cat((chosen, torch.where(taken, bound, candidate)), -1)  # (..., k + 1)
    return chosen


def very_sparse_noise(rand: Rand, n: int, d: int, *, density: float | None = None) -> tuple[Tensor, ...]:
    """Uniform numbers for the gaps between non-zeros and for the signs, (slots, d) each, down the columns of S."""
    slots = num_slots(n, d, _check_density(n, density))
    return rand(slots, d, dtype=torch.float64), rand(slots, d)


def very_sparse(
    noise: tuple[Tensor, ...], n: int, d: int, *, dtype: torch.dtype, density: float | None = None
) -> SparseColumns:
    """S with independent entries that are +-1/sqrt(d density), each sign with probability density / 2, and else 0.

    Li, Hastie and Church (2006), whose s is 1 / density; by default the density is 1/sqrt(n), s = sqrt(n). The gaps
    between the non-zeros of a column are geometric, so they are drawn without looking at the zeros. A column has a
    fixed number of slots; those that fall past row n are empty. Drawing costs O(n d density), applying p times
    that.
    """
    density = _check_density(n, density)
    slots = num_slots(n, d, density)
    check_sketch_noise(noise, (slots, d), (slots, d))
    decay = math.log1p(-density) if density < 1 else -math.inf
    gap = torch.floor(torch.log(noise[0].double()) / decay) + 1  # (..., slots, d), P(gap > k) = (1 - density)^k
    row = gap.cumsum(-2) - 1
    inside = row < n
    index = torch.where(inside, row, 0.0).long().mT  # (..., d, slots)
    weight = torch.where(inside, noises.sign(noise[1]).double(), 0.0).mT / math.sqrt(d * density)
    return SparseColumns(n, d, index, weight.to(dtype))


def num_slots(n: int, d: int, density: float) -> int:
    """So many that all d columns, Binomial(n, density) non-zeros each, fit with probability 1 - 1e-9.

    Bernstein's inequality: P(count > mean + t) <= exp(-t^2 / (2 variance + 2 t / 3)).
    """
    exponent = math.log(d / TRUNCATION)
    variance = n * density * (1 - density)
    excess = exponent / 3 + math.sqrt((exponent / 3) ** 2 + 2 * exponent * variance)
    return min(n, math.ceil(n * density + excess))


def _check_density(n: int, density: float | None) -> float:
    if density is None:
        return 1 / math.sqrt(n)
    if isinstance(density, bool) or not isinstance(density, int | float):
        raise TypeError(f"density must be a number in (0, 1] or None, got {density!r} of type {type(density).__name__}")
    if not 0 < density <= 1:
        raise ValueError(f"density must be in (0, 1], got {density}; None gives 1/sqrt(n)")
    return float(density)
