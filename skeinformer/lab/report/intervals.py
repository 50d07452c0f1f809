"""95 % intervals: of a mean of few values, and of a share of many trials."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev

Interval = tuple[float, float]

Z = 1.959964  # the normal distribution has 95 % of its mass between -Z and Z
# the same bound of Student's t for 1, 2, ... degrees of freedom; above, the expansion in their inverse has four digits
T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)


def t_interval(values: Sequence[float]) -> Interval:
    """Of the mean of at least two values, by Student's t."""
    half = t_bound(len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def t_bound(freedom: int) -> float:
    """The t with 95 % of the mass between -t and t."""
    if freedom <= len(T):
        return T[freedom - 1]
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / float(freedom) ** power for power, term in enumerate(terms, start=1))


def share_error(share: float, trials: float) -> float:
    """The standard error of a share of successes; where all or none succeeded, as if one trial had gone otherwise."""
    share = min(max(share, 1 / (trials + 2)), 1 - 1 / (trials + 2))
    return math.sqrt(share * (1 - share) / trials)


def binomial_interval(share: float, trials: float) -> Interval:
    """Of the probability of success when `share` of the trials succeeded, by Wilson's score: always inside 0 to 1."""
    centre = (share + Z**2 / (2 * trials)) / (1 + Z**2 / trials)
    half = Z * math.sqrt(share * (1 - share) / trials + (Z / (2 * trials)) ** 2) / (1 + Z**2 / trials)
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_of_shares_interval(shares: Sequence[float], trials: Sequence[float]) -> Interval:
    """Of the mean of independent shares, each of its own trials, by the normal distribution."""
    variance = sum(share * (1 - share) / count for share, count in zip(shares, trials, strict=True))
    half = Z * math.sqrt(variance) / len(shares)
    return max(0.0, fmean(shares) - half), min(1.0, fmean(shares) + half)
