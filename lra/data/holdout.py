"""Validation examples, held out of a training set."""

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from skeinformer.checks import check_count


def hold_out(keys: Sequence[Hashable], labels: Sequence[int], count: int, seed: int) -> NDArray[np.bool_]:
    """Choose `count` examples by `seed`, as True, so that every class has the share that it has among all.

    Examples with equal keys are duplicates. Only those without a duplicate are held out, so none is on both sides.
    """
    check_count("valid", count)
    check_count("seed", seed, 0)
    if count >= len(keys):
        raise ValueError(
            f"{count:,} validation examples cannot be held out of {len(keys):,}; ask for fewer with --valid"
        )
    times = Counter(keys)
    single = np.array([times[key] == 1 for key in keys])
    classes = np.array(labels)
    rng = np.random.default_rng(seed)
    chosen = np.zeros(len(keys), bool)
    for label, quota in _quotas(classes, count).items():
        eligible = np.flatnonzero(single & (classes == label))
        if quota > len(eligible):
            raise ValueError(
                f"{quota:,} validation examples of class {label} cannot be held out: "
                f"{len(eligible):,} have no duplicate; ask for fewer with --valid"
            )
        chosen[rng.permutation(eligible)[:quota]] = True
    return chosen


def _quotas(classes: NDArray[np.int64], count: int) -> dict[int, int]:
    """Return how many of each class: shares rounded down, and the rest to the classes that lost most."""
    labels, sizes = np.unique(classes, return_counts=True)
    exact = count * sizes / len(classes)
    quotas = np.floor(exact).astype(int)
    for place in np.argsort(quotas - exact, kind="stable")[: count - quotas.sum()]:
        quotas[place] += 1
    return dict(zip(labels.tolist(), quotas.tolist(), strict=True))
