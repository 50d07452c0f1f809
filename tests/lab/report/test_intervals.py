"""The 95 % intervals have their published bounds, and hold as often as they say."""

import random
from collections.abc import Callable

import pytest

from skeinformer.lab.report.intervals import binomial_interval, mean_of_shares_interval, t_bound, t_interval


@pytest.mark.parametrize(
    ("freedom", "bound"), [(1, 12.706), (2, 4.303), (9, 2.262), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_student_t_has_the_bounds_of_the_tables(freedom: int, bound: float) -> None:
    assert t_bound(freedom) == pytest.approx(bound, abs=6e-4)


def test_the_interval_of_a_mean() -> None:
    # the standard error of 1, 2, 3 is 1 / sqrt(3)
    assert t_interval([1, 2, 3]) == pytest.approx((2 - 4.3027 / 3**0.5, 2 + 4.3027 / 3**0.5))


def test_the_interval_of_a_share() -> None:
    assert binomial_interval(0.5, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert binomial_interval(0.0, 10) == pytest.approx((0, 0.2775), abs=1e-4)
    assert binomial_interval(1.0, 10) == pytest.approx((0.7225, 1), abs=1e-4)
    low, high = mean_of_shares_interval([0.5, 0.5], [100, 100])
    assert (low, high) == pytest.approx((0.5 - 1.96 * 0.05 / 2**0.5, 0.5 + 1.96 * 0.05 / 2**0.5), abs=1e-4)


def covers(interval: Callable[[random.Random], tuple[float, float]], truth: float) -> float:
    source = random.Random(0)
    intervals = [interval(source) for _ in range(2000)]
    return sum(low <= truth <= high for low, high in intervals) / len(intervals)


def test_they_hold_in_95_of_100_cases() -> None:
    def mean(source: random.Random) -> tuple[float, float]:
        return t_interval([source.gauss(0.6, 0.02) for _ in range(3)])

    def share(source: random.Random) -> tuple[float, float]:
        return binomial_interval(sum(source.random() < 0.3 for _ in range(100)) / 100, 100)

    error = (0.95 * 0.05 / 2000) ** 0.5
    assert covers(mean, 0.6) == pytest.approx(0.95, abs=4 * error)
    assert covers(share, 0.3) == pytest.approx(0.95, abs=4 * error + 0.01)  # a share of 100 has steps
