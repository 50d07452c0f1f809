"""The sketch: a random n x d matrix S with E[S S^T] = I, Eq. (1) of Chen et al. (2022), never formed.

Replacing the identity in B I V by S S^T gives the sketched product B S S^T V. Every family of sketches is two
functions: `noise(rand, n, d, ...)` asks a source for uniform numbers, and `build(noise, n, d, ...)` is a deterministic
function of them. Shapes: n rows, d columns, p the width of what S is applied to, `...` any batch dimensions.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.rows import gather_rows


class Sketch(ABC):
    """A drawn S. Immutable. `apply` and `lift` are linear, differentiable and adjoint: <S^T x, y> = <x, S y>.

    The batch dimensions of S and of its argument broadcast. The result has the dtype of the argument.
    """

    n: int
    d: int
    weight: Tensor  # the numbers that S is made of: they give its dtype and device

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """S^T x: (..., n, p) -> (..., d, p)."""

    @abstractmethod
    def lift(self, y: Tensor) -> Tensor:
        """S y: (..., d, p) -> (..., n, p)."""

    def dense(self) -> Tensor:
        """S itself, (..., n, d): for inspection and tests."""
        return self.lift(torch.eye(self.d, dtype=self.weight.dtype, device=self.weight.device))


class Family(NamedTuple):
    """A way of drawing S: first its noise, then S as a function of the noise. Both take the options in `defaults`."""

    noise: Callable[..., tuple[Tensor, ...]]  # noise(rand, n, d, **options)
    build: Callable[..., Sketch]  # build(noise, n, d, dtype=..., **options)
    paper: str  # who introduced it
    cost: str  # of one application to n x p
    defaults: dict[str, object] = {}  # noqa: RUF012  options and their defaults: the only ones that draw() accepts


@dataclass(frozen=True, eq=False)
class SparseColumns(Sketch):
    """S given by k non-zeros per column: S[index[c, j], c] += weight[c, j]. A slot of weight 0 is empty.

    Applying gathers rows, lifting scatters them: O(d k p).
    """

    n: int
    d: int
    index: Tensor  # (..., d, k) rows in [0, n)
    weight: Tensor  # (..., d, k)

    def apply(self, x: Tensor) -> Tensor:
        check_argument("apply", x, "n", self.n, self.weight)
        return gather_sum(x, self.index, self.weight)

    def lift(self, y: Tensor) -> Tensor:
        check_argument("lift", y, "d", self.d, self.weight)
        return scatter_sum(y, self.index, self.weight, self.n)


@dataclass(frozen=True, eq=False)
class SparseRows(Sketch):
    """S given by k non-zeros per row: S[r, index[r, j]] += weight[r, j].

    Applying scatters rows, lifting gathers them: O(n k p).
    """

    n: int
    d: int
    index: Tensor  # (..., n, k) columns in [0, d)
    weight: Tensor  # (..., n, k)

    def apply(self, x: Tensor) -> Tensor:
        check_argument("apply", x, "n", self.n, self.weight)
        return scatter_sum(x, self.index, self.weight, self.d)

    def lift(self, y: Tensor) -> Tensor:
        check_argument("lift", y, "d", self.d, self.weight)
        return gather_sum(y, self.index, self.weight)


def gather_sum(x: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """Weighted sums of rows, out[r] = sum_j weight[r, j] x[index[r, j]]: (..., n, p), (..., r, k) -> (..., r, p).

    Half precision is summed in float32. O(r k p).
    """
    wide = accumulation_dtype(x)
    rows = gather_rows(x, index.flatten(-2))  # (..., r * k, p)
    rows = rows.reshape(*rows.shape[:-2], *index.shape[-2:], x.shape[-1])  # (..., r, k, p)
    return torch.sum(rows.to(wide) * weight[..., None].to(wide), -2).to(x.dtype)


def scatter_sum(y: Tensor, index: Tensor, weight: Tensor, size: int) -> Tensor:
    """The adjoint of gather_sum, out[index[r, j]] += weight[r, j] y[r]: (..., r, p), (..., r, k) -> (..., size, p).

    Half precision is summed in float32. O((size + r k) p).
    """
    wide = accumulation_dtype(y)
    terms = (y[..., None, :].to(wide) * weight[..., None].to(wide)).flatten(-3, -2)  # (..., r * k, p)
    sums = terms.new_zeros(*terms.shape[:-2], size, terms.shape[-1])
    return sums.scatter_add(-2, index.flatten(-2)[..., None].expand(terms.shape), terms).to(y.dtype)


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which sums of x are formed: float32 for half precision, else its own."""
    return torch.promote_types(x.dtype, torch.float32)


def check_argument(operation: str, x: Tensor, letter: str, size: int, held: Tensor) -> None:
    """Raise unless x is a floating point (..., size, p) on the device of the tensor that the sketch holds."""
    if x.ndim < 2 or x.shape[-2] != size:
        raise ValueError(f"{operation} takes shape (..., {letter}, p) with {letter} = {size}, got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{operation} takes a floating point tensor, got {x.dtype}; convert it first")
    if x.device != held.device:
        raise ValueError(
            f"{operation} got a tensor on {x.device}, but the sketch is on {held.device}; move one of them"
        )


def check_sketch_noise(noise: tuple[Tensor, ...], *shapes: tuple[int, ...]) -> None:
    """Raise a ValueError unless the noise consists of tensors of shape (..., *shape), one for each shape."""
    if len(noise) != len(shapes):
        raise ValueError(f"expected {len(shapes)} noise tensors, got {len(noise)}; draw them with this family's noise")
    for u, shape in zip(noise, shapes, strict=True):
        if u.ndim < len(shape) or tuple(u.shape[u.ndim - len(shape) :]) != shape:
            expected = ", ".join(str(extent) for extent in shape)
            raise ValueError(
                f"noise has shape {tuple(u.shape)}, expected (..., {expected}); draw it with the same n, d and options"
            )
