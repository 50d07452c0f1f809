"""Proposition 1 and Lemma 1 of Chen et al. (2022) as functions, and measured quantities that they speak of.

The n x n matrix B = D^-1 A is formed. Use float64, because squares of small weights underflow in float32. Leading
dimensions `...` broadcast; a result has one number for each where no shape is given. Wrong shapes and values raise a
ValueError, wrong types a TypeError. The arguments have the same meaning everywhere:

    query        (..., rows, p)  Q                  key     (..., n, p)  K
    B            (..., rows, n)  attention matrix   V       (..., n, p)  values
    probability  (..., n)        p_i, of sum 1      key_mask (..., n)    True for real keys; None if all are
    budget       d, the number of samples           delta   the probability of failure
    scale        the factor of the scores, 1/sqrt(p) if None

B^(i) is column i of B, V_(i) is row i of V, |.| is the Euclidean norm of a vector and |.|_F the Frobenius norm of a
matrix. A padded key is a zero column of B. Remove padded queries from B: each of its rows counts as a token.

Example:
    >>> B = attention_matrix(query, key)
    >>> expected_squared_error(B, value, optimal_probability(B, value), budget=64)
"""

import math

import torch
from torch import Tensor

from skeinformer.checks import check_count


def attention_matrix(query: Tensor, key: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Compute B = D^-1 A = softmax(scale Q K^T), Section 3.1, exactly 0 in columns of padding. O(rows n p)."""
    logits = _logits(query, key, scale)
    padding = ~_mask_of_columns(key_mask, logits)
    # the softmax of a row of padding is NaN, so padding is filled with 0 afterwards
    return logits.masked_fill(padding, -math.inf).softmax(-1).masked_fill(padding, 0.0)


def optimal_probability(B: Tensor, V: Tensor) -> Tensor:
    """Compute p*_i = |B^(i)| |V_(i)| / sum_j |B^(j)| |V_(j)|, which minimizes the expected error: Eq. (3), beta = 1.

    They are uniform where every product is 0.
    """
    _check_product(B, V)
    weight = _importance(B, V)
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / total, 1.0 / weight.shape[-1])


def estimated_probability(B_J: Tensor, V: Tensor) -> Tensor:
    """Estimate `optimal_probability` from pilot rows of B, (..., pilots, n): Eq. (5). O(pilots n + n p).

    It is the same function of fewer rows. A column on which no pilot has weight gets probability 0: then beta is 0.
    """
    return optimal_probability(B_J, V)


def quality_coefficient(probability: Tensor, optimal: Tensor) -> Tensor:
    """Compute the largest beta in [0, 1] with p_i >= beta p*_i for all i, Eq. (3).

    Args:
        probability: p, (..., n).
        optimal: p*, (..., n). Columns with p*_i = 0 (padding, zero rows of V) meet the condition with any p_i.
    """
    _check_probability("probability", probability, optimal.shape[-1])
    _check_probability("optimal", optimal, probability.shape[-1])
    # both sum to 1, so only rounding exceeds 1
    return torch.where(optimal > 0, probability / optimal, math.inf).amin(-1).clamp(max=1.0)


def expected_squared_error(B: Tensor, V: Tensor, probability: Tensor, budget: int) -> Tensor:
    """Compute E|BV - B S S^T V|_F^2 = (1/d) (sum_i |B^(i)|^2 |V_(i)|^2 / p_i - |BV|_F^2) exactly. O(rows n p).

    S is the sub-sampling matrix of Definition 1. The error is infinite if p_i = 0 for a column that contributes to BV.
    """
    _check_product(B, V)
    _check_probability("probability", probability, B.shape[-1])
    check_count("budget", budget)
    squares = _importance(B, V).square()  # (..., n)
    second_moment = torch.where(squares > 0, squares / probability, 0.0).sum(-1)
    return (second_moment - (B @ V).square().sum((-2, -1))) / budget


def proposition_1_bound(B: Tensor, V: Tensor, budget: int, beta: float | Tensor, delta: float) -> Tensor:
    """Compute eta^2 / (beta d) |B|_F^2 |V|_F^2 with eta = 1 + sqrt((8 / beta) log(1 / delta)). O(rows n + n p).

    Right-hand side of Eq. (4), Proposition 1, after Theorem 1 of Drineas et al. (2006): if p_i >= beta p*_i for all i,
    |BV - B S S^T V|_F^2 exceeds it with probability at most delta.

    Args:
        beta: Quality of the probabilities, in (0, 1]; a tensor broadcasts to (...).
    """
    _check_product(B, V)
    check_count("budget", budget)
    _check_delta(delta, 1.0)
    beta = torch.as_tensor(beta, dtype=B.dtype, device=B.device)
    if not bool(((beta > 0) & (beta <= 1)).all()):
        raise ValueError(f"beta must lie in (0, 1], got {beta.min().item():g} to {beta.max().item():g}")
    eta = 1 + torch.sqrt(8 / beta * math.log(1 / delta))
    return eta.square() / (beta * budget) * B.square().sum((-2, -1)) * V.square().sum((-2, -1))


def lemma_1_constant(B: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """Compute C = min_i |B^(i)|^2 / rows over the real keys, the largest constant that Lemma 1 may assume. O(rows n).

    Rows of B sum to 1, so C <= 1 / m for m real keys. Flat attention has C = 1 / m^2. C is infinite without a real key.
    """
    _check_matrix("B", B)
    mean_square = B.square().mean(-2)  # (..., n)
    return mean_square.masked_fill(~_mask_of_columns(key_mask, B).squeeze(-2), math.inf).amin(-1)


def lemma_1_sample_size(n: int, constant: float | Tensor, delta: float) -> Tensor:
    """Compute d = (2 / C^2) log(2 n / delta), the number of pilots in the proof of Lemma 1, for delta < 0.5.

    So many pilots give beta >= sqrt(1/3) with probability at least 1 - delta. Since C <= 1/n they are at least
    2 n^2 log(2 n / delta), more than n^2 pilots from n rows. The size is in float64, not rounded, infinite for C = 0.

    Args:
        n: The number of keys.
        constant: C, see `lemma_1_constant`.
    """
    check_count("n", n)
    _check_delta(delta, 0.5)
    constant = torch.as_tensor(constant)
    if not bool((constant >= 0).all()):
        raise ValueError(f"constant must be at least 0 (see lemma_1_constant), got {constant.min().item():g}")
    return 2 / constant.double().square() * math.log(2 * n / delta)


def chernoff_sample_size(B: Tensor, delta: float) -> Tensor:
    """Compute d = 12 M log(2 n / delta) with M = max_i rows max_j b_ji^2 / |B^(i)|^2, not rounded. O(rows n).

    Not in the paper. So many pilots, drawn uniformly with replacement, give beta >= sqrt(1/3) with probability at least
    1 - delta, by the multiplicative Chernoff bound. M is 1 for flat attention and at most 1 / C, so the size is below
    that of Lemma 1 wherever C < 1/6. Zero columns (padding) count neither in M nor in n.
    """
    _check_matrix("B", B)
    _check_delta(delta, 1.0)
    squares = B.square()
    total = squares.sum(-2)  # (..., n)
    nonzero = total > 0
    peak = torch.where(nonzero, B.shape[-2] * squares.amax(-2) / total, 0.0).amax(-1)  # M
    return 12 * peak * torch.log(2 * nonzero.sum(-1).clamp(min=1).to(B.dtype) / delta)


def row_concentration(B: Tensor) -> Tensor:
    """Compute |row i|_2 / |row i|_1, the weight of row i in a row sketch of B (or A), Section 3.3. O(rows n).

    It is 1/sqrt(m) for a flat row over m keys, 1 for a row with one weight, 0 for a row of zeros.
    """
    _check_matrix("B", B)
    total = B.abs().sum(-1)
    return torch.where(total > 0, B.square().sum(-1).sqrt() / total, 0.0)


def sparsity_measure(query: Tensor, key: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """Compute M_i = ln(arithmetic mean / geometric mean) of row i of A, Informer's measure, Section 3.3. O(rows n p).

    With l = log A it is logsumexp_j l_ij - log n - mean_j l_ij, 0 without a real key. The paper has a sum in place of
    the arithmetic mean, which keeps the order.
    """
    logits = _logits(query, key, scale)  # (..., rows, n)
    mask = _mask_of_columns(key_mask, logits)
    m = mask.sum(-1).to(logits.dtype)  # (..., 1)
    mean = logits.masked_fill(~mask, 0.0).sum(-1) / m
    measure = logits.masked_fill(~mask, -math.inf).logsumexp(-1) - m.log() - mean
    return torch.where(m > 0, measure, 0.0)


def rank_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Compute Spearman's rho of x and y, (..., k) each, in float64; NaN where one of them is constant. O(k log k)."""
    if x.shape != y.shape or x.ndim == 0:
        raise ValueError(f"x and y must have one shape (..., k), got {tuple(x.shape)} and {tuple(y.shape)}")
    x_rank, y_rank = _centered_rank(x), _centered_rank(y)
    return (x_rank * y_rank).sum(-1) / (x_rank.square().sum(-1) * y_rank.square().sum(-1)).sqrt()


def _centered_rank(x: Tensor) -> Tensor:
    """Return the ranks of x less their mean, in float64; equal values share their average rank."""
    x = x.detach().contiguous()
    ordered = x.sort(-1).values
    below, not_above = torch.searchsorted(ordered, x), torch.searchsorted(ordered, x, right=True)
    return (below + not_above - x.shape[-1]).double() / 2  # ranks 0 to k - 1 have mean (k - 1) / 2


def _importance(B: Tensor, V: Tensor) -> Tensor:
    return B.square().sum(-2).sqrt() * V.square().sum(-1).sqrt()  # |B^(i)| |V_(i)|, (..., n)


def _logits(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return scale Q K^T, (..., rows, n), or raise."""
    _check_matrix("query", query)
    _check_matrix("key", key, query.dtype)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query has width {query.shape[-1]} and key has width {key.shape[-1]}; expected one width p")
    return query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)


def _mask_of_columns(key_mask: Tensor | None, matrix: Tensor) -> Tensor:
    """Return key_mask (..., n) as (..., 1, n), which broadcasts over the rows of `matrix`, or raise."""
    if key_mask is None:
        return torch.ones(1, matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be boolean with True for real keys, got {key_mask.dtype}; use key_mask.bool()")
    if key_mask.ndim == 0 or key_mask.shape[-1] != matrix.shape[-1]:
        raise ValueError(f"key_mask has shape {tuple(key_mask.shape)}, expected (..., {matrix.shape[-1]})")
    return key_mask.unsqueeze(-2)


def _check_matrix(name: str, x: Tensor, dtype: torch.dtype | None = None) -> None:
    if x.ndim < 2 or x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ValueError(f"{name} must be a non-empty matrix with any leading dimensions, got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}; convert with {name}.double()")
    if dtype not in (None, x.dtype):
        raise TypeError(f"expected one dtype {dtype}, but {name} is {x.dtype}; convert one of them")


def _check_product(B: Tensor, V: Tensor) -> None:
    _check_matrix("B", B)
    _check_matrix("V", V, B.dtype)
    if B.shape[-1] != V.shape[-2]:
        raise ValueError(f"B has {B.shape[-1]} columns and V has {V.shape[-2]} rows; expected the same number n")


def _check_probability(name: str, probability: Tensor, n: int) -> None:
    if probability.ndim == 0 or probability.shape[-1] != n:
        raise ValueError(f"{name} has shape {tuple(probability.shape)}, expected (..., {n})")
    least, total = probability.min().item(), probability.sum(-1)
    if least < 0 or not bool(((total - 1).abs() < 1e-3).all()):
        raise ValueError(f"{name} must be non-negative and sum to 1, got a least {least:g} and sums {total.tolist()}")


def _check_delta(delta: float, upper: float) -> None:
    if not 0 < delta < upper:
        raise ValueError(f"delta, the probability of failure, must lie in (0, {upper:g}), got {delta!r}")
