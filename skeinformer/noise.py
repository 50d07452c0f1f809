"""Randomness is data: uniform numbers are drawn here, and everything else is a deterministic function of them.

A `Rand` is a source already bound to its leading dimensions: `rand(n, d)` gives uniform numbers of shape
(*batch, n, d) in the open interval (0, 1). Methods ask a source for numbers once, outside the computation, and turn
them into Gumbel, normal or sign noise with the functions below. Numbers that are tensors can enter a compiled graph, be
stored, sliced by example and replayed; a `torch.Generator` cannot.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

MULTIPLIERS = (0x21F0AAAD, 0x735A2D97, 0x5BD1E995, 0x2C1B3C6D)  # of the hash: odd, with well mixed bits
LAYERS = 1009  # above the number of layers: seeds of one model are not those of another
SMALLEST = 2.0**-25  # half the spacing of float32 uniform numbers: keeps log(u) finite


class Rand(Protocol):
    """A source of uniform numbers in (0, 1), shape (*batch, *shape)."""

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor: ...


class Window(NamedTuple):
    """Which of the numbers of a sequence are asked for: those from `start` on, of a `whole` that others hold too."""

    start: int
    whole: int


Windows = Sequence[Window | None]
"""For each draw, the first before the second: the part that is asked for, None for all of it."""


def from_generator(
    batch: tuple[int, ...],
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    windows: Windows = (),
) -> Rand:
    """Fresh numbers from `generator`, or from torch's global state.

    A draw with a window draws the whole, as one call for all of it would, and holds one row of it at a time.
    """
    left = list(windows)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if (window := left.pop(0) if left else None) is not None:
            (length,) = shape
            return _rows_of_window(window, length, batch, generator, device, dtype).clamp(min=SMALLEST)
        size = (*batch, *shape)
        if generator is None:  # a length that is symbolic in a compiled graph goes with no generator argument at all
            return torch.rand(size, device=device, dtype=dtype).clamp(min=SMALLEST)
        return torch.rand(size, generator=generator, device=device, dtype=dtype).clamp(min=SMALLEST)

    return rand


def _rows_of_window(
    window: Window,
    size: int,
    batch: tuple[int, ...],
    generator: torch.Generator | None,
    device: torch.device | str | None,
    dtype: torch.dtype,
) -> Tensor:
    """The window of torch.rand(*batch, whole): (*batch, size)."""
    start, whole = window
    if torch.empty(0, device=device).device.type != "cpu":  # elsewhere numbers are not drawn one after the other
        drawn = torch.rand((*batch, whole), generator=generator, device=device, dtype=dtype)
        return drawn[..., start : start + size]
    kept = torch.empty((*batch, size), dtype=dtype)
    for row in kept.view(-1, size) if size else kept.view(math.prod(batch), 0):
        row.copy_(torch.rand(whole, generator=generator, dtype=dtype)[start : start + size])
    return kept


def only_shapes(batch: tuple[int, ...]) -> Rand:
    """Tensors without contents: what a method would ask for."""

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((*batch, *shape), device="meta", dtype=dtype)

    return rand


def from_seed(
    batch: tuple[int, int], seed: int, *, device: torch.device | str | None = None, windows: Windows = ()
) -> Rand:
    """The same numbers for the same seed, head and position: shared by all examples, on every device, at every length.

    Number i of a head is a hash of (seed, draw, head, i), so numbers of the first n positions do not change when the
    sequence is padded to n' > n. The hash is a bijection: no two of the first 2^23 numbers of a head are equal (2^32
    in float64), so that nothing depends on how equals are ranked. Successive calls are independent draws. A window is
    computed without the rest. `batch` is (b, h); the result is an expanded view.
    """
    b, h = batch
    draws = 0

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        nonlocal draws
        window = windows[draws] if draws < len(windows) else None
        draws += 1
        size = 1
        for extent in shape:
            size *= extent
        bits = 32 if dtype == torch.float64 else 23  # what a number of that dtype can hold
        start = 0 if window is None else window.start
        i = torch.arange(start, start + size, device=device)
        stream = scramble(torch.arange(h, device=device) + scramble(seed + 0x9E3779B9 * draws))[:, None]  # (h, 1)
        stream = scramble(stream ^ (i >> bits))  # (h, size), constant over 2^bits successive numbers
        u = (scramble(i, bits, stream).to(dtype) + 0.5) * 2.0**-bits  # (h, size)
        return u.reshape(1, h, *shape).expand(b, h, *shape)

    return rand


T = TypeVar("T", int, Tensor)


def scramble(x: T, bits: int = 32, key: T | int = 0) -> T:
    """A bijection of integers below 2^bits for every key, close to random; int64 arithmetic that never overflows.

    Every line reads what it made twice. Torch's compiler would write that out, and take a time that is exponential in
    their number: in a compiled graph this is one operation.
    """
    if isinstance(x, Tensor) and torch.compiler.is_compiling():
        return cast(
            Tensor, _scramble(x, bits, key if isinstance(key, Tensor) else torch.full((), key, device=x.device))
        )
    return _hash(x, bits, key)


def _hash(x: T, bits: int, key: T | int) -> T:
    limit = (1 << bits) - 1
    for multiplier in MULTIPLIERS:
        x = (x ^ key) & limit
        x = ((x ^ (x >> (bits // 2))) * multiplier) & limit
        key = key >> 3
    return x ^ (x >> (bits // 2))


@torch.library.custom_op("skeinformer::scramble", mutates_args=())
def _scramble(x: Tensor, bits: int, key: Tensor) -> Tensor:
    return _hash(x, bits, key)


@_scramble.register_fake
def _(x: Tensor, bits: int, key: Tensor) -> Tensor:
    return x ^ key


def gumbel(u: Tensor) -> Tensor:
    """Standard Gumbel noise: adding it to log p and taking the top d samples d of n without replacement."""
    return -torch.log(-torch.log1p(-u.clamp(SMALLEST, 1 - 2 * SMALLEST)))


def normal(u: Tensor) -> Tensor:
    """Standard normal noise by the inverse distribution function."""
    return cast(Tensor, torch.special.ndtri(u))


def sign(u: Tensor) -> Tensor:
    """-1 or 1, each with probability 1/2."""
    return torch.where(u < 0.5, -1.0, 1.0).to(u.dtype)


def integer(u: Tensor, high: int) -> Tensor:
    """Uniform integers in [0, high). Draw u in float64 when high is large: float32 has 2^24 levels."""
    return (u * high).long().clamp(max=high - 1)


def layer_seed(seed: int | None, layer: int) -> int | None:
    """The seed of a layer of a model: one rule, wherever layers are made.

    `seed * 1009 + layer`. None, which draws anew, stays None, and what is no whole number is left to be refused.
    """
    return seed * LAYERS + layer if type(seed) is int else seed
