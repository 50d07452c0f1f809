"""Time and error, each measured in one way for every method.

`approx` and `exact` are attention outputs of shape (b, h, n, p); errors come per example and head, in float64.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


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


def frobenius_error(approx: Tensor, exact: Tensor, query_mask: Tensor | None = None) -> Tensor:
    """|approx - exact|_F over the real rows: (b, h), float64. `query_mask` (b, n), True = real."""
    return (real_rows(approx, query_mask) - real_rows(exact, query_mask)).square().sum((-2, -1)).sqrt()


def real_rows(x: Tensor, query_mask: Tensor | None = None) -> Tensor:
    """x in float64 and without gradient, its padded rows 0."""
    x = x.detach().double()
    return x if query_mask is None else x.masked_fill(~query_mask[:, None, :, None], 0)


def _seconds(fn: Callable[[], object]) -> float:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    fn()
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start
