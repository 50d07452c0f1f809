"""Proposition 1 and Lemma 1: each formula against slow loops, and each bound against random draws."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from skeinformer.sketch import draw
from skeinformer.theory import (
    attention_matrix,
    chernoff_sample_size,
    estimated_probability,
    expected_squared_error,
    lemma_1_constant,
    lemma_1_sample_size,
    optimal_probability,
    proposition_1_bound,
    quality_coefficient,
    rank_correlation,
    row_concentration,
    sparsity_measure,
)
from tests.cases import cases
from tests.helpers import generator

BETA = math.sqrt(1 / 3)  # the quality that Lemma 1 promises


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def attention_and_values(
    seed: int, n: int, *, sharpness: float = 1.0, rows: int | None = None
) -> tuple[Tensor, Tensor]:
    """B (rows, n) and V (n, 3) with unequal column and row norms."""
    query, key = sharpness * normal(seed, rows or n, 4), normal(seed + 1, n, 4)
    V = normal(seed + 2, n, 3) * normal(seed + 3, n, 1).exp()
    return attention_matrix(query, key), V


def squared_errors(B: Tensor, V: Tensor, probability: Tensor, budget: int, *, trials: int, seed: int) -> Tensor:
    """|BV - B S S^T V|_F^2 for `trials` draws of S, Definition 1."""
    size = {"n": B.shape[-1], "d": budget, "batch": (trials,), "dtype": torch.float64}
    sketch = draw("subsampling", **size, generator=generator(seed), log_probability=probability.log())
    identity = sketch.lift(sketch.apply(V.expand(trials, *V.shape)))  # S S^T V, (trials, n, p)
    return (B @ V - B @ identity).square().sum((-2, -1))


def draw_pilots(B: Tensor, num_pilots: int, *, trials: int, seed: int) -> Tensor:
    """B_J (trials, num_pilots, n) for uniform rows J drawn with replacement, as Lemma 1 has them."""
    return B[torch.randint(B.shape[-2], (trials, num_pilots), generator=generator(seed))]


def norm(numbers: list[float]) -> float:
    return math.sqrt(sum(x * x for x in numbers))


def slow_probability(B: list[list[float]], V: list[list[float]]) -> list[float]:
    weight = [norm([row[i] for row in B]) * norm(V[i]) for i in range(len(V))]
    return [w / sum(weight) for w in weight]


def slow_expected_error(B: list[list[float]], V: list[list[float]], p: list[float], d: int) -> float:
    """E|BV - C/d|_F^2 by summing, over entries, the variance of one sample b_ri v_ic / p_i."""
    total = 0.0
    for row in B:
        for c in range(len(V[0])):
            mean = sum(row[i] * V[i][c] for i in range(len(V)))
            total += sum(p[i] * (row[i] * V[i][c] / p[i] - mean) ** 2 for i in range(len(V)))
    return total / d


def slow_ranks(x: list[float]) -> list[float]:
    """1 + how many are smaller + half of how many others are equal."""
    return [1 + sum(b < a for b in x) + (sum(b == a for b in x) - 1) / 2 for a in x]


def slow_rank_correlation(x: list[float], y: list[float]) -> float:
    rx, ry, middle = slow_ranks(x), slow_ranks(y), (len(x) + 1) / 2
    covariance = sum((a - middle) * (b - middle) for a, b in zip(rx, ry, strict=True))
    return covariance / (norm([a - middle for a in rx]) * norm([b - middle for b in ry]))


@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_matrix_is_softmax_over_real_keys(scale: float | None) -> None:
    query, key = normal(0, 5, 4), normal(1, 7, 4)
    mask = torch.tensor([True, False, True, True, False, True, True])
    s = 0.5 if scale is None else scale  # 1/sqrt(4)
    expected = torch.zeros(5, 7, dtype=torch.float64)
    for i in range(5):
        a = [math.exp(s * float(query[i] @ key[j])) if mask[j] else 0.0 for j in range(7)]
        expected[i] = torch.tensor([x / sum(a) for x in a], dtype=torch.float64)
    B = attention_matrix(query, key, mask, scale)
    assert_close(B, expected)
    assert (B[:, ~mask] == 0).all()
    assert_close(attention_matrix(query, key[mask], None, scale), expected[:, mask])


def test_padding_changes_nothing_and_a_fully_padded_example_is_zero() -> None:
    query, key, V = normal(0, 3, 6, 4), normal(1, 3, 8, 4), normal(2, 3, 8, 2)
    mask = torch.tensor([[True] * 8, [True, False] * 4, [False] * 8])
    B = attention_matrix(query, key, mask)
    assert (B[2] == 0).all()
    assert torch.isfinite(optimal_probability(B, V)).all()
    assert sparsity_measure(query, key, mask)[2].eq(0).all()
    assert row_concentration(B)[2].eq(0).all()
    assert lemma_1_constant(B, mask)[2] == math.inf
    real = mask[1]
    B_real, V_real = attention_matrix(query[1], key[1][real]), V[1][real]
    p = optimal_probability(B, V)[1]
    assert (p[~real] == 0).all()
    assert_close(p[real], optimal_probability(B_real, V_real))
    assert_close(expected_squared_error(B[1], V[1], p, 5), expected_squared_error(B_real, V_real, p[real], 5))
    assert_close(chernoff_sample_size(B, 0.1)[1], chernoff_sample_size(B_real, 0.1))
    assert_close(lemma_1_constant(B, mask)[1], lemma_1_constant(B_real))
    assert_close(sparsity_measure(query, key, mask)[1], sparsity_measure(query[1], key[1][real]))
    assert_close(row_concentration(B)[1], row_concentration(B_real))


def test_probabilities_equal_their_formula() -> None:
    B, V = attention_and_values(0, 9, rows=6)
    assert_close(optimal_probability(B, V).tolist(), slow_probability(B.tolist(), V.tolist()))
    B_J = B[[4, 1, 4]]
    assert_close(estimated_probability(B_J, V).tolist(), slow_probability(B_J.tolist(), V.tolist()))
    # all rows as pilots, each equally often, give the optimal probabilities
    assert_close(estimated_probability(torch.cat([B, B]), V), optimal_probability(B, V))


def test_quality_is_the_largest_beta_that_meets_every_constraint() -> None:
    optimal = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    p = torch.tensor([0.4, 0.1, 0.4, 0.1], dtype=torch.float64)
    assert_close(quality_coefficient(p, optimal).item(), 0.1 / 0.3)
    assert quality_coefficient(optimal, optimal) == 1
    missing = torch.tensor([0.0, 0.4, 0.6, 0.0], dtype=torch.float64)
    assert quality_coefficient(missing, optimal) == 0
    assert_close(quality_coefficient(torch.stack([p, missing]), optimal).tolist(), [1 / 3, 0.0])


def test_expected_error_is_the_sum_of_the_entries_variances() -> None:
    B, V = attention_and_values(0, 7, rows=5)
    p = normal(9, 7).softmax(-1)
    expected = slow_expected_error(B.tolist(), V.tolist(), p.tolist(), 3)
    assert_close(expected_squared_error(B, V, p, 3).item(), expected)
    p[2] = 0
    assert expected_squared_error(B, V, p / p.sum(), 3) == math.inf
    V[2] = 0
    assert torch.isfinite(expected_squared_error(B, V, p / p.sum(), 3))


def test_no_probability_has_a_smaller_expected_error_than_the_optimal_one() -> None:
    B, V = attention_and_values(3, 12, sharpness=2)
    p = optimal_probability(B, V)
    others = (p.log() + 0.1 * normal(4, 500, 12)).softmax(-1)
    assert (expected_squared_error(B, V, others, 4) >= expected_squared_error(B, V, p, 4)).all()


@pytest.mark.parametrize("choice", ["optimal", "estimated", "uniform"])
@pytest.mark.parametrize("budget", [1, 12])
def test_expected_error_agrees_with_draws(choice: str, budget: int) -> None:
    B, V = attention_and_values(10, 24)
    p = {
        "optimal": optimal_probability(B, V),
        "estimated": estimated_probability(draw_pilots(B, 8, trials=1, seed=5)[0], V),
        "uniform": torch.full((24,), 1 / 24, dtype=torch.float64),
    }[choice]
    errors = squared_errors(B, V, p, budget, trials=20_000, seed=6)
    standard_error = errors.std() / math.sqrt(len(errors))
    expected = expected_squared_error(B, V, p, budget)
    assert standard_error < 0.05 * expected  # enough draws to tell
    assert abs(errors.mean() - expected) < 4 * standard_error


def test_bound_equals_its_formula() -> None:
    B, V = attention_and_values(0, 6, rows=4)
    frobenius = sum(b * b for row in B.tolist() for b in row) * sum(v * v for row in V.tolist() for v in row)
    eta = 1 + math.sqrt(8 / 0.5 * math.log(1 / 0.1))
    assert_close(proposition_1_bound(B, V, 3, 0.5, 0.1).item(), eta**2 / (0.5 * 3) * frobenius)
    betas = torch.tensor([0.5, 1.0], dtype=torch.float64)
    each = torch.stack([proposition_1_bound(B, V, 3, beta, 0.1) for beta in (0.5, 1.0)])
    assert_close(proposition_1_bound(B, V, 3, betas, 0.1), each)


@pytest.mark.parametrize("beta", [1.0, 0.3])
@pytest.mark.parametrize("delta", [0.05, 0.5, 0.9])
@pytest.mark.parametrize("tight", [False, True])
def test_error_stays_below_the_bound_with_the_promised_probability(beta: float, delta: float, tight: bool) -> None:
    B, V = attention_and_values(20, 16, sharpness=2)
    if tight:  # the proposition allows negative entries: random signs and norms of V as those of B lose little
        B = B * normal(24, 16, 16).sign()
        V = V / V.norm(dim=-1, keepdim=True) * B.norm(dim=-2)[:, None]
    optimal = optimal_probability(B, V)
    # the rest of the probability goes where it helps least
    wasted = torch.nn.functional.one_hot(optimal.argmin(), 16).double()
    p = beta * optimal + (1 - beta) * wasted
    assert_close(quality_coefficient(p, optimal).item(), beta)
    errors = squared_errors(B, V, p, 6, trials=4000, seed=25)
    assert (errors > proposition_1_bound(B, V, 6, beta, delta)).double().mean() <= delta
    mean_bound = B.square().sum() * V.square().sum() / (beta * 6)  # bounds the mean: eta = 1
    assert expected_squared_error(B, V, p, 6) <= mean_bound
    if tight:  # so eta is needed: without it the bound fails more often than the smallest delta allows
        assert (errors > mean_bound).double().mean() > 0.05


@settings(max_examples=cases(60))
@given(n=st.integers(1, 24), sharpness=st.floats(0, 30), seed=st.integers(0, 1000), delta=st.floats(1e-6, 0.499))
def test_lemma_1_needs_more_than_n_squared_pilots(n: int, sharpness: float, seed: int, delta: float) -> None:
    B, _ = attention_and_values(seed, n, sharpness=sharpness)
    constant = lemma_1_constant(B)
    assert constant <= (1 + 1e-12) / n
    size = lemma_1_sample_size(n, constant, delta)
    assert size > n**2
    # M <= 1/C, so 12 M log(2n/delta) is smaller than the printed size wherever C < 1/6, which n > 6 ensures
    if n > 6:
        assert chernoff_sample_size(B, delta) < size


def test_lemma_1_equals_its_formula() -> None:
    B, _ = attention_and_values(0, 6, rows=4)
    expected = min(sum(row[i] ** 2 for row in B.tolist()) / 4 for i in range(6))
    assert_close(lemma_1_constant(B).item(), expected)
    assert_close(lemma_1_sample_size(6, expected, 0.2).item(), 2 / expected**2 * math.log(2 * 6 / 0.2))
    assert lemma_1_sample_size(6, 0.0, 0.2) == math.inf
    identity = torch.eye(5, dtype=torch.float64)
    assert_close(lemma_1_constant(identity).item(), 1 / 5)  # C = 1/n is reached
    assert_close(lemma_1_constant(torch.full_like(identity, 1 / 5)).item(), 1 / 25)


def test_chernoff_size_equals_its_formula() -> None:
    B, _ = attention_and_values(0, 6, rows=4)
    columns = [[row[i] for row in B.tolist()] for i in range(6)]
    M = max(4 * max(b * b for b in column) / norm(column) ** 2 for column in columns)
    assert_close(chernoff_sample_size(B, 0.2).item(), 12 * M * math.log(2 * 6 / 0.2))
    identity = torch.eye(5, dtype=torch.float64)
    assert_close(chernoff_sample_size(identity, 0.2).item(), 12 * 5 * math.log(50))
    both = torch.stack([identity, torch.full_like(identity, 1 / 5)])
    assert_close(chernoff_sample_size(both, 0.2).tolist(), [12 * 5 * math.log(50), 12 * math.log(50)])


@pytest.mark.parametrize("sharpness", [0.1, 3.0])
@pytest.mark.parametrize("delta", [0.01, 0.2])
def test_chernoff_many_pilots_reach_the_quality_of_lemma_1(sharpness: float, delta: float) -> None:
    B, V = attention_and_values(30, 12, sharpness=sharpness)
    optimal = optimal_probability(B, V)
    num_pilots = math.ceil(chernoff_sample_size(B, delta).item())
    beta = quality_coefficient(
        estimated_probability(draw_pilots(B, num_pilots, trials=1000, seed=31), V), optimal
    )  # (trials,)
    assert (beta >= BETA).double().mean() >= 1 - delta


def test_row_concentration_and_sparsity_equal_their_formulas() -> None:
    query, key = normal(0, 5, 4), normal(1, 7, 4)
    A = (0.5 * query @ key.T).exp()
    p, M = row_concentration(A / A.sum(-1, keepdim=True)), sparsity_measure(query, key)
    for i, a in enumerate(A.tolist()):
        assert_close(p[i].item(), norm(a) / sum(a))
        assert_close(M[i].item(), math.log(sum(a) / 7 / math.prod(a) ** (1 / 7)))
    assert_close(row_concentration(A), p)  # the row scale cancels
    assert_close(sparsity_measure(query, key, scale=0.0), torch.zeros(5, dtype=torch.float64))


def test_sparsity_measure_does_not_overflow() -> None:
    query, key = 1e4 * normal(0, 5, 4), normal(1, 7, 4)
    M = sparsity_measure(query, key)
    assert torch.isfinite(M).all()
    logits = 0.5 * query @ key.T  # one key carries the whole row
    assert_close(M, logits.amax(-1) - math.log(7) - logits.mean(-1))


@settings(max_examples=cases(60))
@given(k=st.integers(2, 20), levels=st.integers(2, 30), seed=st.integers(0, 1000))
def test_rank_correlation_equals_its_loop_with_ties(k: int, levels: int, seed: int) -> None:
    x, y = torch.randint(levels, (2, k), generator=generator(seed)).double()
    x[0], x[1], y[0], y[1] = 0, 1, 0, 1  # neither is constant
    assert_close(rank_correlation(x, y).item(), slow_rank_correlation(x.tolist(), y.tolist()))


def test_leading_dimensions_are_independent() -> None:
    query, key, V = normal(0, 2, 3, 6, 4), normal(1, 2, 3, 8, 4), normal(2, 2, 3, 8, 5)
    B = attention_matrix(query, key)
    p = optimal_probability(B, V)
    for b in range(2):
        for h in range(3):
            assert_close(p[b, h], optimal_probability(B[b, h], V[b, h]))
            one = expected_squared_error(B[b, h], V[b, h], p[b, h], 4)
            assert_close(expected_squared_error(B, V, p, 4)[b, h], one)
            assert_close(
                proposition_1_bound(B, V, 4, 0.5, 0.1)[b, h], proposition_1_bound(B[b, h], V[b, h], 4, 0.5, 0.1)
            )
            assert_close(chernoff_sample_size(B, 0.1)[b, h], chernoff_sample_size(B[b, h], 0.1))
            assert_close(lemma_1_constant(B)[b, h], lemma_1_constant(B[b, h]))
            assert_close(sparsity_measure(query, key)[b, h], sparsity_measure(query[b, h], key[b, h]))


B4, V4, P4 = torch.full((4, 4), 0.25), torch.ones(4, 2), torch.full((4,), 0.25)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: optimal_probability(B4, torch.ones(5, 2)), ValueError, "B has 4 columns and V has 5 rows"),
        (lambda: optimal_probability(B4, V4.double()), TypeError, "V is torch.float64; convert one of them"),
        (lambda: attention_matrix(V4, torch.ones(4, 3)), ValueError, "query has width 2 and key has width 3"),
        (lambda: sparsity_measure(V4, V4, torch.ones(3).bool()), ValueError, r"key_mask has shape \(3,\), expected"),
        (lambda: quality_coefficient(2 * P4, P4), ValueError, "probability must be non-negative and sum to 1"),
        (lambda: expected_squared_error(B4, V4, P4[:3], 2), ValueError, r"expected \(..., 4\)"),
        (lambda: proposition_1_bound(B4, V4, 2, 0.0, 0.1), ValueError, r"beta must lie in \(0, 1\]"),
        (lambda: proposition_1_bound(B4, V4, 2, math.nan, 0.1), ValueError, r"beta must lie in \(0, 1\]"),
        (lambda: proposition_1_bound(B4, V4, 2, 1.0, 1.0), ValueError, r"delta.* must lie in \(0, 1\), got 1.0"),
        (lambda: lemma_1_sample_size(4, 0.1, 0.5), ValueError, r"delta.* must lie in \(0, 0.5\), got 0.5"),
        (lambda: lemma_1_sample_size(4, -0.1, 0.1), ValueError, "constant must be at least 0"),
        (lambda: chernoff_sample_size(B4, 0.0), ValueError, "delta"),
        (lambda: rank_correlation(P4, P4[:2]), ValueError, "x and y must have one shape"),
    ],
)
def test_wrong_arguments_raise(call: Callable[[], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
