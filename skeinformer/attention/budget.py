"""How large must d be? The paper leaves it open; the certificate answers it on the inputs at hand."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from skeinformer.attention.inputs import prepare
from skeinformer.attention.skein import skein_attention
from skeinformer.registry import check_choice, check_number


def choose_budget(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tolerance: float,
    statistic: Literal["worst", "mean"] = "worst",
    attention: Callable[..., Any] = skein_attention,
    generator: torch.Generator | None = None,
    **options: Any,
) -> int:
    """The smallest power of two d whose estimated relative error plus two standard errors is at most `tolerance`.

    The estimate is the certificate's, of the worst example and head, or of their mean. `options` go to `attention`:
    masks, pilots and the rest. Where no d below the number of keys will do, warns and returns that number.
    Time: that of `attention` with its certificate at each d = 1, 2, 4, ... up to the answer.
    """
    if not check_number("tolerance", tolerance, "above 0, a relative error such as 0.1") > 0:
        raise ValueError(f"tolerance must be above 0, a relative error such as 0.1, got {tolerance}")
    check_choice("statistic", statistic, ("worst", "mean"))
    for reserved in ("budget", "return_info", "noise"):
        if reserved in options:
            raise TypeError(f"choose_budget sets {reserved!r} itself; leave it out")
    if options.get("group") is not None:
        raise ValueError("choose_budget works in one process, on tokens that are all here; leave the group out")
    prepare(query, key, value)
    d, n, reached = 1, key.shape[-2], float("inf")
    while d < n:
        with torch.no_grad():
            _, info = attention(query, key, value, budget=d, return_info=True, generator=generator, **options)
        reached = _upper(info.error, info.error_se, statistic)
        if reached <= tolerance:
            return d
        d *= 2
    if n == 1:
        return 1
    warnings.warn(
        f"no power of two below n = {n} meets the tolerance {tolerance:g}: the largest, {d // 2}, reached "
        f"{reached:.3g} ({statistic} error plus two standard errors); returning {n}, all of the keys",
        stacklevel=2,
    )
    return n


def _upper(error: Tensor, error_se: Tensor, statistic: str) -> float:
    """The estimate plus two standard errors, of the worst example and head or of the mean over them."""
    if statistic == "worst":
        return float((error + 2 * error_se).max())
    return float(error.mean() + 2 * error_se.square().sum().sqrt() / error_se.numel())
