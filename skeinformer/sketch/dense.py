"""Sketches without zeros: independent entries, and the sub-sampled randomized Hadamard transform (SRHT)."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.noise import sign
from skeinformer.sketch.base import Noise, Sketch, gather_sum, scatter_sum


@dataclass(frozen=True, eq=False)
class DenseSketch(Sketch):
    """S stored as a matrix. `apply` and `lift` cost O(n d p)."""

    n: int
    d: int
    weight: Tensor  # (..., n, d)

    def _apply(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype).mT @ x

    def _lift(self, y: Tensor) -> Tensor:
        return self.weight.to(y.dtype) @ y


def independent_entries(
    noise: Noise, n: int, d: int, *, dtype: torch.dtype, transform: Callable[[Tensor], Tensor]
) -> DenseSketch:
    """Build S with entries transform(u) / sqrt(d) of variance 1/d; a longer sequence only appends rows. O(n d)."""
    entries = transform(noise[0]).to(torch.promote_types(dtype, noise[0].dtype))
    return DenseSketch(n, d, (entries / math.sqrt(d)).to(dtype))


@dataclass(frozen=True, eq=False)
class HadamardSketch(Sketch):
    """S^T = R H D / sqrt(d): signs D, the +-1 Hadamard matrix H of order N >= n, sampled rows R. O(N log N p).

    Ailon and Chazelle (2006). H spreads every vector evenly before it is sampled, so that uniform sampling is safe.
    """

    n: int
    d: int
    sign: Tensor  # (..., n), -1 or 1
    index: Tensor  # (..., d, 1) rows of H in [0, N)
    weight: Tensor  # (..., d, 1), all 1 / sqrt(d)

    def _apply(self, x: Tensor) -> Tensor:
        signed = x * self.sign[..., None].to(x.dtype)  # (..., n, p)
        spread = walsh_hadamard(F.pad(signed, (0, 0, 0, padded_length(self.n) - self.n)))  # (..., N, p)
        return gather_sum(spread, self.index, self.weight)

    def _lift(self, y: Tensor) -> Tensor:
        spread = scatter_sum(y, self.index, self.weight, padded_length(self.n))  # (..., N, p)
        return walsh_hadamard(spread)[..., : self.n, :] * self.sign[..., None].to(y.dtype)


def srht(noise: Noise, n: int, d: int, *, dtype: torch.dtype) -> HadamardSketch:
    """Build S with d rows of H sampled without replacement; beyond N they repeat in the same order. O(n log d)."""
    length = padded_length(n)
    order = noise[1].topk(min(d, length), dim=-1).indices
    index = order[..., torch.arange(d, device=order.device) % length, None]  # (..., d, 1)
    return HadamardSketch(n, d, sign(noise[0]).to(dtype), index, torch.full_like(index, 1 / math.sqrt(d), dtype=dtype))


def walsh_hadamard(x: Tensor) -> Tensor:
    """Compute H x by log2(N) passes of sums and differences, O(N log N p): (..., N, p) -> (..., N, p)."""
    length, half = x.shape[-2], 1
    while half < length:
        pairs = x.reshape(*x.shape[:-2], length // (2 * half), 2, half, x.shape[-1])
        first, second = pairs.unbind(-3)  # (..., N / (2 half), half, p) each
        x = torch.stack((first + second, first - second), -3).flatten(-4, -2)  # (..., N, p)
        half *= 2
    return x


def padded_length(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()
