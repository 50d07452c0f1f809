"""Sub-sampling against slow transcriptions of its definition, at the ends of the distribution, and without rows."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from skeinformer.sketch import SKETCHES, draw
from skeinformer.sketch.sampling import accumulative, subsampling, subsampling_without, with_replacement
from tests.cases import cases
from tests.helpers import generator

SAMPLING = [name for name in SKETCHES if "log_probability" in SKETCHES[name].defaults]
NEVER = -torch.inf


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=generator(seed)).clamp(min=2.0**-25)


def reference_subsampling(u: list[float], p: list[float], d: int) -> Tensor:
    """Definition 1, one column at a time."""
    s = torch.zeros(len(p), d, dtype=torch.float64)
    for j in range(d):
        cumulative = 0.0
        for i, p_i in enumerate(p):
            cumulative += p_i
            if u[j] < cumulative:
                s[i, j] = 1 / math.sqrt(d * p_i)
                break
    return s


def reference_without(u: list[float], p: list[float], d: int) -> Tensor:
    """The d first arrivals at rates p_i, weighted by the probability to arrive before the first that is not chosen.

    -log of an arrival time is log p_i plus Gumbel noise.
    """
    arrivals = sorted((-math.log1p(-u_i) / p_i, i) for i, (u_i, p_i) in enumerate(zip(u, p, strict=True)) if p_i > 0)
    s = torch.zeros(len(p), d, dtype=torch.float64)
    for j, (_, i) in enumerate(arrivals[:d]):
        chance = 1 - math.exp(-p[i] * arrivals[d][0]) if len(arrivals) > d else 1.0
        s[i, j] = 1 / math.sqrt(chance)
    return s


@settings(max_examples=cases(40))
@given(n=st.integers(1, 12), d=st.integers(1, 15), dead=st.integers(0, 11), seed=st.integers(0, 1000))
def test_draws_follow_the_definitions(n: int, d: int, dead: int, seed: int) -> None:
    log_p = 2 * torch.randn(n, dtype=torch.float64, generator=generator(seed))
    log_p[torch.randperm(n, generator=generator(seed))[: min(dead, n - 1)]] = NEVER
    p = log_p.softmax(-1).tolist()
    u, v = uniform(d, seed=seed), uniform(n, seed=seed)
    sketch = subsampling((u,), n, d, dtype=torch.float64, log_probability=log_p + 5)
    assert_close(sketch.dense(), reference_subsampling(u.tolist(), p, d))
    sketch = subsampling_without((v,), n, d, dtype=torch.float64, log_probability=log_p + 5)
    assert_close(sketch.dense(), reference_without(v.tolist(), p, d))


def test_accumulative_is_the_signed_mean_of_subsampling_matrices() -> None:
    n, d, m = 9, 6, 3
    log_p = torch.randn(n, dtype=torch.float64)
    u, v = uniform(2, d, m), uniform(2, d, m, seed=1)
    terms = [
        subsampling((u[..., j],), n, d, dtype=torch.float64, log_probability=log_p).dense()
        * torch.where(v[..., None, :, j] < 0.5, -1, 1)
        for j in range(m)
    ]
    sketch = accumulative((u, v), n, d, dtype=torch.float64, accumulations=m, log_probability=log_p)
    assert_close(sketch.dense(), sum(terms) / math.sqrt(m))


def test_no_probabilities_means_uniform_ones() -> None:
    for name in SAMPLING:
        default = draw(name, 11, 6, batch=(50,), generator=generator())
        uniform_ones = draw(name, 11, 6, batch=(50,), generator=generator(), log_probability=torch.full((11,), -2.5))
        assert_close(default.dense(), uniform_ones.dense())
    boundaries = torch.arange(8, dtype=torch.float64) / 8  # row i has the interval [i / 8, (i + 1) / 8)
    for log_probability in (None, torch.zeros(8)):
        assert with_replacement(boundaries, 8, log_probability)[0].tolist() == list(range(8))


@pytest.mark.parametrize(
    "p",
    [[0, 0, 1, 0, 3, 0], [0.1] * 10 + [0], [0] + [0.1] * 10, [0, 1], [1, 0], [1], [0, 1e-300, 0, 1, 0, 1e-300, 0]],
    ids=str,
)
def test_rounding_at_the_ends_never_draws_what_has_no_probability(p: list[float]) -> None:
    probability = torch.tensor(p, dtype=torch.float64)
    u = torch.tensor([0.0, 2.0**-53, 2.0**-25, 0.25, 0.5, 1 - 2.0**-24, 1 - 2.0**-53, 1.0], dtype=torch.float64)
    index, drawn = with_replacement(u, len(p), probability.log())
    assert (probability[index] > 0).all()
    assert_close(drawn, probability[index] / probability.sum())
    assert (index.diff() >= 0).all()


def test_a_small_share_spread_over_many_rows_is_drawn_evenly() -> None:
    # half of the mass on row 0, the rest on four million rows: float32 sums would not resolve them
    n, draws = 2**22, 20_000
    log_p = torch.zeros(n)
    log_p[0] = math.log(n - 1)
    index, drawn = with_replacement(uniform(draws), n, log_p)
    tail = index[index > 0]
    assert abs(len(tail) / draws - 0.5) < 4 * 0.5 / math.sqrt(draws)
    assert_close(drawn[index == 0].unique(), torch.tensor([0.5], dtype=torch.float64))
    position = tail.double() / n
    assert abs(float(position.mean()) - 0.5) < 4 / math.sqrt(12 * len(tail))
    assert set((tail % 8).tolist()) == set(range(8))


@pytest.mark.parametrize("name", SAMPLING)
@pytest.mark.parametrize("d", [1, 3, 6, 9])
def test_an_example_without_rows_to_draw_gives_zero(name: str, d: int) -> None:
    log_p = torch.zeros(3, 6)
    log_p[1] = NEVER
    log_p[2, 2:] = NEVER
    sketch = draw(name, 6, d, batch=(3,), generator=generator(), log_probability=log_p)
    dense = sketch.dense()
    assert dense.isfinite().all()
    assert (dense[1] == 0).all()
    assert (dense[2, 2:] == 0).all()
    assert (dense[[0, 2]] != 0).any(-1).any(-1).all()
    assert (sketch.lift(sketch.apply(torch.randn(3, 6, 2)))[1] == 0).all()


@pytest.mark.parametrize("name", SAMPLING)
def test_rows_that_cannot_be_drawn_are_never_read(name: str) -> None:
    log_p = torch.zeros(40, 7)
    log_p[:, :3] = NEVER
    x = torch.randn(7, 2)
    x[:3] = torch.nan
    assert draw(name, 7, 9, batch=(40,), generator=generator(), log_probability=log_p).apply(x).isfinite().all()


@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize("support", [1, 4, 8])
def test_without_replacement_is_exact_when_it_takes_everything(support: int, extra: int) -> None:
    n, d = 8, support + extra
    log_p = 30 * torch.randn(20, n, generator=generator())
    log_p[:, support:] = NEVER
    order = torch.randperm(n, generator=generator())
    sketch = draw("subsampling_without", n, d, batch=(20,), generator=generator(), log_probability=log_p[:, order])
    identity = torch.diag((order < support).float())
    dense = sketch.dense()
    assert torch.equal(dense @ dense.mT, identity.expand(20, n, n))
    x = torch.randn(20, n, 3)
    assert torch.equal(sketch.lift(sketch.apply(x)), identity @ x)


@pytest.mark.parametrize("name", SAMPLING)
def test_a_nan_changes_only_its_example(name: str) -> None:
    log_p = torch.randn(3, 6, generator=generator())
    clean = draw(name, 6, 4, batch=(3,), generator=generator(), log_probability=log_p).dense()
    log_p = log_p.clone()
    log_p[1, 2] = torch.nan
    dense = draw(name, 6, 4, batch=(3,), generator=generator(), log_probability=log_p).dense()
    assert torch.equal(dense[[0, 2]], clean[[0, 2]])
    assert dense[1].isnan().any()


@pytest.mark.parametrize("name", SAMPLING)
def test_probabilities_carry_no_gradient(name: str) -> None:
    log_p = torch.randn(6, requires_grad=True)
    assert not draw(name, 6, 4, log_probability=log_p).dense().requires_grad


@pytest.mark.parametrize("name", SAMPLING)
def test_extreme_logits(name: str) -> None:
    log_p = torch.tensor([1e4, -1e4, 1e4, -3e4, 0.0])
    dense = draw(name, 5, 2, batch=(100,), generator=generator(), log_probability=log_p).dense()
    assert dense.isfinite().all()
    assert (dense[:, [1, 3, 4]] == 0).all()
    assert (dense[:, [0, 2]] != 0).any()
