"""Slow transcriptions of linear attention: one head, loops, float64, differentiable, features exponentiated as written.

Choromanski et al. (2021) for the random features, Katharopoulos et al. (2020) for elu(x) + 1. Masks are Python lists.
"""

import math

import torch
from torch import Tensor

from tests.reference import Mask, combine, dot, zero_padded


def gram_schmidt(rows: Tensor) -> Tensor:
    """The rows made orthonormal one after the other, each keeping the side of the plane that it was on."""
    done: list[Tensor] = []
    for row in rows:
        rest = row
        for unit in done:
            rest = rest - dot(rest, unit) * unit
        done.append(rest / dot(rest, rest).sqrt())
    return torch.stack(done)


def orthogonal_random_features(directions: Tensor, lengths: Tensor) -> Tensor:
    """(m, p) from Gaussian blocks (ceil(m / p), p, p), whose columns give the directions, and Gaussian rows (m, p)."""
    rows = [row for block in directions for row in gram_schmidt(block.T)]
    return torch.stack([dot(lengths[f], lengths[f]).sqrt() * rows[f] for f in range(len(lengths))])


def positive_random_features(x: Tensor, W: Tensor, scale: float) -> list[Tensor]:
    """phi_f(x) = exp(w_f . x - |x|^2 / 2) / sqrt(m), of x multiplied by the root of the scale."""
    x = math.sqrt(scale) * x
    return [torch.exp(dot(w, x) - dot(x, x) / 2) / math.sqrt(len(W)) for w in W]


def elu_features(x: Tensor) -> list[Tensor]:
    """elu(x) + 1: exp(x) below zero, x + 1 above."""
    return [torch.exp(entry) if float(entry.detach()) < 0 else entry + 1 for entry in x]


def kernel_attention(
    phi_Q: list[list[Tensor]], phi_K: list[list[Tensor]], V: Tensor, key_mask: Mask, query_mask: Mask
) -> Tensor:
    """sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j) over the real keys; zeros where there is none."""
    rows = []
    for phi_q in phi_Q:
        weights = []
        for j, phi_k in enumerate(phi_K):
            products = [a * b for a, b in zip(phi_q, phi_k, strict=True)]
            weights.append(sum(products[1:], products[0]) if key_mask[j] else V.new_zeros(()))
        total = sum(weights[1:], weights[0])
        rows.append(combine([w / total for w in weights], V) if any(key_mask) else torch.zeros_like(V[0]))
    return zero_padded(rows, query_mask)


def performer(Q: Tensor, K: Tensor, V: Tensor, W: Tensor, scale: float, key_mask: Mask, query_mask: Mask) -> Tensor:
    """FAVOR+ with the given features W."""
    phi_Q = [positive_random_features(q, W, scale) for q in Q]
    phi_K = [positive_random_features(k, W, scale) for k in K]
    return kernel_attention(phi_Q, phi_K, V, key_mask, query_mask)


def linear_transformer(Q: Tensor, K: Tensor, V: Tensor, key_mask: Mask, query_mask: Mask) -> Tensor:
    """elu(x) + 1 as the feature map."""
    return kernel_attention([elu_features(q) for q in Q], [elu_features(k) for k in K], V, key_mask, query_mask)
