"""Time and error, measured in one way for every method."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Value = str | int | float | bool | None
Record = dict[str, Value]
"""One flat JSON object, which measurements write and reports read."""


class Quartiles(NamedTuple):
    median: float
    q25: float
    q75: float


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warmup: int = 1,
    on_round: Callable[[int, dict[str, list[float]]], None] | None = None,
    setup: Mapping[str, Callable[[], object]] = {},
) -> dict[str, list[float]]:
    """Measure the seconds that every function takes in each of `rounds` rounds, after `warmup` that do not count.

    A round calls each function once, and the next round starts with the next one: a machine that slows down does so for
    all alike. `on_round(number, seconds so far)` follows each round, and a function's `setup` comes before it untimed.
    """
    names = list(functions)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    for number in range(-warmup, rounds):
        first = number % len(names) if names else 0
        for name in names[first:] + names[:first]:
            setup.get(name, lambda: None)()
            wait()
            start = time.perf_counter()
            functions[name]()
            wait()
            if number >= 0:
                seconds[name].append(time.perf_counter() - start)
        if number >= 0 and on_round is not None:
            on_round(number + 1, seconds)
    return seconds


def quartiles(values: Sequence[float]) -> Quartiles:
    """Compute the median and the quartiles, interpolated between neighbours."""
    q25, median, q75 = np.quantile(np.asarray(values, dtype=np.float64), [0.25, 0.5, 0.75])
    return Quartiles(float(median), float(q25), float(q75))


def ratio(times: Sequence[float], reference: Sequence[float]) -> Quartiles:
    """Compute the quartiles of times / reference, round by round: what slows a round down cancels."""
    if len(times) != len(reference):
        raise ValueError(f"{len(times)} times but {len(reference)} of the reference; measure both in the same rounds")
    return quartiles([x / y for x, y in zip(times, reference, strict=True)])


def frobenius_error(approx: Tensor, exact: Tensor, query_mask: Tensor | None = None) -> Tensor:
    """|approx - exact|_F, (b, h), of outputs (b, h, n, p) over the real rows by `query_mask` (b, n), in float64."""
    return (real_rows(approx, query_mask) - real_rows(exact, query_mask)).square().sum((-2, -1)).sqrt()


def real_rows(x: Tensor, query_mask: Tensor | None = None) -> Tensor:
    """Return x in float64 without gradient, its padded rows 0."""
    x = x.detach().double()
    return x if query_mask is None else x.masked_fill(~query_mask[:, None, :, None], 0)
