"""How large must d be? The paper leaves it open; the certificate answers it on the inputs at hand."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from skeinformer.attention.certificate import ExactRows, Info, bound_of_mean, estimate_error, exact_rows
from skeinformer.attention.check_rows import Checks, draw_checks, row_mass, rows_to_draw
from skeinformer.attention.cluster import cluster_attention
from skeinformer.attention.inputs import Inputs, clear_padding, prepare
from skeinformer.checks import check_choice, check_count, check_number
from skeinformer.kernels.choice import no_autocast
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import from_generator

CHECKS_OF_CHOICE = 64  # rows that all sizes are judged by: they are computed once
# so many draws have to meet the tolerance. If one exceeds it with probability p, these meet it and the next does not
# with p (1 - p)^12, at most 12^12 / 13^13 = 0.029 for each size
NUM_DRAWS = 12


def choose_budget(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tolerance: float,
    statistic: Literal["worst", "mean"] = "worst",
    attention: Callable[..., Any] = cluster_attention,
    generator: torch.Generator | None = None,
    num_checks: int = CHECKS_OF_CHOICE,
    **options: Any,
) -> int:
    """Return the smallest power of two d whose bound of the error is at most `tolerance` in twelve draws of the sketch.

    The bound is `error_upper` of the certificate. Where no d below the number of keys will do, warns and returns that
    number. Time: that of `attention` at each d = 1, 2, 4, ... up to the answer; exact rows are computed once.

    Args:
        query, key, value: (b, h, n, p), (b, h, n_k, p) and (b, h, n_k, p_v).
        tolerance: The relative error that is accepted, such as 0.1.
        statistic: "worst" for the bound of the worst example and head, "mean" for that of their mean.
        attention: The functional form of a method, by default the cluster sketch.
        generator: Where draws come from; torch's global state by default.
        num_checks: How many exact rows the sizes are judged by.
        **options: Go to `attention`: masks, pilots and the rest.

    Returns:
        The budget.

    Raises:
        ValueError: The tolerance is not above 0, or there is a group.
        TypeError: An option is one that `choose_budget` sets itself.

    Example:
        >>> budget = choose_budget(q, k, v, tolerance=0.1)
        >>> output = cluster_attention(q, k, v, budget=budget)
    """
    if not check_number("tolerance", tolerance, "above 0, a relative error such as 0.1") > 0:
        raise ValueError(f"tolerance must be above 0, a relative error such as 0.1, got {tolerance}")
    check_choice("statistic", statistic, ("worst", "mean"))
    check_count("num_checks", num_checks)
    for reserved in ("budget", "return_info", "noise"):
        if reserved in options:
            raise TypeError(f"choose_budget sets {reserved!r} itself; leave it out")
    if options.get("group") is not None:
        raise ValueError("choose_budget works in one process, on tokens that are all here; leave the group out")
    inputs = prepare(query, key, value, options.get("key_mask"), options.get("query_mask"), options.get("scale"))
    device = query.device if generator is None else generator.device
    seeds = torch.randint(2**62, (1 + NUM_DRAWS,), generator=generator, device=device).tolist()

    @torch.no_grad()
    def draw(budget: int, seed: int) -> Tensor:
        numbers = torch.Generator(query.device).manual_seed(seed)
        output: Tensor = attention(query, key, value, budget=budget, generator=numbers, **options)
        return clear_padding(output, inputs.query_mask)

    judge: tuple[Checks, Tensor] | None = None
    d, n, bound = 1, key.shape[-2], float("inf")
    while d < n:
        for seed in seeds[1:]:  # the next only where this one meets the tolerance
            output = draw(d, seed)
            judge = judge or draw_judge(inputs, output, seeds[0], num_checks)
            checks, exact = judge
            drawn = ExactRows(gather_rows(output, checks.rows.index), exact, checks.rows.is_live())
            info: Info = estimate_error(drawn, checks, None, output.isfinite().all(-1).all(-1))
            bound = float(info.error_upper.max() if statistic == "worst" else bound_of_mean(info))
            if not bound <= tolerance:
                break
        else:
            return d
        d *= 2
    if n == 1:
        return 1
    reason = f"the bound of the {statistic} error is {bound:.3g}"
    if not output.isfinite().all():
        reason = "the output is not finite: look for NaN and inf in query, key and value"
    tried = f"no power of two below n = {n} meets the tolerance {tolerance:g}: for the largest, {d // 2}, {reason}"
    warnings.warn(f"{tried}; returning {n}, all of the keys", stacklevel=2)
    return n


@torch.no_grad()
def draw_judge(inputs: Inputs, output: Tensor, seed: int, size: int) -> tuple[Checks, Tensor]:
    """Draw check rows from all real rows, by what is guessed of some output, and compute them exactly."""
    query, n = inputs.query, inputs.query.shape[-2]
    generator = torch.Generator(query.device).manual_seed(seed)
    u = from_generator(tuple(query.shape[:2]), generator=generator, device=query.device)(n)
    with no_autocast(query.device):
        mass = row_mass(inputs, output, rows_to_draw(query, inputs.query_mask, None))
        checks = draw_checks(inputs.world, u, mass, size, n)
        return checks, exact_rows(inputs, gather_rows(query, checks.rows.index))
