"""Randomness is data: uniform numbers are drawn here, and everything else is a deterministic function of them.

A `Rand` is a source already bound to its leading dimensions: `rand(n, d)` gives uniform numbers of shape
(*batch, n, d) in the open interval (0, 1). Methods ask a source for numbers once, outside the computation, and turn
them into Gumbel, normal or sign noise with the functions below. Numbers that are tensors can enter a compiled graph, be
stored, sliced by example and replayed; a `torch.Generator` cannot.
"""

from typing import Protocol, cast

import torch
from torch import Tensor

SMALLEST = 2.0**-25  # half the spacing of float32 uniform numbers: keeps log(u) finite


class Rand(Protocol):
    """A source of uniform numbers in (0, 1), shape (*batch, *shape)."""

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor: ...


def from_generator(
    batch: tuple[int, ...], *, generator: torch.Generator | None = None, device: torch.device | str | None = None
) -> Rand:
    """Fresh numbers from `generator`, or from torch's global state."""

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        u = torch.rand(*batch, *shape, generator=generator, device=device, dtype=dtype)
        return u.clamp(min=SMALLEST)

    return rand


def from_seed(batch: tuple[int, int], seed: int, *, device: torch.device | str | None = None) -> Rand:
    """The same numbers for the same seed, head and position: shared by all examples, on every device, at every length.

    Number i of a head is a hash of (seed, draw, head, i), so numbers of the first n positions do not change when the
    sequence is padded to n' > n. Successive calls are independent draws. `batch` is (b, h); the result is an expanded
    view.
    """
    b, h = batch
    draws = 0

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        nonlocal draws
        draws += 1
        size = 1
        for extent in shape:
            size *= extent
        stream = _hash(torch.arange(h, device=device) + _hash_int(seed + 0x9E3779B9 * draws))  # (h,)
        bits = _hash(_hash(torch.arange(size, device=device))[None] ^ stream[:, None])  # (h, size), 32 bits each
        if dtype == torch.float64:
            u = (bits.double() + 0.5) * 2.0**-32
        else:
            u = ((bits >> 9).to(dtype) + 0.5) * 2.0**-23
        return u.reshape(1, h, *shape).expand(b, h, *shape)

    return rand


def _hash(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers with low bias, in int64 arithmetic that never overflows."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def _hash_int(x: int) -> int:
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def gumbel(u: Tensor) -> Tensor:
    """Standard Gumbel noise: adding it to log p and taking the top d samples d of n without replacement."""
    return -torch.log(-torch.log1p(-u))


def normal(u: Tensor) -> Tensor:
    """Standard normal noise by the inverse distribution function."""
    return cast(Tensor, torch.special.ndtri(u))


def sign(u: Tensor) -> Tensor:
    """-1 or 1, each with probability 1/2."""
    return torch.where(u < 0.5, -1.0, 1.0).to(u.dtype)


def integer(u: Tensor, high: int) -> Tensor:
    """Uniform integers in [0, high). Draw u in float64 when high is large: float32 has 2^24 levels."""
    return (u * high).long().clamp(max=high - 1)
