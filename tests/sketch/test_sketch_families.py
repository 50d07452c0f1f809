"""The matrices of the other families against their definitions, and the page about them."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from skeinformer.sketch import draw
from skeinformer.sketch.dense import HadamardSketch, padded_length, srht, walsh_hadamard
from skeinformer.sketch.sparse import TRUNCATION, distinct_integers, num_slots
from tests.helpers import generator


def hadamard_matrix(order: int) -> Tensor:
    """Sylvester's construction."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < order:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), matrix)
    return matrix


def assert_frequency(hits: Tensor, probability: float) -> None:
    """The share of hits is `probability` within 4 standard errors."""
    standard_error = math.sqrt(probability * (1 - probability) / hits.numel())
    assert abs(float(hits.double().mean()) - probability) < 4 * standard_error


def test_rademacher_entries_are_signs() -> None:
    dense = draw("rademacher", 100, 64, generator=generator()).dense()
    assert_close(dense.abs(), torch.full((100, 64), 1 / 8))
    assert_frequency(dense > 0, 0.5)


@pytest.mark.parametrize("length", [1, 2, 8, 64])
def test_walsh_hadamard_is_the_product_with_sylvesters_matrix(length: int) -> None:
    x = torch.randn(2, length, 3, dtype=torch.float64)
    assert_close(walsh_hadamard(x), hadamard_matrix(length) @ x)
    assert_close(walsh_hadamard(walsh_hadamard(x)), length * x)


@pytest.mark.parametrize(("n", "d"), [(1, 1), (1, 3), (6, 4), (8, 8), (11, 20), (5, 17)])
def test_srht_is_the_product_of_signs_and_sampled_hadamard_rows(n: int, d: int) -> None:
    length = 2 ** math.ceil(math.log2(n))
    assert padded_length(n) == length
    u, v = torch.rand(n, generator=generator()), torch.rand(length, generator=generator(1))
    sketch = srht((u, v), n, d, dtype=torch.float64)
    assert isinstance(sketch, HadamardSketch)
    sign = torch.where(u < 0.5, -1.0, 1.0).double()
    expected = sign[:, None] * hadamard_matrix(length)[:n, sketch.index[:, 0]] / math.sqrt(d)
    assert_close(sketch.dense(), expected)
    # every row of H comes up the same number of times, or once more
    counts = sketch.index.flatten().bincount(minlength=length)
    assert int(counts.max() - counts.min()) <= 1
    assert_close(sketch.dense().square().sum(-1), torch.ones(n, dtype=torch.float64))


def test_srht_with_all_rows_is_an_isometry() -> None:
    sketch = draw("srht", 13, 32, batch=(5,), dtype=torch.float64, generator=generator())
    x = torch.randn(13, 4, dtype=torch.float64)
    assert_close(sketch.lift(sketch.apply(x)), x.expand(5, 13, 4))


def test_srht_rows_are_drawn_evenly() -> None:
    sketch = draw("srht", 8, 3, batch=(20_000,), generator=generator())
    assert isinstance(sketch, HadamardSketch)
    for row in range(8):
        assert_frequency((sketch.index == row).any(-2), 3 / 8)


@pytest.mark.parametrize(("num_nonzeros", "d"), [(1, 5), (4, 9), (4, 4), (7, 3), (3, 1)])
def test_sparse_embedding_rows(num_nonzeros: int, d: int) -> None:
    s = min(num_nonzeros, d)
    dense = draw(
        "sparse_embedding", 300, d, num_nonzeros=num_nonzeros, generator=generator(), dtype=torch.float64
    ).dense()
    nonzero = dense[dense != 0]
    assert ((dense != 0).sum(-1) == s).all()
    assert_close(nonzero.abs(), torch.full_like(nonzero, 1 / math.sqrt(s)))
    assert_close(dense.square().sum(-1), torch.ones(300, dtype=torch.float64))
    assert_frequency(nonzero > 0, 0.5)


@pytest.mark.parametrize(("s", "high"), [(1, 5), (2, 5), (3, 5), (5, 5)])
def test_distinct_integers_are_uniform_sets(s: int, high: int) -> None:
    chosen = distinct_integers(torch.rand(20_000, s, generator=generator()), high)
    sets = (2**chosen).sum(-1)  # a set as a bit mask
    values, counts = sets.unique(return_counts=True)
    total = math.comb(high, s)
    assert len(values) == total
    assert all(value.bit_count() == s for value in values.tolist())
    share = 1 / total
    assert ((counts / 20_000 - share).abs() <= 4.5 * math.sqrt(share * (1 - share) / 20_000)).all()


@pytest.mark.parametrize("density", [None, 0.02, 0.5, 1.0])
def test_very_sparse_entries_are_independent_signs_and_zeros(density: float | None) -> None:
    n, d, trials = 16, 5, 4000
    dense = draw(
        "very_sparse", n, d, batch=(trials,), density=density, generator=generator(), dtype=torch.float64
    ).dense()
    density = 0.25 if density is None else density  # 1 / sqrt(16)
    nonzero = dense != 0
    assert_close(dense[nonzero].abs(), torch.full_like(dense[nonzero], 1 / math.sqrt(d * density)))
    if density == 1:
        assert nonzero.all()
    else:
        for row in (0, 1, n - 1):
            assert_frequency(nonzero[:, row], density)
        assert_frequency(nonzero[:, :-1] & nonzero[:, 1:], density**2)
        assert_frequency(nonzero[..., :-1] & nonzero[..., 1:], density**2)
    assert_frequency(dense[nonzero] > 0, 0.5)


@pytest.mark.parametrize(
    ("n", "d", "density"), [(10, 3, 0.3), (100, 64, 0.1), (4096, 64, 1 / 64), (4096, 1, 1e-4), (900, 512, 0.9)]
)
def test_very_sparse_columns_have_enough_slots(n: int, d: int, density: float) -> None:
    slots = num_slots(n, d, density)

    def log_probability(count: int) -> float:
        choices = math.lgamma(n + 1) - math.lgamma(count + 1) - math.lgamma(n - count + 1)
        return choices + count * math.log(density) + (n - count) * math.log1p(-density)

    overflow = math.fsum(math.exp(log_probability(count)) for count in range(slots + 1, n + 1))
    assert d * overflow < TRUNCATION
    assert slots <= min(n, 4 * n * density + 40)
