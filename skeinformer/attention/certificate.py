"""The certificate: how far an output is from exact attention, estimated from few exact rows.

Pilot rows are known exactly, so their error is too (0 where they are written over the output). Of the other rows some
are drawn and computed exactly: `check_rows.py` describes how. With lambda_j the chance that row j is drawn,

    missed = sum_pilots |R_j - E_j|^2 + sum_checks |R_j - E_j|^2 / lambda_j
    norm   = sum_pilots |E_j|^2 + (number of others) (sum_checks |E_j|^2 / lambda_j) / (sum_checks 1 / lambda_j)

and error^2 = missed / norm estimates |R - BV|_F^2 / |BV|_F^2 for each example and head. `missed` has the right mean
whatever the errors are, as the draw is independent of all that decided the output. An output with a row that is not
finite has an infinite error, whether or not that row was drawn.

The standard error is the jackknife's over the checks: rows that were certain to be drawn leave no doubt. Few rows of a
skewed distribution show too little of its spread, so it is widened by 1 + 2.5 / sqrt(number of checks);
docs/certificate.md has what two of it and the bound then cover.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.check_rows import Checks, draw_checks, row_mass, rows_to_draw
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.pilots import Pilots, rows_of_this_rank, share_of_rows
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.noise import Rand

WIDER = 2.5  # by this over the root of the number of checks is the jackknife's standard error too small
BOUND = 2.25  # standard errors of log(error) between the estimate and the bound


class Info(NamedTuple):
    """How far off the output is."""

    error: Tensor  # (b, h) estimated relative Frobenius error of the output
    error_se: Tensor  # (b, h) its standard error
    error_upper: Tensor  # (b, h) the true error is below this in at least 93 of 100 draws of the check rows


class ExactRows(NamedTuple):
    """Rows of an output, and the same rows of exact attention."""

    output: Tensor  # (b, h, k, p_v)
    exact: Tensor  # (b, h, k, p_v)
    live: Tensor  # (b, h, k), False for empty slots


def certify(inputs: Inputs, output: Tensor, pilots: Pilots | None, rand: Rand, num_checks: int) -> Info:
    """Estimate the error of an output of all ranks, from `num_checks` exact rows and the pilots."""
    query, _, _, _, query_mask, _, world = inputs
    rows = None if pilots is None else pilots.rows
    mass = row_mass(inputs, output, rows_to_draw(query, query_mask, rows))
    n = world.num_queries(query.shape[-2])
    checks = draw_checks(world, rand(query.shape[-2]), mass, num_checks, n)
    not_finite = (~output.isfinite().all(-1).all(-1)).to(output.dtype)  # (b, h)
    here = [checks.rows.take(query), checks.rows.take(output), not_finite]
    if rows is not None:
        here.append(rows.take(output))
    queries, check_output, not_finite, *pilot_output = world.sum("check rows", *here)
    drawn = ExactRows(check_output, exact_rows(inputs, queries), checks.rows.is_live())
    others = None if pilots is None else ExactRows(pilot_output[0], pilots.output, pilots.rows.is_live())
    return estimate_error(drawn, checks, others, not_finite == 0)


def exact_rows(inputs: Inputs, queries: Tensor) -> Tensor:
    """Compute exact attention of a few queries over the keys of all ranks: (b, h, k, p_v)."""
    _, key, value, key_mask, _, scale, world = inputs
    source = from_mask(key, value, key_mask)
    if world.size == 1:
        return attend(queries, source, scale)
    output, lse = rows_of_this_rank(queries, source, scale)
    part, _ = share_of_rows(output, lse, world.gather("check sums", lse)[0])
    return world.sum("exact rows", part)[0].to(value.dtype)


def estimate_error(drawn: ExactRows, checks: Checks, others: ExactRows | None, finite: Tensor) -> Info:
    """Estimate the error of an output from its check rows and from other rows that are known exactly.

    Squares are taken in units of the largest number. error_se and error_upper are inf where one row stands for several.
    All three are inf where any row of the output is not finite, (b, h), or where exact rows are not.
    """
    live, dtype = drawn.live, statistics_dtype(drawn.exact)
    weight = (1 / checks.chance).where(live, 0)  # (b, h, C)
    known = [drawn] if others is None else [drawn, others]
    exact = [rows.exact.to(dtype).where(rows.live[..., None], 0) for rows in known]
    difference = [(rows.output.to(dtype) - rows.exact.to(dtype)).where(rows.live[..., None], 0) for rows in known]
    norm_unit = _unit(exact, 1.0)  # (b, h, 1, 1)
    missed_unit = _unit(difference, norm_unit)
    missed, *missed_of_others = [(x / missed_unit).square().sum(-1) for x in difference]  # (b, h, k)
    norm, *norm_of_others = [(x / norm_unit).square().sum(-1) for x in exact]
    size = _total(live).to(dtype)  # (b, h, 1)

    def root(missed: Tensor, norm: Tensor, weight: Tensor) -> Tensor:
        """Return the error from sums over check rows, with the weights 1 / lambda_j."""
        total = sum(map(_total, missed_of_others), missed)
        all_norms = sum(map(_total, norm_of_others), checks.candidates * norm / weight.where(weight > 0, 1))
        return (total / all_norms).clamp(min=0).sqrt().where(total != 0, 0)

    terms = weight * missed, weight * norm, weight  # (b, h, C)
    error = root(*map(_total, terms))
    missed, norm, weight = (_total(x) - x for x in terms)  # without one row
    without = root(missed.clamp(min=0) * size / (size - 1).clamp(min=1), norm, weight)
    variance = _spread(without, (1 - checks.chance).where(live, 0)) * (size - 1) / size.clamp(min=1)
    doubt = (checks.chance < 1).any(-1, keepdim=True)
    error_se = variance.sqrt() * (1 + WIDER / size.clamp(min=1).sqrt())
    error_se = error_se.where((size > 1) & ~error_se.isnan(), torch.inf).where(doubt, 0)
    upper = (error * (BOUND * error_se / error).exp()).where(error > 0, error_se)
    upper = upper.where(error.isfinite(), torch.inf)
    unit = (missed_unit / norm_unit)[..., 0]  # (b, h, 1)
    finite = finite[..., None] & norm_unit[..., 0].isfinite() & unit.isfinite()
    return Info(*((x * unit).where(finite & x.isfinite(), torch.inf)[..., 0] for x in (error, error_se, upper)))


def bound_of_mean(info: Info) -> Tensor:
    """Return a bound of the mean error of examples and heads, whose check rows are drawn independently: a number."""
    margin = (info.error_upper - info.error).square().sum().sqrt() / info.error.numel()
    return (info.error.mean() + margin).where(info.error.isfinite().all(), torch.inf)


def _unit(parts: list[Tensor], default: Tensor | float) -> Tensor:
    """Return the largest number of all parts, (b, h, 1, 1); `default` where there are only zeros."""
    largest = torch.cat([x.abs().flatten(-2) for x in parts], -1).amax(-1)[..., None, None]
    return largest.where(largest != 0, default)


def _total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True)


def _spread(x: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sum of squared distances from the weighted mean: (..., k) -> (..., 1)."""
    total = _total(weight)
    mean = _total(weight * x) / total.where(total > 0, 1)
    return _total(weight * (x - mean).square())
