"""A slow, literal transcription of ProbSparse attention (Zhou et al. 2021, Algorithm 1): one head, loops.

Written from the paper, never from the package. `samples[i]` lists the keys drawn for query i, with repetitions. A key
that is padding may be among them, and is then a zero; it never enters an output row.
"""

import math

import torch
from torch import Tensor

from tests.reference import Mask, combine, dot, softmax_row, zero_padded


def max_mean(query: Tensor, keys: list[Tensor], scale: float) -> float:
    """max_j s q . k_j - (1/U) sum_j s q . k_j."""
    scores = [float(scale * dot(query, key)) for key in keys]
    return max(scores) - sum(scores) / len(scores)


def arithmetic_over_geometric(query: Tensor, keys: list[Tensor], scale: float) -> float:
    """ln of the arithmetic over the geometric mean of a_j = exp(s q . k_j)."""
    a = [math.exp(float(scale * dot(query, key))) for key in keys]
    arithmetic, geometric = sum(a) / len(a), 1.0
    for entry in a:
        geometric *= entry ** (1 / len(a))
    return math.log(arithmetic / geometric)


MEASURES = {"max_mean": max_mean, "paper": arithmetic_over_geometric}


def most_sparse(
    Q: Tensor, K: Tensor, samples: list[list[int]], u: int, scale: float, query_mask: Mask, measure: str
) -> list[int]:
    """The u real queries of largest M, fewer where there are fewer."""
    M = {
        i: MEASURES[measure](Q[i].detach(), [K[j].detach() for j in samples[i]], scale) if samples[i] else 0.0
        for i in range(len(Q))
        if query_mask[i]
    }
    return sorted(M, key=lambda i: -M[i])[:u]


def prob_sparse(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    samples: list[list[int]],
    u: int,
    scale: float,
    key_mask: Mask,
    query_mask: Mask,
    measure: str = "max_mean",
) -> Tensor:
    """Exact rows for the u queries of largest M, the mean of the real values for the others."""
    K = torch.stack([K[j] if key_mask[j] else torch.zeros_like(K[j]) for j in range(len(K))])
    active = most_sparse(Q, K, samples, u, scale, query_mask, measure)
    m = sum(key_mask)
    mean = combine([V.new_ones(()) / m if real else V.new_zeros(()) for real in key_mask], V)
    rows = [combine(softmax_row(Q[i], K, scale, key_mask), V) if i in active else mean for i in range(len(Q))]
    return zero_padded(rows, query_mask)
