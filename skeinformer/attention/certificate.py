"""The certificate: how far an output is off, estimated from a few exact rows that nothing else depends on.

Rows are of two kinds: pilots, whose error is known (0 where they are written over the output), and the others, of which
some are drawn and computed exactly: `checks.py` says how. With lambda_j the chance that row j had to be drawn,

    missed = sum_pilots |R_j - E_j|^2 + sum_checks |R_j - E_j|^2 / lambda_j
    norm   = sum_pilots |E_j|^2 + (number of others) (sum_checks |E_j|^2 / lambda_j) / (sum_checks 1 / lambda_j)

and error^2 = missed / norm estimates |R - BV|_F^2 / |BV|_F^2 for each example and head. `missed` has the right mean
whatever the errors are, as the draw is independent of all that decided the output. An output with a row that is not
finite has an infinite error, whether or not that row was drawn.

The standard error is the jackknife's over the checks: rows that were certain to be drawn leave no doubt, and a check of
every row leaves none at all. Few rows of a skewed distribution show too little of its spread, so it is widened by
1 + 2.5 / sqrt(number of checks); docs/certificate.md has what two of it and the bound then cover.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.checks import Checks
from skeinformer.attention.selection import Selection
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import gather_rows

WIDER = 2.5  # by this over the root of the number of checks is the jackknife's standard error too small
BOUND = 2.25  # standard errors of log(error) between the estimate and the bound


class Info(NamedTuple):
    """How far off the output is."""

    error: Tensor  # (b, h) estimated relative Frobenius error of the output
    error_se: Tensor  # (b, h) its standard error
    error_upper: Tensor  # (b, h) the true error is below this in at least 93 of 100 draws of the check rows


class Known(NamedTuple):
    """Rows that are known exactly."""

    rows: Selection  # (b, h, k)
    exact: Tensor  # (b, h, k, p_v)


class Sums(NamedTuple):
    """Sums over check rows, each with the weight 1 / lambda_j: (b, h, 1), or (b, h, C) without one of them."""

    missed: Tensor
    norm: Tensor
    weight: Tensor


@torch.no_grad()
def estimate_error(
    output: Tensor, checks: Checks, exact: Tensor, known: Known | None, lost: Tensor | None = None
) -> Info:
    """The error of an output whose rows `checks` should be `exact`, (b, h, C, p_v), and `known` as they say.

    Squares are taken in units of the largest number. error_se and error_upper are inf where one row stands for several.
    All three are inf where any row of the output is not finite, or where exact rows are not. lost: (b, h), where a row
    of the output is not finite that is not here.
    """
    dtype, weight = statistics_dtype(exact), (1 / checks.chance).where(checks.live, 0)  # (b, h, C)
    rows = Selection(checks.indices, checks.live)
    differences, norms = [_difference(output, rows, exact, dtype)], [_real(exact.to(dtype), rows)]
    if known is not None:
        differences.append(_difference(output, known.rows, known.exact, dtype))
        norms.append(_real(known.exact.to(dtype), known.rows))
    of_norm = _unit(norms, 1.0)  # (b, h, 1, 1)
    of_missed = _unit(differences, of_norm)
    missed, norm = ([_squares(x / unit) for x in parts] for parts, unit in ((differences, of_missed), (norms, of_norm)))
    of_known = [torch.zeros_like(x[-1][..., :1]) if known is None else _total(x[-1]) for x in (missed, norm)]

    each = Sums(weight * missed[0], weight * norm[0], weight)
    size = _total(checks.live).to(dtype)  # (b, h, 1)

    def root(sums: Sums) -> Tensor:
        total = of_known[0] + sums.missed
        ratio = total / (of_known[1] + checks.candidates * sums.norm / sums.weight.where(sums.weight > 0, 1))
        return ratio.clamp(min=0).sqrt().where(total != 0, 0)

    sums = Sums(*map(_total, each))
    error = root(sums)
    left = Sums(*(total - x for total, x in zip(sums, each, strict=True)))  # without one row
    left = left._replace(missed=left.missed.clamp(min=0) * size / (size - 1).clamp(min=1))
    variance = _spread(root(left), (1 - checks.chance).where(checks.live, 0)) * (size - 1) / size.clamp(min=1)
    doubt = (checks.chance < 1).any(-1, keepdim=True)
    error_se = variance.sqrt() * (1 + WIDER / size.clamp(min=1).sqrt())
    error_se = error_se.where((size > 1) & ~error_se.isnan(), torch.inf).where(doubt, 0)
    upper = (error * (BOUND * error_se / error).exp()).where(error > 0, error_se)
    upper = upper.where(error.isfinite(), torch.inf)
    unit = (of_missed / of_norm)[..., 0]  # (b, h, 1)
    finite = all_finite(output)[..., None] & of_norm[..., 0].isfinite() & unit.isfinite()
    finite = finite if lost is None else finite & ~lost[..., None]
    return Info(*((x * unit).where(finite & x.isfinite(), torch.inf)[..., 0] for x in (error, error_se, upper)))


def all_finite(x: Tensor) -> Tensor:
    """Whether all rows are finite: (b, h, n, p) -> (b, h)."""
    return x.isfinite().all(-1).all(-1)


def bound_of_mean(info: Info) -> Tensor:
    """A bound of the mean error of examples and heads, whose check rows are drawn independently: a number."""
    margin = (info.error_upper - info.error).square().sum().sqrt() / info.error.numel()
    return (info.error.mean() + margin).where(info.error.isfinite().all(), torch.inf)


def _difference(output: Tensor, rows: Selection, exact: Tensor, dtype: torch.dtype) -> Tensor:
    return _real(gather_rows(output, rows.indices).to(dtype) - exact.to(dtype), rows)


def _real(x: Tensor, rows: Selection) -> Tensor:
    """0 in the rows of empty slots."""
    return x.where(rows.live[..., None], 0)


def _unit(parts: list[Tensor], of_zeros: Tensor | float) -> Tensor:
    """The largest number of all parts, (b, h, 1, 1); `of_zeros` where there are only zeros."""
    largest = torch.cat([x.abs().flatten(-2) for x in parts], -1).amax(-1)[..., None, None]
    return largest.where(largest != 0, of_zeros)


def _squares(x: Tensor) -> Tensor:
    return x.square().sum(-1)


def _total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _spread(x: Tensor, weight: Tensor) -> Tensor:
    """The weighted sum of squared distances from the weighted mean: (..., k) -> (..., 1)."""
    total = _total(weight)
    mean = _total(weight * x) / total.where(total > 0, 1)
    return _total(weight * (x - mean).square())
