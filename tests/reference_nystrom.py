"""A slow transcription of Nystromformer, Xiong et al. (2021): one head, loops, float64, differentiable.

Padded tokens are left out before anything else, and empty landmarks do not exist: matrices have as many rows and
columns as there are landmarks with a token. Masks are Python lists, matrices lists of rows.
"""

import torch
from torch import Tensor

from tests.reference import Mask, combine, dot, softmax_attention, softmax_row, zero_padded

Matrix = list[list[Tensor]]


def landmarks(X: Tensor, mask: Mask, num_landmarks: int) -> Tensor:
    """Means of the segments floor(r L / m) of the m real tokens, in order; only those that hold a token."""
    real = [X[i] for i in range(len(X)) if mask[i]]
    segments: dict[int, list[Tensor]] = {}
    for rank, row in enumerate(real):
        segments.setdefault(rank * num_landmarks // len(real), []).append(row)
    return torch.stack([sum(rows[1:], rows[0]) / len(rows) for _, rows in sorted(segments.items())])


def product(X: Matrix, Y: Matrix) -> Matrix:
    """X Y, one entry after the other."""
    columns = [torch.stack([row[j] for row in Y]) for j in range(len(Y[0]))]
    return [[dot(torch.stack(row), column) for column in columns] for row in X]


def minus(number: float, X: Matrix) -> Matrix:
    """number I - X."""
    return [[(number if i == j else 0.0) - X[i][j] for j in range(len(X))] for i in range(len(X))]


def pseudo_inverse(A: Matrix, iterations: int) -> Matrix:
    """Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from A^T over its largest row and column sums."""
    rows = torch.stack([sum(row[1:], row[0]) for row in A]).max()
    columns = torch.stack([sum((row[j] for row in A[1:]), A[0][j]) for j in range(len(A[0]))]).max()
    Z = [[A[i][j] / (rows * columns) for i in range(len(A))] for j in range(len(A[0]))]
    for _ in range(iterations):
        AZ = product(A, Z)
        factor = minus(13, product(AZ, minus(15, product(AZ, minus(7, AZ)))))
        Z = [[entry / 4 for entry in row] for row in product(Z, factor)]
    return Z


def nystrom_attention(
    Q: Tensor, K: Tensor, V: Tensor, num_landmarks: int, iterations: int, scale: float, key_mask: Mask, query_mask: Mask
) -> Tensor:
    """softmax(s Q K~^T) A^+ softmax(s Q~ K^T) V; softmax attention where real keys or queries are the landmarks."""
    if sum(key_mask) <= num_landmarks or sum(query_mask) <= num_landmarks:
        return softmax_attention(Q, K, V, scale, key_mask, query_mask)
    Q_mean, K_mean = landmarks(Q, query_mask, num_landmarks), landmarks(K, key_mask, num_landmarks)
    everything = [True] * len(K_mean)
    A = [softmax_row(q, K_mean, scale, everything) for q in Q_mean]
    BV = [list(combine(softmax_row(q, K, scale, key_mask), V)) for q in Q_mean]
    virtual = torch.stack([torch.stack(row) for row in product(pseudo_inverse(A, iterations), BV)])
    return zero_padded([combine(softmax_row(q, K_mean, scale, everything), virtual) for q in Q], query_mask)


def depthwise_convolution(V: Tensor, weight: Tensor, key_mask: Mask) -> Tensor:
    """Row i is sum_t w_t v_{i + t - k // 2}; rows of padding and rows beyond the ends are zero."""
    rows = []
    for i in range(len(V)):
        total = torch.zeros_like(V[0])
        for t in range(len(weight)):
            j = i + t - len(weight) // 2
            if 0 <= j < len(V) and key_mask[j]:
                total = total + weight[t] * V[j]
        rows.append(total)
    return torch.stack(rows)
