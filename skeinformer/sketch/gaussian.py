"""Sub-Gaussian maps: S with independent entries of mean 0 and variance 1/d.

Normal entries (Vershynin 2010; Halko, Martinsson and Tropp 2011) or signs (Achlioptas 2003). Either S meets the
oblivious Johnson-Lindenstrauss guarantee, Definition 2 of Chen et al. (2022). S is dense by nature.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from skeinformer import noise as noises
from skeinformer.noise import Rand
from skeinformer.sketch.base import Sketch, accumulation_dtype, check_argument, check_sketch_noise


@dataclass(frozen=True, eq=False)
class DenseSketch(Sketch):
    """S held as a matrix, for families whose entries are all non-zero.

    Half precision is multiplied in float32. Applying and lifting cost O(n d p).
    """

    n: int
    d: int
    weight: Tensor  # (..., n, d)

    def apply(self, x: Tensor) -> Tensor:
        check_argument("apply", x, "n", self.n, self.weight)
        wide = accumulation_dtype(x)
        return (self.weight.to(wide).mT @ x.to(wide)).to(x.dtype)

    def lift(self, y: Tensor) -> Tensor:
        check_argument("lift", y, "d", self.d, self.weight)
        wide = accumulation_dtype(y)
        return (self.weight.to(wide) @ y.to(wide)).to(y.dtype)

    def dense(self) -> Tensor:
        return self.weight


def sub_gaussian_noise(rand: Rand, n: int, d: int) -> tuple[Tensor, ...]:
    """One uniform number per entry, (n, d): a longer sequence only appends rows."""
    return (rand(n, d),)


def gaussian(noise: tuple[Tensor, ...], n: int, d: int, *, dtype: torch.dtype) -> DenseSketch:
    """S with independent entries N(0, 1/d). Cost O(n d)."""
    return _sub_gaussian(noise, n, d, noises.normal, dtype)


def rademacher(noise: tuple[Tensor, ...], n: int, d: int, *, dtype: torch.dtype) -> DenseSketch:
    """S with independent entries +-1/sqrt(d). Cost O(n d)."""
    return _sub_gaussian(noise, n, d, noises.sign, dtype)


def _sub_gaussian(
    noise: tuple[Tensor, ...], n: int, d: int, entries: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> DenseSketch:
    check_sketch_noise(noise, (n, d))
    return DenseSketch(
        n, d, (entries(noise[0]).to(torch.promote_types(dtype, noise[0].dtype)) / math.sqrt(d)).to(dtype)
    )
