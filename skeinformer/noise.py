"""Uniform random numbers, and the distributions that are computed from them.

Every random choice is a deterministic function of uniform numbers in (0, 1). A method draws all of them before it
computes, as ordinary tensors, which can enter a compiled graph, be saved and be used again.

Sources of numbers have in common: `batch`, the leading dimensions of all draws, such as (batch, heads), and `windows`,
the part to return of each draw, in their order; None, or a missing entry, stands for the full sequence.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

MULTIPLIERS = (0x21F0AAAD, 0x735A2D97, 0x5BD1E995, 0x2C1B3C6D)  # of the hash: odd, with well mixed bits
LAYERS = 1009  # more than the layers of a model, so that models with different seeds share no layer's seed
SMALLEST = 2.0**-25  # half the spacing of float32 uniform numbers: keeps log(u) finite

T = TypeVar("T", int, Tensor)


class Rand(Protocol):
    """A function that draws uniform numbers in (0, 1): `rand(n, d)` has shape (*batch, n, d) for a fixed `batch`."""

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor: ...


class Window(NamedTuple):
    """The part of a sequence that this process holds: it begins at number `start` of `total` numbers."""

    start: int
    total: int


Windows = Sequence[Window | None]
Device = torch.device | str | None


def from_generator(
    batch: tuple[int, ...], *, generator: torch.Generator | None = None, device: Device = None, windows: Windows = ()
) -> Rand:
    """Return a function that draws fresh uniform numbers from a generator, or from torch's global one if it is None.

    A draw with a window advances the generator as a draw of the full sequence does: processes with equal generators
    hold parts of the same numbers. On a CPU only one row of the full sequence is in memory at a time.
    """
    # in a compiled graph a symbolic length does not allow the argument `generator` at all
    options: dict[str, Any] = {"device": device} if generator is None else {"device": device, "generator": generator}
    upcoming = iter(windows)

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        window = next(upcoming, None)
        if window is None:
            return torch.rand((*batch, *shape), dtype=dtype, **options).clamp(min=SMALLEST)
        (length,), (start, total) = shape, window
        columns = slice(start, start + length)
        if torch.empty(0, device=device).device.type != "cpu":  # a CPU alone draws the numbers of a tensor in order
            return torch.rand((*batch, total), dtype=dtype, **options)[..., columns].clamp(min=SMALLEST)
        part = torch.empty((*batch, length), dtype=dtype)
        for row in part.view(math.prod(batch), length):
            row.copy_(torch.rand(total, dtype=dtype, **options)[columns])
        return part.clamp_(min=SMALLEST)

    return rand


def only_shapes(batch: tuple[int, ...]) -> Rand:
    """Return a function that draws tensors without contents, on the meta device, to learn which shapes are needed."""
    return lambda *shape, dtype=torch.float32: torch.empty((*batch, *shape), device="meta", dtype=dtype)


def from_seed(batch: tuple[int, int], seed: int, *, device: Device = None, windows: Windows = ()) -> Rand:
    """Return a function that draws the same numbers for the same seed, on every device and at every length.

    Number i of a head is a hash of (seed, draw, head, i): all examples share their numbers, as views, and padding does
    not change those of the first n positions. The hash is a bijection: no two of the first 2^23 numbers of a head are
    equal (2^32 in float64), so no result depends on how ties are ranked. A window is computed without the rest.

    Example:
        >>> short, long = from_seed((1, 2), 0)(4), from_seed((8, 2), 0)(9)
        >>> torch.equal(short[0], long[7, :, :4])
        True
    """
    b, h = batch
    draws = 0

    def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        nonlocal draws
        window = windows[draws] if draws < len(windows) else None
        draws += 1
        bits = 32 if dtype == torch.float64 else 23  # as many as a number of this dtype can hold
        start = 0 if window is None else window.start
        i = torch.arange(start, start + math.prod(shape), device=device)
        stream = scramble(torch.arange(h, device=device) + scramble(seed + 0x9E3779B9 * draws))[:, None]  # (h, 1)
        stream = scramble(stream ^ (i >> bits))  # (h, size), constant over 2^bits successive numbers
        u = (scramble(i, bits, stream).to(dtype) + 0.5) * 2.0**-bits  # (h, size)
        return u.reshape(1, h, *shape).expand(b, h, *shape)

    return rand


def scramble(x: T, bits: int = 32, key: T | int = 0) -> T:
    """Hash integers below 2^bits: for every key a bijection, close to random, in int64 arithmetic without overflow."""
    if isinstance(x, Tensor) and torch.compiler.is_compiling():
        return cast(Tensor, _scramble(x, bits, torch.as_tensor(key, device=x.device)))
    return _hash(x, bits, key)


def _hash(x: T, bits: int, key: T | int) -> T:
    # each line reads its operand twice, which takes torch's compiler a time exponential in the number of lines: in a
    # compiled graph (of `certify`; other calls draw inside one operation) this is one operation
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
    """Turn uniform into standard Gumbel numbers: the top d of log p + Gumbel are d of n drawn without replacement."""
    return -torch.log(-torch.log1p(-u.clamp(SMALLEST, 1 - 2 * SMALLEST)))


def normal(u: Tensor) -> Tensor:
    """Turn uniform into standard normal numbers by the inverse distribution function."""
    return cast(Tensor, torch.special.ndtri(u))


def sign(u: Tensor) -> Tensor:
    """Turn uniform numbers into -1 or 1, each with probability 1/2."""
    return torch.where(u < 0.5, -1.0, 1.0).to(u.dtype)


def integer(u: Tensor, high: int) -> Tensor:
    """Turn uniform numbers into integers in [0, high). For a large `high` use float64: float32 has 2^24 levels."""
    return (u * high).long().clamp(max=high - 1)


def layer_seed(seed: int | None, layer: int) -> int | None:
    """Return the seed of a layer, `1009 seed + layer`. None (fresh draws), and what is no int, stays as it is."""
    return seed * LAYERS + layer if type(seed) is int else seed
