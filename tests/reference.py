"""Slow, literal transcriptions of the equations of Chen et al. (2022): one head, loops, float64, differentiable.

Written from the paper, never from the package. Matrices are (n, p); index lists and masks are Python lists. As the
paper treats padding, padded keys are no columns, padded queries are no rows, and n becomes the number m of real keys.
"""

import math

import torch
from torch import Tensor

Mask = list[bool]


def dot(x: Tensor, y: Tensor) -> Tensor:
    """x . y, one product after the other."""
    total = x.new_zeros(())
    for k in range(len(x)):
        total = total + x[k] * y[k]
    return total


def score_row(query: Tensor, K: Tensor, scale: float) -> list[Tensor]:
    """s q . k_j for every j, numbers in a list."""
    return [scale * dot(query, K[j]) for j in range(len(K))]


def softmax_row(query: Tensor, K: Tensor, scale: float, key_mask: Mask) -> list[Tensor]:
    """Row of B = D^-1 A: exp(s q . k_j) over their sum; padded keys get 0. No real key gives zeros."""
    scores = score_row(query, K, scale)
    real = [j for j in range(len(K)) if key_mask[j]]
    if not real:
        return [query.new_zeros(())] * len(K)
    largest = max(float(scores[j].detach()) for j in real)
    a = [torch.exp(scores[j] - largest) if key_mask[j] else query.new_zeros(()) for j in range(len(K))]
    total = sum(a[1:], a[0])
    return [entry / total for entry in a]


def combine(weights: list[Tensor], V: Tensor) -> Tensor:
    """sum_j w_j v_j."""
    total = torch.zeros_like(V[0])
    for j in range(len(V)):
        total = total + weights[j] * V[j]
    return total


def zero_padded(rows: list[Tensor], query_mask: Mask) -> Tensor:
    """The output: rows of padded queries are zero."""
    return torch.stack([rows[i] if query_mask[i] else torch.zeros_like(rows[i]) for i in range(len(rows))])


def softmax_attention(Q: Tensor, K: Tensor, V: Tensor, scale: float, key_mask: Mask, query_mask: Mask) -> Tensor:
    """softmax(s Q K^T) V."""
    return zero_padded([combine(softmax_row(Q[i], K, scale, key_mask), V) for i in range(len(Q))], query_mask)


def v_mean(Q: Tensor, V: Tensor, key_mask: Mask, query_mask: Mask) -> Tensor:
    """(1/m) 1 1^T V over the m real keys."""
    m = sum(key_mask)
    weights = [V.new_ones(()) / m if real else V.new_zeros(()) for real in key_mask]
    return zero_padded([combine(weights, V) for _ in range(len(Q))], query_mask)


def estimated_probability(
    Q: Tensor, K: Tensor, V: Tensor, pilots: list[int], scale: float, key_mask: Mask
) -> list[Tensor]:
    """p_i of Eq. (5): (sum_k b_{j_k i}^2)^(1/2) |V_(i)|, divided by their sum over i."""
    B_J = [softmax_row(Q[j], K, scale, key_mask) for j in pilots]
    weights = []
    for i in range(len(K)):
        column = V.new_zeros(())
        for row in B_J:
            column = column + row[i] ** 2
        weights.append(column**0.5 * dot(V[i], V[i]) ** 0.5 if key_mask[i] else V.new_zeros(()))
    total = sum(weights[1:], weights[0])
    return [(weight / total).detach() for weight in weights]


def algorithm_1(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    pilots: list[int],
    columns: list[int],
    *,
    scale: float,
    key_mask: Mask,
    query_mask: Mask,
    probability: list[Tensor] | None = None,
    row_norm: str = "adaptive",
    reuse_pilots: bool = True,
) -> Tensor:
    """Algorithm 1 for given pilots J and columns J' (lines 1 and 5 draw them).

    row_norm="simple" leaves the second term out of lines 9 and 11; "none" is D^-1 A S S^T V with the exact D and S of
    Definition 1 for the given probability. reuse_pilots=False leaves line 12 out.
    """
    m, d = sum(key_mask), len(columns)
    Q_J = [Q[j] for j in pilots]  # line 2
    B_J = [softmax_row(query, K, scale, key_mask) for query in Q_J]  # line 3
    if row_norm == "none":
        assert probability is not None
        S = sub_sampling_matrix(columns, probability, len(K))
        R = list(sketched_columns(Q, K, V, S, scale, key_mask, [True] * len(Q)))
    else:
        K_selected, V_selected = [K[j] for j in columns], [V[j] for j in columns]  # line 6
        unselected = [j for j in range(len(K)) if key_mask[j] and j not in columns]
        R = []
        for i in range(len(Q)):
            a = [torch.exp(scale * dot(Q[i], key)) for key in K_selected]  # line 7
            R_selected = torch.zeros_like(V[0])
            for k in range(d):
                R_selected = R_selected + a[k] * V_selected[k]
            g = Q.new_ones(())  # line 8
            for k in range(d):
                g = g * a[k] ** (1 / d)
            row_sum = Q.new_zeros(())  # line 9
            for k in range(d):
                row_sum = row_sum + a[k]
            v = torch.zeros_like(V[0])  # line 10
            for j in unselected:
                v = v + V[j]
            if row_norm == "adaptive":
                row_sum = row_sum + (m - d) * g
                R_selected = R_selected + g * v
            R.append(R_selected / row_sum if d else torch.zeros_like(V[0]))  # line 11
    if reuse_pilots:  # line 12
        for k, j in enumerate(pilots):
            R[j] = combine(B_J[k], V)
    return zero_padded(R, query_mask)


def sub_sampling_matrix(columns: list[int], probability: list[Tensor], n: int) -> Tensor:
    """S of Definition 1: column k is e_i / sqrt(d p_i) for i = columns[k]."""
    S = torch.zeros(n, len(columns), dtype=torch.float64)
    for k, i in enumerate(columns):
        S[i, k] = 1 / math.sqrt(len(columns) * float(probability[i]))
    return S


def sketched_columns(
    Q: Tensor, K: Tensor, V: Tensor, S: Tensor, scale: float, key_mask: Mask, query_mask: Mask
) -> Tensor:
    """D^-1 A S S^T V for a dense S; columns of A and rows of V that are padding are zero."""
    real = torch.stack([V[j] if key_mask[j] else torch.zeros_like(V[j]) for j in range(len(V))])
    sketched = torch.stack([combine([dot(S[i], S[j]) for j in range(len(V))], real) for i in range(len(V))])
    return softmax_attention(Q, K, sketched, scale, key_mask, query_mask)


def sketched_rows(Q: Tensor, K: Tensor, V: Tensor, S: Tensor, scale: float, key_mask: Mask, query_mask: Mask) -> Tensor:
    """D^-1 S S^T A V for a dense S; rows of A that are padding are zero."""
    real = [j for j in range(len(K)) if key_mask[j]]
    A = [[torch.exp(score) for score in score_row(Q[i], K, scale)] for i in range(len(Q))]
    D = [sum((A[i][j] for j in real), Q.new_zeros(())) for i in range(len(Q))]
    R = []
    for i in range(len(Q)):
        row = torch.zeros_like(V[0])
        for k in range(len(Q)):
            for j in real:
                if query_mask[k]:
                    row = row + dot(S[i], S[k]) * A[k][j] * V[j] / D[i]
        R.append(row)
    return zero_padded(R, query_mask)
