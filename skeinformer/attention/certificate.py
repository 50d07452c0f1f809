"""The certificate: an estimate of the error of an attention output, from rows that nothing else depends on.

Check rows are drawn uniformly from the real queries that are not pilots (the next ranks of the pilots' noise) and
computed exactly. They choose no columns and enter no output, so they see the error as any other such row does. The
error of the P pilot rows among the m real ones is known, 0 where they are reused:

    error^2 = (sum_pilots |R_j - E_j|^2 + (m - P) mean_checks |R_j - E_j|^2) / (m mean_{pilots and checks} |E_j|^2)

estimates |R - BV|_F^2 / |BV|_F^2 per example and head. The standard error is the jackknife's over checks and pilots,
with finite population corrections: a check of every row leaves no doubt.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.pilots import Pilots
from skeinformer.attention.selection import Selection, uniform_rows
from skeinformer.attention.virtual_keys import VirtualKeys, attend
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import gather_rows


class Rows(NamedTuple):
    """Squared norms of some exact rows and of what the output misses of them; 0 in empty slots."""

    missed: Tensor  # (b, h, k), |R_j - E_j|^2
    norm: Tensor  # (b, h, k), |E_j|^2
    live: Tensor  # (b, h, k)

    @property
    def size(self) -> Tensor:
        return self.live.sum(-1, keepdim=True).to(self.norm.dtype)  # (b, h, 1)


def draw_checks(
    u: Tensor, mask: Tensor | None, num_pilots: int, num_checks: int, spent: Tensor | None = None
) -> Selection:
    """The ranks of u after the first `num_pilots`: (b, h, num_checks), or as many as there are rows.

    The last `spent` ranks, (b, 1, 1), decided something else and are not among them, unless all rows are checked:
    then the error is known, and nothing is inferred from a part.
    """
    ranked = uniform_rows(u, mask, num_pilots + num_checks)
    indices, live = ranked.indices[..., num_pilots:], ranked.live[..., num_pilots:]
    return Selection(indices, live & not_spent(live, num_pilots, num_checks, count_real(u, mask), spent))


def not_spent(live: Tensor, num_pilots: int, num_checks: int, real: Tensor, spent: Tensor | None) -> Tensor:
    """Which of the ranks after the pilots', (b, h, num_checks), may be checked, of `real` rows, (b, 1, 1)."""
    if spent is None:
        return torch.ones_like(live)
    rank = num_pilots + torch.arange(live.shape[-1], device=live.device)
    return (rank < real - spent) | (num_pilots + num_checks >= real)


def count_real(u: Tensor, mask: Tensor | None) -> Tensor:
    """The number of real rows, (b, 1, 1); (1, 1, 1) without a mask."""
    if mask is None:
        return torch.full((1, 1, 1), u.shape[-1], device=u.device)
    return mask.sum(-1, keepdim=True)


@torch.no_grad()
def estimate_error(
    output: Tensor,
    query: Tensor,
    query_mask: Tensor | None,
    source: VirtualKeys,
    checks: Selection,
    pilots: Pilots | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """(error, standard error), each (b, h), of an output whose exact counterpart is attention over `source`.

    Time O(C n p) for C checks. The standard error is inf where a single check row stands for several.
    """
    queries = gather_rows(query, checks.indices)  # (b, h, C, p), none where all rows are pilots
    exact = attend(queries, source, scale) if queries.shape[-2] else gather_rows(output, checks.indices)
    return error_of_rows(output, checks, exact, pilots, count_real(query[..., 0], query_mask))


def error_of_rows(
    output: Tensor, checks: Selection, exact: Tensor, pilots: Pilots | None, real: Tensor
) -> tuple[Tensor, Tensor]:
    """The same from the exact check rows, (b, h, C, p_v), of `real` rows in all, (b, 1, 1)."""
    known = exact if pilots is None else torch.cat([exact, pilots.output], -2)
    unit = known.to(statistics_dtype(known)).abs().amax((-2, -1), keepdim=True)  # in it squares are of moderate size
    unit = unit.where(unit > 0, 1)
    checked = _compare(output, checks, exact, unit)
    piloted = Rows(*(x[..., :0] for x in checked))
    if pilots is not None:
        piloted = _compare(output, pilots.rows, pilots.output, unit)
    m = real.to(unit.dtype).expand_as(checked.size)
    rest = m - piloted.size  # (b, h, 1), rows that are not pilots
    error, from_checks, from_pilots = _jackknife(checked, piloted, rest)
    variance = (1 - checked.size / rest) * from_checks
    variance = variance.where(checked.size < rest, 0) + (1 - (checked.size + piloted.size) / m) * from_pilots
    return error[..., 0].where(m[..., 0] > 0, 0), variance[..., 0].clamp(min=0).sqrt().where(m[..., 0] > 0, 0)


def _compare(output: Tensor, rows: Selection, exact: Tensor, unit: Tensor) -> Rows:
    exact = exact.to(unit.dtype) / unit
    missed = gather_rows(output, rows.indices).to(unit.dtype) / unit - exact
    return Rows(_squared_norm(missed, rows.live), _squared_norm(exact, rows.live), rows.live)


def _squared_norm(x: Tensor, live: Tensor) -> Tensor:
    return x.square().sum(-1).where(live, 0)


def _jackknife(checked: Rows, piloted: Rows, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The error, and its variance as the checks and as the pilots are a sample: each (b, h, 1).

    The checks stand for `rest` rows; the pilots enter the numerator with what is known of them.
    """
    count = checked.size + piloted.size
    known = piloted.missed.sum(-1, keepdim=True)
    missed = checked.missed.sum(-1, keepdim=True)
    norm = checked.norm.sum(-1, keepdim=True) + piloted.norm.sum(-1, keepdim=True)

    def root(missed: Tensor, num_checks: Tensor, norm: Tensor, count: Tensor) -> Tensor:
        total = known + rest * missed / num_checks.clamp(min=1)
        ratio = total / (rest + piloted.size) / (norm / count)
        return ratio.clamp(min=0).sqrt().where(total != 0, 0)

    def variance(without: Tensor, rows: Rows) -> Tensor:
        mean = without.where(rows.live, 0).sum(-1, keepdim=True) / rows.size
        spread = (without - mean).square().where(rows.live, 0).sum(-1, keepdim=True)
        return spread * (rows.size - 1) / rows.size

    error = root(missed, checked.size, norm, count)
    without_check = root(missed - checked.missed, checked.size - 1, norm - checked.norm, count - 1)
    without_pilot = root(missed, checked.size, norm - piloted.norm, count - 1)
    from_checks = variance(without_check, checked).where(checked.size > 1, torch.inf)
    from_pilots = variance(without_pilot, piloted).where(piloted.size > 1, 0)
    return error, from_checks, from_pilots
