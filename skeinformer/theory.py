"""Proposition 1 and Lemma 1 of Chen et al. (2022) as functions, and what can be measured of them.

Everything here is for understanding: the n x n matrix B = D^-1 A is formed, and float64 is advised, because squares of
small attention weights underflow in float32. Shapes: B is (..., rows, n), V is (..., n, p), a probability is (..., n),
where n counts keys and `...` are leading dimensions that broadcast. A padded key is a zero column of B. Padded queries
must be dropped from B by the caller, since each row of B counts as one token that can be a pilot.

B^(i) is column i of B, V_(i) is row i of V, d is the number of samples; |.| is the Euclidean norm of a vector and
|.|_F the Frobenius norm of a matrix.
"""

import math

import torch
from torch import Tensor

from skeinformer.registry import check_count


def attention_matrix(query: Tensor, key: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """B = D^-1 A = softmax(scale Q K^T): (..., rows, p), (..., n, p) -> (..., rows, n).

    Section 3.1. `key_mask` (..., n) is True for real keys; the other columns are exactly 0, also where no key is real.
    The scale is 1/sqrt(p) unless given. O(rows n p).
    """
    logits = _logits(query, key, scale)
    if key_mask is None:
        return logits.softmax(-1)
    padding = ~_mask_of_columns(key_mask, logits)
    # a row of only padding is NaN after the softmax; all of it is filled with 0
    return logits.masked_fill(padding, -math.inf).softmax(-1).masked_fill(padding, 0.0)


def optimal_probability(B: Tensor, V: Tensor) -> Tensor:
    """p_i = |B^(i)| |V_(i)| / sum_i' |B^(i')| |V_(i')|, the probabilities with the smallest expected error.

    Right-hand side of Eq. (3) with beta = 1. Where every product is 0 the result is uniform. O(rows n + n p).
    """
    _check_product(B, V)
    return _normalize(_importance(B, V))


def estimated_probability(B_J: Tensor, V: Tensor) -> Tensor:
    """The estimate of `optimal_probability` from the pilot rows B_J = (b_{j_k i}), (..., pilots, n).

    Eq. (5): the column norms of B are replaced by those of B_J. The factor sqrt(n / pilots) cancels, so it is the same
    function of fewer rows. A column on which no pilot has weight gets probability 0, and then beta is 0.
    O(pilots n + n p).
    """
    return optimal_probability(B_J, V)


def quality_coefficient(probability: Tensor, optimal: Tensor) -> Tensor:
    """The measured beta: the largest number with p_i >= beta p*_i for all i, the worst ratio of p to the optimal p*.

    Eq. (3). Columns with p*_i = 0 (padding, zero rows of V) meet the constraint with any p_i and do not count.
    (..., n) -> (...), in [0, 1].
    """
    _check_probability("probability", probability, optimal.shape[-1])
    _check_probability("optimal", optimal, probability.shape[-1])
    ratio = torch.where(optimal > 0, probability / optimal, math.inf)  # (..., n)
    return ratio.amin(-1).clamp(max=1.0)  # both sum to 1, so only rounding exceeds 1


def expected_squared_error(B: Tensor, V: Tensor, probability: Tensor, budget: int) -> Tensor:
    """E|BV - B S S^T V|_F^2 = (1/d) (sum_i |B^(i)|^2 |V_(i)|^2 / p_i - |BV|_F^2), exactly.

    S is the sub-sampling matrix of Definition 1: d independent columns e_i / sqrt(d p_i). B S S^T V is the mean of d
    independent matrices B^(i) V_(i) / p_i, each with mean BV, so it has the variance of one, divided by d. Infinite
    where p_i = 0 on a column that is needed: no weight makes such a sample unbiased. (..., n) -> (...). O(rows n p).
    """
    _check_product(B, V)
    _check_probability("probability", probability, B.shape[-1])
    check_count("budget", budget)
    squares = _importance(B, V).square()  # (..., n)
    second_moment = torch.where(squares > 0, squares / probability, 0.0).sum(-1)
    return (second_moment - (B @ V).square().sum((-2, -1))) / budget


def proposition_1_bound(B: Tensor, V: Tensor, budget: int, beta: float | Tensor, delta: float) -> Tensor:
    """eta^2 / (beta d) |B|_F^2 |V|_F^2 with eta = 1 + sqrt((8 / beta) log(1 / delta)).

    Right-hand side of Eq. (4), Proposition 1 (adapted from Theorem 1 of Drineas et al., 2006): with probability at
    least 1 - delta, |BV - B S S^T V|_F^2 is at most this if p_i >= beta p*_i for all i. `beta` may be a tensor that
    broadcasts to (...), as `quality_coefficient` gives it. O(rows n + n p).
    """
    _check_product(B, V)
    check_count("budget", budget)
    _check_delta(delta, 1.0)
    beta = torch.as_tensor(beta, dtype=B.dtype, device=B.device)
    if not bool(((beta > 0) & (beta <= 1)).all()):
        raise ValueError(
            f"beta must lie in (0, 1], got values from {beta.min().item():g} to {beta.max().item():g}; "
            "a measured beta of 0 means that a needed column is never sampled, and no bound holds"
        )
    eta = 1 + torch.sqrt(8 / beta * math.log(1 / delta))
    return eta.square() / (beta * budget) * B.square().sum((-2, -1)) * V.square().sum((-2, -1))


def lemma_1_constant(B: Tensor, key_mask: Tensor | None = None) -> Tensor:
    """C = min_i |B^(i)|^2 / rows over the real keys, the largest constant that Lemma 1 may assume.

    Rows of B sum to 1, so the squared norms of m real columns sum to at most the number of rows, and C <= 1 / m. With
    flat attention C = 1 / m^2. An example without a real key gives infinity, the minimum of nothing.
    (..., rows, n) -> (...). O(rows n).
    """
    _check_matrix("B", B)
    mean_square = B.square().mean(-2)  # (..., n)
    if key_mask is not None:
        mean_square = mean_square.masked_fill(~_mask_of_columns(key_mask, B).squeeze(-2), math.inf)
    return mean_square.amin(-1)


def lemma_1_sample_size(n: int, constant: float | Tensor, delta: float) -> Tensor:
    """d >= (2 / C^2) log(2 n / delta): the number of pilots as the proof of Lemma 1 prints it, not rounded.

    It promises beta >= sqrt(1/3) with probability at least 1 - delta. Since C <= 1/n it is at least
    2 n^2 log(2 n / delta), more than n^2 pilots from n rows. Infinite for C = 0.
    """
    check_count("n", n)
    _check_delta(delta, 0.5)
    constant = torch.as_tensor(constant)
    if not bool((constant >= 0).all()):
        raise ValueError(f"constant must be at least 0 (see lemma_1_constant), got {constant.min().item():g}")
    return 2 / constant.double().square() * math.log(2 * n / delta)


def chernoff_sample_size(B: Tensor, delta: float) -> Tensor:
    """d >= 12 M log(2 n / delta), M = max_i rows max_j b_ji^2 / |B^(i)|^2: pilots for beta >= sqrt(1/3), not rounded.

    Not in the paper; holds with probability at least 1 - delta for pilots drawn uniformly with replacement. The ratio
    rows |B_J^(i)|^2 / (d |B^(i)|^2) is a mean of d independent numbers in [0, M] with mean 1. The multiplicative
    Chernoff bound keeps it within 1/2 of 1 except with probability 2 exp(-d / (12 M)), and n columns share delta. M is
    1 for flat attention, at most the number of rows, and at most 1 / C: below Lemma 1's size wherever C < 1/6. Zero
    columns (padding) are estimated without error by every draw and count neither in M nor in n.
    (..., rows, n) -> (...). O(rows n).
    """
    _check_matrix("B", B)
    _check_delta(delta, 1.0)
    squares = B.square()
    total = squares.sum(-2)  # (..., n)
    live = total > 0
    peak = torch.where(live, B.shape[-2] * squares.amax(-2) / total, 0.0).amax(-1)
    return 12 * peak * torch.log(2 * live.sum(-1).clamp(min=1).to(B.dtype) / delta)


def row_concentration(B: Tensor) -> Tensor:
    """p_i = |row i|_2 / |row i|_1, the weight of row i in a row sketch of B: (..., rows, n) -> (..., rows).

    Section 3.3: the same for a row of A as for a row of B. Between 1/sqrt(m), a flat row over m keys, and 1, a row with
    one weight. 0 for a row of zeros.
    """
    _check_matrix("B", B)
    total = B.abs().sum(-1)
    return torch.where(total > 0, B.square().sum(-1).sqrt() / total, 0.0)


def sparsity_measure(query: Tensor, key: Tensor, key_mask: Tensor | None = None, scale: float | None = None) -> Tensor:
    """M_i = ln(arithmetic mean / geometric mean) of a_i1 ... a_in, Informer's measure: (..., rows, p) -> (..., rows).

    Section 3.3. From the logits l_ij = log a_ij it is logsumexp_j l_ij - log n - mean_j l_ij, without any exponential
    that overflows. The paper prints a sum in place of the arithmetic mean; that adds log n to every row and keeps the
    order. Only real keys enter; 0 where there is none. O(rows n p).
    """
    logits = _logits(query, key, scale)  # (..., rows, n)
    if key_mask is None:
        return logits.logsumexp(-1) - math.log(logits.shape[-1]) - logits.mean(-1)
    mask = _mask_of_columns(key_mask, logits)
    m = mask.sum(-1).to(logits.dtype)  # (..., 1)
    mean = logits.masked_fill(~mask, 0.0).sum(-1) / m
    measure = logits.masked_fill(~mask, -math.inf).logsumexp(-1) - m.log() - mean
    return torch.where(m > 0, measure, 0.0)


def rank_correlation(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's rho along the last dimension: the correlation of ranks, ties sharing their average rank.

    (..., k), (..., k) -> (...). NaN where x or y is constant, since then it has no order. O(k log k).
    """
    if x.shape != y.shape or x.ndim == 0:
        raise ValueError(f"x and y must have one shape (..., k), got {tuple(x.shape)} and {tuple(y.shape)}")
    x_rank, y_rank = _centered_rank(x), _centered_rank(y)
    return (x_rank * y_rank).sum(-1) / (x_rank.square().sum(-1) * y_rank.square().sum(-1)).sqrt()


def _centered_rank(x: Tensor) -> Tensor:
    """Ranks with mean 0, in float64; equal values share the average of the ranks they occupy."""
    x = x.detach().contiguous()
    ordered = x.sort(-1).values
    below = torch.searchsorted(ordered, x)
    up_to = torch.searchsorted(ordered, x, right=True)
    return (below + up_to - x.shape[-1]).double() / 2  # ranks 0 to k - 1 have mean (k - 1) / 2


def _importance(B: Tensor, V: Tensor) -> Tensor:
    """|B^(i)| |V_(i)|: (..., n)."""
    return B.square().sum(-2).sqrt() * V.square().sum(-1).sqrt()


def _normalize(weight: Tensor) -> Tensor:
    total = weight.sum(-1, keepdim=True)
    return torch.where(total > 0, weight / total, 1.0 / weight.shape[-1])


def _logits(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    _check_matrix("query", query)
    _check_matrix("key", key)
    _check_same_dtype(query=query, key=key)
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(
            f"query has width {query.shape[-1]} and key has width {key.shape[-1]}; expected one width p, "
            f"query (..., rows, p) and key (..., n, p), got {tuple(query.shape)} and {tuple(key.shape)}"
        )
    return query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)


def _mask_of_columns(key_mask: Tensor, matrix: Tensor) -> Tensor:
    """key_mask (..., n), checked, as (..., 1, n) to broadcast over the rows of `matrix`."""
    if key_mask.dtype != torch.bool:
        raise TypeError(f"key_mask must be boolean with True for real keys, got {key_mask.dtype}; use key_mask.bool()")
    if key_mask.ndim == 0 or key_mask.shape[-1] != matrix.shape[-1]:
        raise ValueError(
            f"key_mask has shape {tuple(key_mask.shape)}, expected (..., {matrix.shape[-1]}) = (..., keys)"
        )
    return key_mask.unsqueeze(-2)


def _check_matrix(name: str, x: Tensor) -> None:
    if x.ndim < 2 or x.shape[-1] == 0 or x.shape[-2] == 0:
        raise ValueError(f"{name} must be a non-empty matrix with any leading dimensions, got shape {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"{name} must be floating point, got {x.dtype}; convert with {name}.double()")


def _check_same_dtype(**tensors: Tensor) -> None:
    if len({x.dtype for x in tensors.values()}) > 1:
        found = ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items())
        raise TypeError(f"expected one dtype, but {found}; convert one of them")


def _check_product(B: Tensor, V: Tensor) -> None:
    _check_matrix("B", B)
    _check_matrix("V", V)
    _check_same_dtype(B=B, V=V)
    if B.shape[-1] != V.shape[-2]:
        raise ValueError(
            f"B has {B.shape[-1]} columns and V has {V.shape[-2]} rows; expected as many of one as of the other, "
            f"B (..., rows, n) and V (..., n, p), got {tuple(B.shape)} and {tuple(V.shape)}"
        )


def _check_probability(name: str, probability: Tensor, n: int) -> None:
    if probability.ndim == 0 or probability.shape[-1] != n:
        raise ValueError(f"{name} has shape {tuple(probability.shape)}, expected (..., {n}) = (..., keys)")
    total = probability.sum(-1)
    if bool((probability < 0).any()) or not bool(((total - 1).abs() < 1e-3).all()):
        raise ValueError(
            f"{name} must be non-negative and sum to 1 along its last dimension, got a minimum of "
            f"{probability.min().item():g} and sums from {total.min().item():g} to {total.max().item():g}"
        )


def _check_delta(delta: float, upper: float) -> None:
    if not 0 < delta < upper:
        raise ValueError(f"delta, the probability of failure, must lie in (0, {upper:g}), got {delta!r}")
