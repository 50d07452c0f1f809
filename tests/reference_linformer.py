"""A slow, literal transcription of Linformer's linear self-attention (Wang et al. 2020, section 4): one head, loops.

Written from the paper, never from the package. Padded keys are left out of every combination.
"""

import torch
from torch import Tensor

from tests.reference import Mask, combine, dot, zero_padded


def combinations(projection: Tensor, X: Tensor, key_mask: Mask) -> Tensor:
    """E X: row c is sum_j E_cj x_j over the real rows j of X, E given as (d, n)."""
    rows = []
    for c in range(len(projection)):
        row = torch.zeros_like(X[0])
        for j in range(len(X)):
            if key_mask[j]:
                row = row + projection[c, j] * X[j]
        rows.append(row)
    return torch.stack(rows)


def linformer(
    Q: Tensor, K: Tensor, V: Tensor, E: Tensor, F: Tensor, scale: float, key_mask: Mask, query_mask: Mask
) -> Tensor:
    """softmax(s Q (E K)^T) F V with E and F of shape (d, n)."""
    EK, FV = combinations(E, K, key_mask), combinations(F, V, key_mask)
    rows = []
    for i in range(len(Q)):
        scores = [scale * dot(Q[i], EK[c]) for c in range(len(EK))]
        largest = max(float(score.detach()) for score in scores)
        a = [torch.exp(score - largest) for score in scores]
        total = sum(a[1:], a[0])
        rows.append(combine([entry / total for entry in a], FV))
    return zero_padded(rows, query_mask)
