"""Standard errors and 95 % intervals: of a mean of few values, and of a share of many trials."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from scipy import stats

Interval = tuple[float, float]
CONFIDENCE = 0.95


def t_interval(values: Sequence[float]) -> Interval:
    """Return the interval of the mean of at least two values, by Student's t."""
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def share_error(share: float, trials: float) -> float:
    """Return the standard error of a share; where all or none succeeded, as if one trial had gone otherwise."""
    share = min(max(share, 1 / (trials + 2)), 1 - 1 / (trials + 2))
    return math.sqrt(share * (1 - share) / trials)


def share_interval(share: float, trials: int) -> Interval:
    """Return the interval of the probability of success where `share` of the trials succeeded, by Wilson's score."""
    interval = stats.binomtest(round(share * trials), trials).proportion_ci(CONFIDENCE, method="wilson")
    return float(interval.low), float(interval.high)


def mean_share_interval(shares: Sequence[float], trials: Sequence[float]) -> Interval:
    """Return the interval of the mean of independent shares, each of its own trials, by the normal distribution."""
    variance = sum(share * (1 - share) / count for share, count in zip(shares, trials, strict=True))
    half = stats.norm.ppf((1 + CONFIDENCE) / 2) * math.sqrt(variance) / len(shares)
    return max(0.0, fmean(shares) - half), min(1.0, fmean(shares) + half)
