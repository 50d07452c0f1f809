"""Virtual queries by slow loops over the equations: one head, lists and vectors."""

import math

import torch
from torch import Tensor

from tests.reference import dot, softmax_row
from tests.reference_cluster import lloyd, query_metric


def gradients(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    R: Tensor,
    G: Tensor,
    mass: Tensor,
    ranked: list[int],
    asked: list[int],
    d: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """dK and dV of exact attention, from d exact rows of mean queries.

    ranked: queries in order of their draw, the first d of them the first centers. asked: keys that make the metric.
    """
    p = Q.shape[1]
    center = sum(K[j] for j in asked) / len(asked)
    spread = scale * math.sqrt(sum(float((K[j] - center).norm()) ** 2 for j in asked) / len(asked))
    cluster = lloyd(Q, ranked, d, 1, query_metric(K, asked, 0.1))
    dK, dV = torch.zeros_like(K), torch.zeros_like(V)
    C, e = Q.new_zeros(p, V.shape[1]), Q.new_zeros(p)
    G_sum, away = V.new_zeros(V.shape[1]), 0.0
    for c in range(d):
        members = [i for i in range(len(Q)) if cluster[i] == c and G[i].norm() > 0]
        weights = [math.sqrt(float(G[i].abs().max())) for i in members]
        if not members:
            continue
        q = sum(w * Q[i] for w, i in zip(weights, members, strict=True)) / sum(weights)
        g = sum(G[i] for i in members)
        P = softmax_row(q, K, scale, [True] * len(K))
        o = sum(P[j] * V[j] for j in range(len(K)))
        for j in range(len(K)):
            dV[j] += P[j] * g
            dK[j] += scale * P[j] * (dot(g, V[j]) - dot(g, o)) * q
        G_sum += g
        away += sum(float(G[i].abs().max()) * float((Q[i] - q).norm()) ** 2 for i in members if i in ranked)
        for i in members:
            C += torch.outer(Q[i] - q, G[i])
            e += (Q[i] - q) * dot(G[i], R[i])
    mean_key = sum(mass[j] * K[j] for j in range(len(K))) / sum(mass)
    sizes = sum(float(G[i].abs().max()) for i in range(len(Q)))
    t = spread * float(C.norm()) / math.sqrt(V.shape[1]) / sizes
    variance = spread * spread * away / sum(float(G[i].abs().max()) for i in ranked) / p
    f = 1 / (1 + variance / 50)
    for j in range(len(K)):
        dK[j] = f * (dK[j] + scale / (1 + 4 * t * t) * mass[j] * (C @ V[j] - e))
        dV[j] = f * dV[j] + (1 - f) * mass[j] * G_sum
        dV[j] += scale / (2 + 8 * t * t) * mass[j] * ((K[j] - mean_key) @ C)
    return dK, dV
