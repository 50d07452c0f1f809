"""The interface of a sketch, and sketches stored by their non-zeros."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import Rand

Noise = tuple[Tensor, ...]  # the uniform numbers from which S is built


class Sketch(ABC):
    """A random matrix S, (..., n, d), with E[S S^T] = I. It is immutable.

    `apply` and `lift` are linear, differentiable and adjoint: <S^T x, y> = <x, S y>. The batch dimensions of S and of
    the argument broadcast, the result has the dtype of the argument, and half precision is summed in float32.

    Attributes:
        n: Number of rows.
        d: Number of columns.
        weight: The numbers that S consists of. They have the dtype and the device of S.
    """

    n: int
    d: int
    weight: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Compute S^T x.

        Args:
            x: A floating point tensor (..., n, p).

        Returns:
            S^T x, (..., d, p).

        Raises:
            ValueError: If x has another number of rows or is on another device.
            TypeError: If x is not floating point.
        """
        return self._apply(self._checked("apply", x, "n", self.n)).to(x.dtype)

    def lift(self, y: Tensor) -> Tensor:
        """Compute S y.

        Args:
            y: A floating point tensor (..., d, p).

        Returns:
            S y, (..., n, p).

        Raises:
            ValueError: If y has another number of rows or is on another device.
            TypeError: If y is not floating point.
        """
        return self._lift(self._checked("lift", y, "d", self.d)).to(y.dtype)

    def dense(self) -> Tensor:
        """Form S, (..., n, d), for inspection and tests."""
        return self.lift(torch.eye(self.d, dtype=self.weight.dtype, device=self.weight.device))

    @abstractmethod
    def _apply(self, x: Tensor) -> Tensor:
        """S^T x for x in float32 or float64."""

    @abstractmethod
    def _lift(self, y: Tensor) -> Tensor:
        """S y for y in float32 or float64."""

    def _checked(self, operation: str, x: Tensor, letter: str, size: int) -> Tensor:
        """Return x, half precision as float32; raise unless it fits."""
        if x.ndim < 2 or x.shape[-2] != size:
            raise ValueError(f"{operation} takes shape (..., {letter}, p) with {letter} = {size}, got {tuple(x.shape)}")
        if not x.is_floating_point():
            raise TypeError(f"{operation} takes a floating point tensor, got {x.dtype}; convert it first")
        if x.device != self.weight.device:
            raise ValueError(f"{operation} got a tensor on {x.device}, but the sketch is on {self.weight.device}")
        return x.to(torch.promote_types(x.dtype, torch.float32))


class Family(NamedTuple):
    """A row of SKETCHES. S is drawn in two steps: uniform numbers first, then S as a function of them."""

    shapes: Callable[..., tuple[tuple[int, ...], ...]]  # of the uniform numbers: shapes(n, d, **options)
    matrix: Callable[..., Sketch]  # S, deterministic: matrix(noise, n, d, dtype=..., **options)
    paper: str  # its origin
    cost: str  # of one application to n x p
    defaults: dict[str, object] = {}  # noqa: RUF012  default values of its options, which are the only ones it takes
    double: bool = False  # the first uniform tensor is float64: sums of probabilities are compared to it

    def noise(self, rand: Rand, n: int, d: int, **options: Any) -> Noise:
        first, *others = self.shapes(n, d, **options)
        return rand(*first, dtype=torch.float64 if self.double else torch.float32), *(rand(*shape) for shape in others)

    def build(self, noise: Noise, n: int, d: int, *, dtype: torch.dtype, **options: Any) -> Sketch:
        """Build S from uniform numbers; raise a ValueError unless they have the shapes of `noise`."""
        shapes = self.shapes(n, d, **options)
        if len(noise) != len(shapes):
            raise ValueError(f"expected {len(shapes)} noise tensors, got {len(noise)}; draw with this family's noise")
        for u, shape in zip(noise, shapes, strict=True):
            if u.ndim < len(shape) or tuple(u.shape[u.ndim - len(shape) :]) != shape:
                expected = f"(..., {', '.join(map(str, shape))}); draw it with the same n, d and options"
                raise ValueError(f"noise has shape {tuple(u.shape)}, expected {expected}")
        return self.matrix(noise, n, d, dtype=dtype, **options)


@dataclass(frozen=True, eq=False)
class SparseSketch(Sketch):
    """S[index[c, j], c] += weight[c, j] with k non-zeros in a column, or `by_row` S[r, index[r, j]] += weight[r, j]."""

    n: int
    d: int
    index: Tensor  # (..., d, k) rows in [0, n), or by row (..., n, k) columns in [0, d)
    weight: Tensor  # as the index; 0 in an empty slot
    by_row: bool = False

    def _apply(self, x: Tensor) -> Tensor:
        at = self.index, self.weight
        return scatter_sum(x, *at, self.d) if self.by_row else gather_sum(x, *at)

    def _lift(self, y: Tensor) -> Tensor:
        at = self.index, self.weight
        return gather_sum(y, *at) if self.by_row else scatter_sum(y, *at, self.n)


def gather_sum(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """out[r] = sum_j weight[r, j] x[index[r, j]]: (..., n, p), (..., r, k) -> (..., r, p). O(r k p)."""
    rows = gather_rows(x, index.flatten(-2))  # (..., r * k, p)
    rows = rows.reshape(*rows.shape[:-2], *index.shape[-2:], x.shape[-1])  # (..., r, k, p)
    return torch.sum(rows * weight[..., None].to(x.dtype), -2)


def scatter_sum(y: Tensor, index: Tensor, weight: Tensor, size: int) -> Tensor:
    """out[index[r, j]] += weight[r, j] y[r], the adjoint: (..., r, p), (..., r, k) -> (..., size, p)."""
    terms = (y[..., None, :] * weight[..., None].to(y.dtype)).flatten(-3, -2)  # (..., r * k, p)
    sums = terms.new_zeros(*terms.shape[:-2], size, terms.shape[-1])
    return sums.scatter_add(-2, index.flatten(-2)[..., None].expand(terms.shape), terms)
