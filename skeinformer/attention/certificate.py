"""The certificate: an estimate of the error of an attention output, from rows that nothing else depends on.

Check rows are drawn uniformly from the real queries that are not pilots (the next ranks of the pilots' noise) and
computed exactly. They choose no columns and enter no output, so they see the error as any other row does:

    error^2 = (share of rows that are not exact) * mean_checks |R_j - E_j|^2 / mean_{pilots and checks} |E_j|^2

estimates |R - BV|_F^2 / |BV|_F^2 per example and head. The standard error is the jackknife's over checks and pilots,
with finite population corrections: a check of every row leaves no doubt.
"""

import torch
from torch import Tensor

from skeinformer.attention.pilots import Pilots, Selection, uniform_rows
from skeinformer.attention.virtual_keys import VirtualKeys, attend, statistics_dtype
from skeinformer.sketch.base import gather_rows


def draw_checks(u: Tensor, mask: Tensor | None, num_pilots: int, num_checks: int, *, pilots_exact: bool) -> Selection:
    """The `num_checks` ranks of u after the first `num_pilots`.

    Where too few real rows are left: none of the pilots if their rows are exact in the output, else the last ranks.
    """
    ranked = uniform_rows(u, mask, num_pilots + num_checks)  # (b, h, r), r <= P + C
    real = ranked.live.sum(-1, keepdim=True)  # (b, h, 1)
    rank = torch.arange(num_checks, device=u.device) + (real - num_checks).clamp(0, num_pilots)  # (b, h, C)
    live = (rank < real) & (rank >= num_pilots if pilots_exact else rank >= 0)
    index = ranked.indices.gather(-1, rank.clamp(max=ranked.indices.shape[-1] - 1))
    return Selection(index, live)


@torch.no_grad()
def estimate_error(
    output: Tensor,
    query: Tensor,
    query_mask: Tensor | None,
    source: VirtualKeys,
    checks: Selection,
    pilots: Pilots | None,
    scale: float,
    *,
    pilots_exact: bool,
) -> tuple[Tensor, Tensor]:
    """(error, standard error), each (b, h), of an output whose exact counterpart is attention over `source`.

    Time O(C n p). The standard error is inf where a single check row stands for several.
    """
    dtype = statistics_dtype(output)
    exact = attend(gather_rows(query, checks.indices), source, scale).to(dtype)  # (b, h, C, p_v)
    missed = _squared_norms(gather_rows(output, checks.indices).to(dtype) - exact, checks.live)  # (b, h, C)
    checked = _squared_norms(exact, checks.live)
    if pilots is None:
        piloted, pilot_live = checked[..., :0], checks.live[..., :0]
    else:
        piloted, pilot_live = _squared_norms(pilots.output.to(dtype), pilots.rows.live), pilots.rows.live
    n = query.shape[-2] * torch.ones_like(missed[..., 0]) if query_mask is None else query_mask.sum(-1).to(dtype)
    inexact = n - pilot_live.sum(-1) if pilots_exact else n.expand(missed.shape[:-1])  # (b, h)
    error, check_variance, pilot_variance = _jackknife(missed, checked, checks.live, piloted, pilot_live, inexact / n)
    num_checks = checks.live.sum(-1)  # (b, h)
    check_correction = (1 - num_checks / inexact).clamp(min=0)
    pilot_correction = (1 - (num_checks + pilot_live.sum(-1)) / n).clamp(min=0)
    variance = (check_correction * check_variance).where(check_correction > 0, 0) + pilot_correction * pilot_variance
    known = inexact <= 0
    return error.masked_fill(known, 0), variance.sqrt().masked_fill(known, 0)


def _squared_norms(x: Tensor, live: Tensor) -> Tensor:
    return x.square().sum(-1).where(live, 0)


def _jackknife(
    missed: Tensor, checked: Tensor, check_live: Tensor, piloted: Tensor, pilot_live: Tensor, share: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """sqrt(share * mean(missed) / mean(checked and piloted)), its variance from checks and from pilots: each (b, h)."""
    num_checks, num_pilots = (live.sum(-1, keepdim=True) for live in (check_live, pilot_live))  # (b, h, 1)
    total_missed = missed.sum(-1, keepdim=True)
    total_norm = checked.sum(-1, keepdim=True) + piloted.sum(-1, keepdim=True)
    share, count = share[..., None], num_checks + num_pilots

    def root(missed_sum: Tensor, missed_count: Tensor, norm_sum: Tensor, norm_count: Tensor) -> Tensor:
        ratio = share * (missed_sum / missed_count) / (norm_sum / norm_count)
        return ratio.clamp(min=0).sqrt().where(missed_sum != 0, 0)

    def variance(deleted: Tensor, live: Tensor, size: Tensor) -> Tensor:
        mean = deleted.where(live, 0).sum(-1, keepdim=True) / size
        spread = (deleted - mean).square().where(live, 0).sum(-1, keepdim=True) * (size - 1) / size
        return spread.where(size > 1, torch.inf)[..., 0]

    error = root(total_missed, num_checks, total_norm, count)[..., 0]
    without_check = root(total_missed - missed, num_checks - 1, total_norm - checked, count - 1)
    without_pilot = root(total_missed, num_checks, total_norm - piloted, count - 1)
    pilot_variance = variance(without_pilot, pilot_live, num_pilots).where(num_pilots[..., 0] > 1, 0)
    return error, variance(without_check, check_live, num_checks), pilot_variance
