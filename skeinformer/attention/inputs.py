"""The inputs of an attention, checked once for all methods: shapes, masks, precision, noise.

The letters of Chen et al. (2022), used throughout the package:

    b  batch        h  heads             n  tokens (queries; keys where the two differ: n_k)
    m  real tokens  p  head width        d  sketch size, `budget`
    s  scale, 1/sqrt(p) by default       J  pilot rows, J' selected columns
    A = exp(s Q K^T), D = diag(A 1), B = D^-1 A = softmax(s Q K^T); the output R approximates B V

Masks are boolean, (b, n), True = real; padding may lie anywhere. Padded keys become zeros here, so that not even a NaN
in them can leak. Rows of padded queries are zero.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.checks import check_number
from skeinformer.distributed.world import ALONE, World
from skeinformer.kernels.choice import all_true, is_captured
from skeinformer.noise import Rand, only_shapes

CHECK_SEED = 0x5DEECE66D  # a seed that no layer has: where noise is an argument, check rows must not depend on it
DIMENSIONS = "four dimensions (batch, heads, tokens, width)"
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Noise = tuple[Tensor, ...]
DrawNoise = Callable[[Tensor, Tensor, Rand], Noise]


class Inputs(NamedTuple):
    """Checked tensors: one dtype, padding zeroed, masks broadcastable over heads."""

    query: Tensor  # (b, h, n, p)
    key: Tensor  # (b, h, n_k, p)
    value: Tensor  # (b, h, n_k, p_v)
    key_mask: Tensor | None  # (b, 1, n_k)
    query_mask: Tensor | None  # (b, 1, n)
    scale: float
    world: World = ALONE


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
) -> Inputs:
    """Check shapes, dtypes, devices and masks, and set padding to zero."""
    for name, x in {"query": query, "key": key, "value": value}.items():
        check_tensor(name, x)
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {DIMENSIONS}, each >= 1")
    check_shapes(query, key, value)
    if torch.amp.is_autocast_available(query.device.type) and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) if x.dtype in DTYPES[:3] else x for x in (query, key, value))
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        expected = "expected one of float16, bfloat16, float32, float64, the same for all: convert with .to(dtype)"
        raise TypeError(f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; {expected}")
    key_mask = check_mask("key_mask", key_mask, key, "keys")
    query_mask = check_mask("query_mask", query_mask, query, "queries")
    if key_mask is not None:
        padding = ~key_mask[..., None]  # (b, 1, n_k, 1)
        key, value = key.masked_fill(padding, 0), value.masked_fill(padding, 0)
    query = clear_padding(query, query_mask)
    check_scale(scale)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    return Inputs(query, key, value, key_mask, query_mask, scale)


def check_scale(scale: object) -> None:
    """Raise unless the scale is a finite number or None; in a graph it may be a symbol."""
    if scale is not None and not is_captured():
        check_number("scale", scale, "a finite number, or None for 1/sqrt(p)")


def check_tensor(name: str, x: object) -> None:
    """Raise unless x is a tensor of four dimensions."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if x.dim() != 4:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {DIMENSIONS}")


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise a ValueError that names the first of query, key, value that does not fit, and how."""
    b, h, _, p = query.shape
    if key.shape[:2] != (b, h) or key.shape[-1] != p:
        expected = f"({b}, {h}, keys, {p}) to match the query's {tuple(query.shape)}"
        raise ValueError(f"key has shape {tuple(key.shape)}, expected {expected}")
    if value.shape[:3] != key.shape[:3]:
        expected = f"({b}, {h}, {key.shape[2]}, width) to match the key's {tuple(key.shape)}"
        raise ValueError(f"value has shape {tuple(value.shape)}, expected {expected}")
    if not query.device == key.device == value.device:
        devices = f"{query.device}, {key.device}, {value.device}"
        raise ValueError(f"query, key and value are on {devices}; move them to one device")


def check_mask(name: str, mask: Tensor | None, x: Tensor, tokens: str) -> Tensor | None:
    """Return a (b, n) boolean mask as (b, 1, n); None where there is no mask, or it is known to be True everywhere."""
    if mask is None:
        return None
    expected = (x.shape[0], x.shape[2])
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"{name} is {kind}, expected a boolean tensor, True = real; convert with mask.bool()")
    if tuple(mask.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}, expected {expected} = (batch, {tokens})")
    if mask.device != x.device:
        raise ValueError(f"{name} is on {mask.device}, the tensors are on {x.device}; move it with mask.to(device)")
    return None if all_true(mask) else mask[:, None]


def check_source(
    draw_noise: DrawNoise, query: Tensor, key: Tensor, noise: Noise | None, generator: torch.Generator | None
) -> None:
    """Raise unless the noise or the generator of a call, if there is one, fits these tensors."""
    device = query.device
    if noise is not None:
        if generator is not None:
            raise ValueError("both noise and generator were given; the noise is all there is to draw, leave one out")
        check_noise(noise, draw_noise(query, key, only_shapes((query.shape[0], query.shape[1]))), device)
    elif generator is not None:
        if not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
        if generator.device.type != device.type:
            where = f"generator is on {generator.device}, the tensors are on {device}"
            raise ValueError(f"{where}; make one on that device")


def check_noise(noise: object, expected: Noise, device: torch.device) -> None:
    """Raise unless `noise` is a tuple of float tensors with the shapes of `expected`."""
    advice = "draw it with the module's sample_noise"
    if not isinstance(noise, tuple | list) or not all(isinstance(x, Tensor) and x.is_floating_point() for x in noise):
        raise TypeError(f"noise must be a tuple of floating point tensors in (0, 1); {advice}")
    shapes, expected_shapes = ([tuple(x.shape) for x in tensors] for tensors in (noise, expected))
    if shapes != expected_shapes:
        fields = getattr(expected, "_fields", None)
        names = f" ({', '.join(fields)})" if fields else ""
        raise ValueError(f"noise has shapes {shapes}, expected {expected_shapes}{names}; {advice}")
    if any(x.device != device for x in noise):
        raise ValueError(f"noise is not on {device}, where the tensors are; move it with .to(device)")


def clear_padding(x: Tensor, mask: Tensor | None) -> Tensor:
    """Set the rows of padding to zero: (b, h, n, p), (b, 1, n)."""
    return x if mask is None else x.masked_fill(~mask[..., None], 0)
