"""Monte Carlo with fixed seeds, bounded by standard errors: E[S S^T] = I, and how norms are distorted."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer.sketch import SKETCHES, draw
from tests.helpers import generator

NAMES = list(SKETCHES)
SAMPLING = [name for name in NAMES if "log_probability" in SKETCHES[name].defaults]
SKEWED = torch.tensor([0.4, 0.05, 0.2, 0.1, 0.02, 0.08, 0.15]).log() + 3.0  # unnormalized
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *[(name, {}) for name in NAMES],
    *[(name, {"log_probability": SKEWED}) for name in SAMPLING],
    ("sparse_embedding", {"num_nonzeros": 1}),
    ("sparse_embedding", {"num_nonzeros": 9}),
    ("very_sparse", {"density": 0.15}),
    ("very_sparse", {"density": 1.0}),
    ("accumulative", {"accumulations": 1}),
    ("accumulative", {"accumulations": 7, "log_probability": SKEWED}),
]


def label(variant: tuple[str, dict[str, Any]]) -> str:
    name, options = variant
    values = [f"{key}={value}" if not isinstance(value, Tensor) else key for key, value in options.items()]
    return "-".join([name, *values])


@pytest.mark.parametrize("variant", VARIANTS, ids=label)
@pytest.mark.parametrize("d", [4, 10])
def test_mean_of_s_s_transposed_is_the_identity(variant: tuple[str, dict[str, Any]], d: int) -> None:
    name, options = variant
    n, trials = 7, 20_000
    sketch = draw(name, n, d, batch=(trials,), generator=generator(1), **options)
    dense = sketch.dense().double()
    products = dense @ dense.mT  # (trials, n, n)
    standard_error = products.std(0) / math.sqrt(trials)
    assert ((products.mean(0) - torch.eye(n)).abs() <= 5 * standard_error + 1e-5).all()


def squared_norms(name: str, x: Tensor, d: int, trials: int, **options: Any) -> Tensor:
    """|S^T x|^2 / |x|^2 of independent draws, (trials,)."""
    sketch = draw(name, x.shape[0], d, batch=(trials,), generator=generator(2), **options)
    return sketch.apply(x[:, None]).double().square().sum((-2, -1)) / x.double().square().sum()


def exact_variance(name: str, x: Tensor, d: int) -> float:
    """The variance of |S^T x|^2 for a unit vector x, derived from the definition of each family."""
    n = x.shape[0]
    fourth = float(x.pow(4).sum())
    if name == "gaussian":
        return 2 / d
    if name in ("rademacher", "sparse_embedding"):
        return 2 * (1 - fourth) / d
    if name == "srht":  # d of n rows without replacement, n a power of two
        return 2 * (1 - fourth) / d * (n - d) / (n - 1)
    if name == "very_sparse":  # density 1/sqrt(n)
        return (2 + (math.sqrt(n) - 3) * fourth) / d
    if name == "subsampling":
        return (n * fourth - 1) / d
    assert name == "accumulative"
    m = 4
    return (n * fourth / m + 3 * (m - 1) / m - 1) / d


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"subsampling_without"}))  # its variance has no closed form
def test_variance_of_norms_is_the_exact_one(name: str) -> None:
    x = torch.randn(64, generator=generator(0)).double()
    x /= x.norm()
    d, trials = 8, 10_000
    deviations = (squared_norms(name, x, d, trials) - 1).square()
    standard_error = deviations.std() / math.sqrt(trials)
    assert abs(float(deviations.mean()) - exact_variance(name, x, d)) < 4 * float(standard_error)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_row_that_sums_to_one_sums_to_one_on_average(name: str) -> None:
    # B S S^T 1 with importance probabilities; weights 1/(d p) on rows drawn without replacement would average above 1
    n, d, trials = 40, 12, 20_000
    scores = 2 * torch.randn(n, generator=generator(0))
    b = scores.softmax(-1)
    sketch = draw(name, n, d, batch=(trials,), generator=generator(1), log_probability=scores, dtype=b.dtype)
    sums = (b @ sketch.lift(sketch.apply(torch.ones(n, 1)))).squeeze(-1)  # (trials,)
    standard_error = sums.std() / math.sqrt(trials)
    assert abs(float(sums.mean()) - 1) <= 4 * float(standard_error) + 1e-5
