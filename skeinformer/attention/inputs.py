"""What enters an attention, checked once for all methods: shapes, masks, precision, noise.

The letters of Chen et al. (2022), used throughout the package:

    b  batch        h  heads             n  tokens (queries; keys where the two differ: n_k)
    m  real tokens  p  head width        d  sketch size, `budget`
    s  scale, 1/sqrt(p) by default       J  pilot rows, J' selected columns
    A = exp(s Q K^T), D = diag(A 1), B = D^-1 A = softmax(s Q K^T); the output R approximates B V

Masks are boolean, (b, n), True = real; padding may lie anywhere. Padded keys are never seen: their contents become
zeros here, so that not even a NaN in them can leak. Rows of padded queries are zero.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from skeinformer.kernels.choice import known
from skeinformer.noise import Rand, from_generator, from_seed, only_shapes

FOR_CHECKS = 0x5DEECE66D  # a seed that no layer has: where noise is given, check rows must not depend on it
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Noise = tuple[Tensor, ...] | None
N = TypeVar("N", bound=Noise)


class Passed(NamedTuple):
    """What a call is given, not checked yet; the seed is that of the module."""

    query: Tensor
    key: Tensor
    value: Tensor
    key_mask: Tensor | None
    query_mask: Tensor | None
    noise: Noise
    generator: torch.Generator | None
    seed: int | None


class Inputs(NamedTuple):
    """Checked tensors: one dtype, padding zeroed, masks broadcastable over heads."""

    query: Tensor  # (b, h, n, p)
    key: Tensor  # (b, h, n_k, p)
    value: Tensor  # (b, h, n_k, p_v)
    key_mask: Tensor | None  # (b, 1, n_k)
    query_mask: Tensor | None  # (b, 1, n)


def prepare(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None = None, query_mask: Tensor | None = None
) -> Inputs:
    """Check shapes, dtypes, devices and masks; zero what is padding."""
    tensors = {"query": query, "key": key, "value": value}
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
        if x.dim() != 4 or 0 in x.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected four dimensions (batch, heads, tokens, width), each >= 1"
            )
    check_shapes(query, key, value)
    if torch.amp.is_autocast_available(query.device.type) and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) if x.dtype in DTYPES[:3] else x for x in (query, key, value))
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise TypeError(
            f"query, key and value have dtypes {query.dtype}, {key.dtype}, {value.dtype}; "
            "expected one of float16, bfloat16, float32, float64, the same for all: convert with .to(dtype)"
        )
    key_mask = check_mask("key_mask", key_mask, key, "keys")
    query_mask = check_mask("query_mask", query_mask, query, "queries")
    if key_mask is not None:
        padding = ~key_mask[..., None]  # (b, 1, n_k, 1)
        key, value = key.masked_fill(padding, 0), value.masked_fill(padding, 0)
    if query_mask is not None:
        query = query.masked_fill(~query_mask[..., None], 0)
    return Inputs(query, key, value, key_mask, query_mask)


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise a ValueError that names the first of query, key, value that does not fit, and how."""
    b, h, _, p = query.shape
    if key.shape[:2] != (b, h) or key.shape[-1] != p:
        raise ValueError(
            f"key has shape {tuple(key.shape)}, expected ({b}, {h}, keys, {p}) to match the query's "
            f"{tuple(query.shape)}"
        )
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(
            f"value has shape {tuple(value.shape)}, expected ({b}, {h}, {key.shape[2]}, width) to match the key's "
            f"{tuple(key.shape)}"
        )
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value are on {query.device}, {key.device}, {value.device}; move them to one device"
        )


def check_mask(name: str, mask: Tensor | None, x: Tensor, tokens: str) -> Tensor | None:
    """A (b, n) boolean mask as (b, 1, n), or None; None too for a mask at hand on a CPU that says that all is real."""
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
    return None if known(mask) else mask[:, None]


def settle_noise(
    draw_noise: Callable[[Tensor, Tensor, Rand], N],
    inputs: Inputs,
    call: Passed,
) -> tuple[N, Rand]:
    """The noise given, checked; or fresh: from `generator`, else from `seed`, else from torch's global state.

    And where the certificate gets numbers from that the method has no use for.
    """
    (b, h), device = inputs.query.shape[:2], inputs.query.device
    noise, generator, seed = call.noise, call.generator, call.seed
    check_source(draw_noise, inputs.query, inputs.key, noise, generator)
    if noise is not None:
        return cast(N, noise), from_seed((b, h), FOR_CHECKS, device=device)
    if seed is not None and generator is None:
        rand = from_seed((b, h), seed, device=device)
    else:
        rand = from_generator((b, h), generator=generator, device=device)
    return draw_noise(inputs.query, inputs.key, rand), rand


def check_source(
    draw_noise: Callable[[Tensor, Tensor, Rand], Noise],
    query: Tensor,
    key: Tensor,
    noise: Noise,
    generator: torch.Generator | None,
) -> None:
    """Raise unless the noise or the generator that a call is given, if any, is one for these tensors."""
    (b, h), device = query.shape[:2], query.device
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if generator is not None and noise is not None:
        raise ValueError("both noise and generator were given; the noise is all there is to draw, leave one out")
    if noise is not None:
        check_noise(noise, draw_noise(query, key, only_shapes((b, h))), device)
    elif generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator is on {generator.device}, the tensors are on {device}; make one on that device")


def check_noise(noise: Noise, expected: Noise, device: torch.device) -> None:
    """Raise unless `noise` is a tuple of float tensors with the shapes of `expected`."""
    if not isinstance(noise, tuple | list) or not all(isinstance(x, Tensor) and x.is_floating_point() for x in noise):
        raise TypeError(
            "noise must be a tuple of floating point tensors in (0, 1); draw it with the module's sample_noise"
        )
    given = [tuple(x.shape) for x in noise]
    wanted = [tuple(x.shape) for x in expected or ()]
    if given != wanted:
        fields = getattr(expected, "_fields", None)
        names = f" ({', '.join(fields)})" if fields else ""
        raise ValueError(f"noise has shapes {given}, expected {wanted}{names}; draw it with the module's sample_noise")
    if any(x.device != device for x in noise):
        raise ValueError(f"noise is not on {device}, where the tensors are; move it with .to(device)")


def clear_padding(output: Tensor, query_mask: Tensor | None) -> Tensor:
    """Zero the rows of padded queries."""
    return output if query_mask is None else output.masked_fill(~query_mask[..., None], 0)


def default_scale(query: Tensor, scale: float | None) -> float:
    """s = 1/sqrt(p) unless given."""
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
