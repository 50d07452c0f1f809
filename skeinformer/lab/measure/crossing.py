"""From which length on a sketch is faster, by times that were measured at a few."""

import math
from collections.abc import Sequence


def crossover(ns: Sequence[int], ratios: Sequence[float]) -> float | None:
    """The length from which a method is faster than SDPA: where `ratios`, SDPA's time / its own, pass 1 for good.

    Interpolated between neighbours on logarithmic axes; the smallest n where it is faster at all, None where it is not
    at the greatest.
    """
    points = sorted(zip(ns, ratios, strict=True))
    slower = [index for index, (_, value) in enumerate(points) if value <= 1]
    if not slower:
        return float(points[0][0]) if points else None
    last = slower[-1]
    if last == len(points) - 1:
        return None
    (n1, ratio1), (n2, ratio2) = points[last : last + 2]
    weight = -math.log(ratio1) / (math.log(ratio2) - math.log(ratio1))
    return math.exp(math.log(n1) + weight * (math.log(n2) - math.log(n1)))


def faster_from(ns: Sequence[int], ratios: Sequence[float]) -> str:
    """Where a method is faster than SDPA, in words: "from n = 2,048" only where it was slower at a shorter length."""
    length = crossover(ns, ratios)
    if length is None:
        return f"not at n = {max(ns):,}"
    if all(value > 1 for value in ratios):
        return "at all n measured" if len(set(ns)) > 1 else f"at n = {ns[0]:,}"
    return f"from n = {length:,.0f}"


def growth_exponent(n1: float, t1: float, n2: float, t2: float) -> float:
    """a in t ~ n^a between two lengths: 1 is linear, 2 quadratic. For times per example where the batches differ."""
    return math.log(t2 / t1) / math.log(n2 / n1)
