"""The cluster sketch in loops: one head, float64, differentiable where the package is. Written from docs/cluster.md."""

import math

import torch
from torch import Tensor

from skeinformer.kernels.near import LEAST_SHARE
from tests.reference import Mask, combine, dot, softmax_row, zero_padded


def query_metric(Q: Tensor, asked: list[int], ridge: float) -> Tensor:
    """The covariance of the queries asked, over its mean eigenvalue, plus a ridge."""
    p = Q.shape[-1]
    mean = sum((Q[i] for i in asked), torch.zeros_like(Q[0])) / len(asked)
    covariance = sum((torch.outer(Q[i] - mean, Q[i] - mean) for i in asked), torch.zeros(p, p, dtype=Q.dtype))
    return covariance * p / sum(float(covariance[e, e]) for e in range(p)) + ridge * torch.eye(p, dtype=Q.dtype)


def nearest(x: Tensor, centers: list[Tensor], metric: Tensor) -> int:
    """The first of the nearest centers."""
    distances = [float(dot(x - center, metric @ (x - center))) for center in centers]
    return distances.index(min(distances))


def lloyd(K: Tensor, sample: list[int], d: int, steps: int, metric: Tensor) -> list[int]:
    """The cluster of every key: the first d keys of the sample are centers, each step moves them to means of it."""
    centers = [K[j] for j in sample[:d]]
    for _ in range(steps):
        members: list[list[int]] = [[] for _ in range(d)]
        for j in sample:
            members[nearest(K[j], centers, metric)].append(j)
        for c in range(d):
            if members[c]:
                centers[c] = sum((K[j] for j in members[c]), torch.zeros_like(K[0])) / len(members[c])
    return [nearest(K[j], centers, metric) for j in range(len(K))]


def log_row_sum(query: Tensor, K: Tensor, scale: float, key_mask: Mask) -> float:
    """lse = log sum_j exp(s q . k_j) over real keys."""
    return math.log(sum(math.exp(float(scale * dot(query, K[j]).detach())) for j in range(len(K)) if key_mask[j]))


def cluster_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    pilots: list[int],
    assignment: list[int],
    *,
    scale: float,
    key_mask: Mask,
    query_mask: Mask,
    first_order: bool = True,
    window: int = 0,
) -> Tensor:
    """The sketch for given pilots and clusters. Mass, log weights and the factor are numbers without gradient.

    With a window keys of the query's block and its neighbours are exact, and clusters are of all other keys.
    """
    real = [j for j in range(len(K)) if key_mask[j]]
    clusters = sorted({assignment[j] for j in real})
    B_J = [softmax_row(Q[i], K, scale, key_mask) for i in pilots]
    exact = [combine(row, V) for row in B_J]
    w = [sum(float(row[j].detach()) for row in B_J) / len(pilots) for j in range(len(K))]
    W = {c: sum(w[j] for j in real if assignment[j] == c) for c in clusters}
    zero_k, zero_v = torch.zeros_like(K[0]), torch.zeros_like(V[0])
    k = {c: sum((w[j] * K[j] for j in real if assignment[j] == c), zero_k) / W[c] for c in clusters}
    v = {c: sum((w[j] * V[j] for j in real if assignment[j] == c), zero_v) / W[c] for c in clusters}
    log_weight = {}
    for c in clusters:
        seen = 0.0
        for i in pilots:
            seen += math.exp(float(scale * dot(Q[i], k[c]).detach()) - log_row_sum(Q[i], K, scale, key_mask)) / len(
                pilots
            )
        log_weight[c] = math.log(W[c] / seen)

    def attend(i: int) -> Tensor:
        near = [j for j in real if window and abs(i // window - j // window) <= 1]
        weighted = [(torch.exp(scale * dot(Q[i], K[j])), V[j]) for j in near]
        for c in clusters:
            far = [j for j in real if assignment[j] == c and j not in near]
            share = sum(w[j] for j in far) / W[c]
            if share > LEAST_SHARE:
                k_c = sum((w[j] * K[j] for j in far), zero_k) / (share * W[c])
                v_c = sum((w[j] * V[j] for j in far), zero_v) / (share * W[c])
                weighted.append((torch.exp(scale * dot(Q[i], k_c) + log_weight[c] + math.log(share)), v_c))
        total = sum((a for a, _ in weighted), Q.new_zeros(()))
        return sum((a / total * x for a, x in weighted), zero_v)

    R = [attend(i) for i in range(len(Q))]
    if first_order:
        C = torch.zeros(len(zero_k), len(zero_v), dtype=torch.float64)
        for j in real:
            C = C + w[j] * torch.outer(K[j] - k[assignment[j]], V[j] - v[assignment[j]])
        mean = sum((Q[i] for i in pilots), torch.zeros_like(Q[0])).detach() / len(pilots)
        term = [scale * (Q[i] - mean) @ C for i in range(len(Q))]
        size = sum(float(dot(term[i], term[i]).detach()) for i in pilots)
        along = sum(float(dot(exact[n] - R[i], term[i]).detach()) for n, i in enumerate(pilots))
        factor = min(max(along / size, 0), 1) if size else 0
        R = [R[i] + factor * term[i] for i in range(len(Q))]
    for n, i in enumerate(pilots):
        R[i] = exact[n]
    return zero_padded(R, query_mask)
