"""The contract of every attention, written once: checks, masks, precision, noise and errors.

The letters of Chen et al. (2022), used throughout the package:

    b  batch        h  heads             n  tokens (queries; keys where the two differ: n_k)
    m  real tokens  p  head width        d  sketch size, `budget`
    s  scale, 1/sqrt(p) by default       J  pilot rows, J' selected columns
    A = exp(s Q K^T), D = diag(A 1), B = D^-1 A = softmax(s Q K^T); the output R approximates B V

Masks are boolean, (b, n), True = real; padding may lie anywhere. Padded keys are never seen: their contents become
zeros here, so that not even a NaN in them can leak. Rows of padded queries are zero.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from skeinformer.noise import Rand, from_generator, from_seed, only_shapes
from skeinformer.registry import check_count
from skeinformer.kernels.rows import plain_cpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Noise = tuple[Tensor, ...] | None
N = TypeVar("N", bound=Noise)


class Inputs(NamedTuple):
    """Checked tensors: one dtype, padding zeroed, masks broadcastable over heads."""

    query: Tensor  # (b, h, n, p)
    key: Tensor  # (b, h, n_k, p)
    value: Tensor  # (b, h, n_k, p_v)
    key_mask: Tensor | None  # (b, 1, n_k)
    query_mask: Tensor | None  # (b, 1, n)


class Attention(nn.Module, ABC):
    """Attention with a fixed contract: a method writes `attend`, and `draw_noise` and `check` if it needs them.

    head_dim: p, the width of queries and keys. max_len: the longest sequence, for methods with parameters per position.
    budget: the sketch size, the same for every method. seed: with one, evaluation is deterministic: the noise is drawn
    per position and head and shared by all examples, so that neither batch mates nor right padding change a result
    (a method that cannot keep this says so).
    """

    def __init__(
        self, *, head_dim: int, max_len: int | None = None, budget: int = 256, seed: int | None = None
    ) -> None:
        super().__init__()
        check_count("head_dim", head_dim)
        check_count("budget", budget)
        if max_len is not None:
            check_count("max_len", max_len)
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int)):
            raise TypeError(f"seed must be an integer or None, got {seed!r} of type {type(seed).__name__}")
        self.head_dim = head_dim
        self.max_len = max_len
        self.budget = budget
        self.seed = seed

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        noise: Noise = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """(b, h, n, p), (b, h, n_k, p), (b, h, n_k, p_v) -> (b, h, n, p_v)."""
        inputs, noise = self.settle(query, key, value, key_mask, query_mask, noise, generator)
        with no_autocast(query.device):
            output = self.attend(*inputs, noise)
        return clear_padding(output, inputs.query_mask)

    def settle(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        noise: Noise,
        generator: torch.Generator | None,
    ) -> tuple[Inputs, Noise]:
        """The inputs checked, also against this module, and the noise of the call."""
        inputs = prepare(query, key, value, key_mask, query_mask)
        if query.shape[-1] != self.head_dim:
            raise ValueError(f"query has head width {query.shape[-1]}, but this module was built with {self.head_dim=}")
        self.check(query, key, value)
        return inputs, settle_noise(self.draw_noise, inputs, noise, generator, self.seed_in_force())

    def seed_in_force(self) -> int | None:
        """The seed that decides the noise of a call without noise or generator: none in training."""
        return None if self.training else self.seed

    def sample_noise(self, query: Tensor, key: Tensor, *, generator: torch.Generator | None = None) -> Noise:
        """Noise for `forward` on such inputs: from `generator`, else from torch's global state."""
        return self.draw_noise(
            query, key, from_generator(tuple(query.shape[:2]), generator=generator, device=query.device)
        )

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise a ValueError where the method cannot take these tensors; most take all."""

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Uniform numbers that `attend` turns into its random choices: a NamedTuple, leading dimensions (b, h)."""
        return None

    @abstractmethod
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        noise: Any,
    ) -> Tensor:
        """The method itself, on inputs that are checked: masks are (b, 1, n) or None, padded keys and values are 0."""

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, budget={self.budget}"


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
    return None if plain_cpu(mask) and bool(mask.all()) else mask[:, None]


def settle_noise(
    draw_noise: Callable[[Tensor, Tensor, Rand], N],
    inputs: Inputs,
    noise: Noise,
    generator: torch.Generator | None = None,
    seed: int | None = None,
) -> N:
    """The noise given, checked; or fresh: from `generator`, else from `seed`, else from torch's global state."""
    batch, device = inputs.query.shape[:2], inputs.query.device
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator or None, got {type(generator).__name__}")
    if generator is not None and noise is not None:
        raise ValueError("both noise and generator were given; the noise is all there is to draw, leave one out")
    if noise is not None:
        check_noise(noise, draw_noise(inputs.query, inputs.key, only_shapes(tuple(batch))), device)
        return cast(N, noise)
    if generator is not None and generator.device.type != device.type:
        raise ValueError(f"generator is on {generator.device}, the tensors are on {device}; make one on that device")
    if seed is not None and generator is None:
        rand = from_seed((batch[0], batch[1]), seed, device=device)
    else:
        rand = from_generator(tuple(batch), generator=generator, device=device)
    return draw_noise(inputs.query, inputs.key, rand)


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


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off: `prepare` has cast the inputs, and statistics keep their precision."""
    available = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if available else nullcontext()


def default_scale(query: Tensor, scale: float | None) -> float:
    """s = 1/sqrt(p) unless given."""
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale
