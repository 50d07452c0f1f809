"""Numbers near the ends of their range: squares that would leave it, and casts to a narrower precision.

Where numbers are of moderate size nothing here changes a bit of a result.
"""

import torch
from torch import Tensor

from skeinformer.kernels.choice import known

LOWEST = -1e30  # a finite stand-in for -inf in float32: what is added to it, and its exp, are no NaN
MODERATE = 1e-12, 1e12  # squares of numbers between these, and sums of many, are in the range of float32


def moderate_unit(largest: Tensor) -> Tensor:
    """The unit in which numbers up to `largest` have squares: 1 where they are of moderate size already."""
    return largest.where((largest <= MODERATE[0]) | (largest >= MODERATE[1]), 1).where(largest > 0, 1)


def log_row_norms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """log |x_i|, (..., n, p) -> (..., n), -inf for 0; squares are taken in units in which they are in range."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=dtype)
    largest = norm.amax(-1, keepdim=True)  # (..., 1)
    moderate = (largest > MODERATE[0]) & (largest < MODERATE[1])
    if known(moderate):
        return norm.log()
    x = x.to(dtype)
    unit = moderate_unit(x.abs().amax((-2, -1), keepdim=True)).where(~moderate[..., None], 1)  # (..., 1, 1)
    scaled: Tensor = torch.linalg.vector_norm(x / unit, dim=-1)
    return scaled.log() + unit[..., 0].log()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another precision; a number beyond its range becomes its largest, where a cast would make it infinite."""
    return x if x.dtype == dtype else saturated(x, dtype).to(dtype)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x cut off at the largest numbers of a precision."""
    largest = torch.finfo(dtype).max
    return x.clamp(-largest, largest)
