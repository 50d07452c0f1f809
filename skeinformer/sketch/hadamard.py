"""SRHT, the sub-sampled randomized Hadamard transform: random signs, a Walsh-Hadamard transform, d sampled coordinates.

Ailon and Chazelle (2006); Lu et al. (2013). The transform spreads every vector evenly, so that uniform sampling is safe
whatever the vector was.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer import noise as noises
from skeinformer.noise import Rand
from skeinformer.sketch.base import (
    Sketch,
    accumulation_dtype,
    check_argument,
    check_sketch_noise,
    gather_sum,
    scatter_sum,
)


@dataclass(frozen=True, eq=False)
class HadamardSketch(Sketch):
    """S^T = R H D / sqrt(d): signs D, the +-1 Hadamard matrix H of order N >= n, a power of two, sampled rows R.

    x is padded with zeros from n to N. Half precision is transformed in float32. O(N log N p).
    """

    n: int
    d: int
    sign: Tensor  # (..., n), -1 or 1
    index: Tensor  # (..., d, 1) rows of H in [0, N)
    weight: Tensor  # (..., d, 1), all 1 / sqrt(d)

    def apply(self, x: Tensor) -> Tensor:
        check_argument("apply", x, "n", self.n, self.sign)
        wide = accumulation_dtype(x)
        signed = x.to(wide) * self.sign[..., None].to(wide)  # (..., n, p)
        spread = walsh_hadamard(F.pad(signed, (0, 0, 0, padded_length(self.n) - self.n)))  # (..., N, p)
        return gather_sum(spread, self.index, self.weight).to(x.dtype)

    def lift(self, y: Tensor) -> Tensor:
        check_argument("lift", y, "d", self.d, self.sign)
        wide = accumulation_dtype(y)
        spread = scatter_sum(y.to(wide), self.index, self.weight, padded_length(self.n))  # (..., N, p)
        return (walsh_hadamard(spread)[..., : self.n, :] * self.sign[..., None].to(wide)).to(y.dtype)


def srht_noise(rand: Rand, n: int, d: int) -> tuple[Tensor, ...]:
    """Uniform numbers for the signs, (n,), and for the order in which rows of H are taken, (N,)."""
    return rand(n), rand(padded_length(n))


def srht(noise: tuple[Tensor, ...], n: int, d: int, *, dtype: torch.dtype) -> HadamardSketch:
    """S = D H R^T / sqrt(d), d rows of H drawn without replacement; beyond N they repeat in the same random order.

    E[S S^T] = I by the random signs alone, and |S^T x| = |x| when d is a multiple of N. Drawing costs O(n log d),
    applying O(n log n p).
    """
    length = padded_length(n)
    check_sketch_noise(noise, (n,), (length,))
    order = noise[1].topk(min(d, length), dim=-1).indices
    index = order[..., torch.arange(d, device=order.device) % length, None]  # (..., d, 1)
    weight = torch.full_like(index, 1 / math.sqrt(d), dtype=dtype)
    return HadamardSketch(n, d, noises.sign(noise[0]).to(dtype), index, weight)


def walsh_hadamard(x: Tensor) -> Tensor:
    """H x along dim -2 for the +-1 Hadamard matrix H of order N, a power of two: (..., N, p) -> (..., N, p).

    H is symmetric and H H = N I. log2(N) passes of sums and differences: O(N log N p).
    """
    length = x.shape[-2]
    half = 1
    while half < length:
        pairs = x.reshape(*x.shape[:-2], length // (2 * half), 2, half, x.shape[-1])
        left, right = pairs.unbind(-3)  # (..., N / (2 half), half, p) each
        x = torch.stack((left + right, left - right), -3).flatten(-4, -2)  # (..., N, p)
        half *= 2
    return x


def padded_length(n: int) -> int:
    """The smallest power of two that is at least n."""
    length = 1
    while length < n:
        length *= 2
    return length
