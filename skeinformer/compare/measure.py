"""Time and error, each measured in one way for every method.

`approx` and `exact` are attention outputs of shape (b, h, n, p); errors come per example and head, in float64.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


class Quartiles(NamedTuple):
    """The middle of a few measurements and the range that holds half of them."""

    median: float
    q25: float
    q75: float


def interleaved(
    fns: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    on_round: Callable[[int, dict[str, list[float]]], None] | None = None,
    setup: Mapping[str, Callable[[], object]] = {},
) -> dict[str, list[float]]:
    """Seconds of every function in each of `rounds` rounds.

    A round calls each function once, in one process, and the next round starts with the next function: a machine that
    slows down or warms up does so for all alike. `warmup` rounds come first and are not counted.
    `on_round(number, seconds so far)` is called after each counted round, from 1. What `setup` has under the name of a
    function is called before it and not timed.
    """
    names = list(fns)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warmup, rounds):
        first = number % len(names) if names else 0
        for name in names[first:] + names[:first]:
            if name in setup:
                setup[name]()
            elapsed = _seconds(fns[name])
            if number >= 0:
                seconds[name].append(elapsed)
        if number >= 0 and on_round is not None:
            on_round(number + 1, seconds)
    return seconds


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles, interpolated between neighbours."""
    q25, median, q75 = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.5, 0.75])
    return Quartiles(float(median), float(q25), float(q75))


def ratio(times: Sequence[float], reference: Sequence[float]) -> Quartiles:
    """Median and quartiles of times / reference, round by round: what slows a round down cancels."""
    if len(times) != len(reference):
        raise ValueError(f"{len(times)} times but {len(reference)} of the reference; measure both in the same rounds")
    return quartiles([x / y for x, y in zip(times, reference, strict=True)])


def relative_error(approx: Tensor, exact: Tensor, query_mask: Tensor | None = None) -> Tensor:
    """|approx - exact|_F / |exact|_F over the real rows: (b, h), float64.

    `query_mask` (b, n), True = real. Both zero gives 0.
    """
    return frobenius_error(approx, exact, query_mask, relative=True)


def frobenius_error(
    approx: Tensor, exact: Tensor, query_mask: Tensor | None = None, *, relative: bool = False
) -> Tensor:
    """|approx - exact|_F, divided by |exact|_F if `relative`: (b, h), float64."""
    approx, exact = _rows(approx, query_mask), _rows(exact, query_mask)
    error = _frobenius_norm(approx - exact)
    return _quotient(error, _frobenius_norm(exact)) if relative else error


def spectral_error(approx: Tensor, exact: Tensor, query_mask: Tensor | None = None, *, relative: bool = True) -> Tensor:
    """|approx - exact|_2, divided by |exact|_2 if `relative`: (b, h), float64.

    The loss of Chen et al. (2022), Section 5, which reports it undivided. The norm is the root of the largest
    eigenvalue of the p x p Gram matrix: O(n p^2), no decomposition of an n x p matrix.
    """
    approx, exact = _rows(approx, query_mask), _rows(exact, query_mask)
    error = _spectral_norm(approx - exact)
    return _quotient(error, _spectral_norm(exact)) if relative else error


def row_error(approx: Tensor, exact: Tensor) -> Tensor:
    """The largest row of approx - exact over the largest row of exact, in the Euclidean norm: (b, h), float64."""
    approx, exact = _rows(approx, None), _rows(exact, None)
    return _quotient((approx - exact).norm(dim=-1).amax(-1), exact.norm(dim=-1).amax(-1))


def mean_cosine(approx: Tensor, exact: Tensor) -> Tensor:
    """The mean over rows of the cosine between a row of approx and that row of exact: (b, h), float64."""
    return F.cosine_similarity(_rows(approx, None), _rows(exact, None), dim=-1).mean(-1)


def exact_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(p)) V in float64: what errors are measured against. Time O(n^2 p), memory O(n p)."""
    return F.scaled_dot_product_attention(query.double(), key.double(), value.double())


def input_gradients(run: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """Gradients of <run(*inputs), upstream> with respect to each input; zeros for one that is not used."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = run(*leaves)
    return torch.autograd.grad(output, leaves, upstream.to(output.dtype), materialize_grads=True)


def finite(x: Tensor) -> float | None:
    """The number that `x` holds, or None where JSON has no such number."""
    return float(x) if torch.isfinite(x) else None


def _rows(x: Tensor, query_mask: Tensor | None) -> Tensor:
    x = x.detach().double()
    return x if query_mask is None else x.masked_fill(~query_mask[:, None, :, None], 0)


def _quotient(error: Tensor, norm: Tensor) -> Tensor:
    return (error / norm).masked_fill((error == 0) & (norm == 0), 0)


def _frobenius_norm(x: Tensor) -> Tensor:
    return x.square().sum((-2, -1)).sqrt()


def _spectral_norm(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.eigvalsh(x.mT @ x)[..., -1]  # of (b, h, p, p)
    return largest.clamp(min=0).sqrt()


def _seconds(fn: Callable[[], object]) -> float:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
