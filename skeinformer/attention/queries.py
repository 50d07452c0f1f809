"""Virtual queries: what the gradient of exact attention gives to keys and values, from d exact rows.

With P the exact weights, O the output, G its gradient and delta_i = G_i . O_i,

    dV_j = sum_i P_ij G_i            dK_j = s sum_i P_ij (G_i . v_j - delta_i) q_i

are sums over queries. The derivative of a sketched output gives all keys of a cluster nearly the same, and leaves out
what flows through the clusters' weights. So the backward pass sketches the other side: queries are clustered, and each
cluster c is one exact row, that of the mean query q_c with the summed gradient G_c,

    dV = sum_c P_cj G_c              dK_j = s sum_c P_cj (G_c . v_j - G_c . O_c) q_c + s m_j (C v_j - e)
    C = sum_i (q_i - q_c) G_i^T        e = sum_i (q_i - q_c) delta_i        m_j the mass of key j

where the last term of dK is what the means miss, to first order. Rows are exact, so nothing can blow up; where every
query has a cluster of its own the gradients are exact. docs/cluster.md derives it.
"""

from typing import Literal

import torch
from torch import Tensor

from skeinformer.attention.clusters import find_centers, nearest, query_metric
from skeinformer.attention.selection import sample_without_replacement, uniform_rows
from skeinformer.kernels.choice import known, statistics_dtype
from skeinformer.kernels.fused import row_gradients
from skeinformer.kernels.merge import Estimate
from skeinformer.kernels.queries import add_weighted_product_, query_sums
from skeinformer.kernels.ranges import narrow
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import scramble

Gradient = Literal["queries", "keys"]  # of exact attention, estimated; or the derivative of the output
SAMPLE = 8  # queries per virtual query that the Lloyd step sees
LEAST = 32  # virtual queries: fewer are hardly faster
ASKED = 4  # keys per dimension that the metric is made of
BITS = 23  # of a uniform number


def query_gradients(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    value: Tensor,  # (b, h, n_k, p_v)
    log_weight: Tensor | None,  # (b, h, n_k)
    output: Tensor,  # (b, h, n, p_v), O or what stands for it
    gradient: Tensor,  # (b, h, n, p_v), G; 0 in rows that count for nothing
    scale: float,
    u: Tensor,  # (b, h, n), uniform numbers of the queries
    asked: Tensor,  # (b, h, k), keys that make the metric
    asked_live: Tensor,  # (b, h, k)
    mass: Tensor,  # (b, h, n_k), m
    size: int,  # d
) -> tuple[Tensor, Tensor]:
    """dK and dV by at most `size` virtual queries. Time O(n d p), memory O(n p)."""
    dtype, d, p_v = statistics_dtype(query), min(size, query.shape[-2]), value.shape[-1]
    norm = torch.maximum(gradient.amax(-1), -gradient.amin(-1)).to(dtype)  # (b, h, n), no squares
    unit = norm.amax(-1, keepdim=True)
    norm = norm / unit.where(unit > 0, 1)
    places = query.detach().to(dtype)
    metric = query_metric(gather_rows(key, asked), asked_live)
    sample = sample_without_replacement(norm.log(), u, SAMPLE * d)
    assignment = nearest(places, find_centers(places, sample, d, 1, metric), metric)  # (b, h, n)
    sums = query_sums(query.detach(), gradient, output.detach(), norm.sqrt(), assignment, d)
    mean = sums.queries / sums.weight.clamp(min=torch.finfo(dtype).tiny)  # (b, h, d, p), q_c
    d_key, d_value = row_gradients(mean, key, value, log_weight, sums.gradient[..., :p_v], scale)
    # what the means miss: sum_i (q_i - q_c) [G_i, delta_i]^T
    missed = sums.product - mean.mT @ sums.gradient  # (b, h, p, p_v + 1)
    C, e = missed[..., :p_v], missed[..., p_v:]  # (b, h, p, p_v), (b, h, p, 1)
    add_weighted_product_(d_key, value, C.mT, e.mT, scale * mass)
    return narrow(d_key, key.dtype, 0.5), narrow(d_value, value.dtype, 0.5)


def estimated_gradient(
    gradient: Gradient, key: Tensor, key_mask: Tensor | None, d: int, with_gradients: bool
) -> tuple[bool, Tensor | None]:
    """Whether keys and values get the gradient of exact attention, estimated, and where not, (b, 1, 1, 1).

    with_gradients: whether keys and values will ask for any. Where no more than d keys are real, all of them are kept:
    the output is exact, and so is its own gradient.
    """
    if gradient == "keys" or key.shape[-2] <= d or not with_gradients:
        return False, None
    if key_mask is None:
        return True, None
    few = (key_mask.sum(-1) <= d)[..., None, None]  # (b, 1, 1, 1)
    return True, None if known(~few) else few


def virtual_queries(
    of_queries: Tensor,  # (b, h, n), uniform numbers
    of_keys: Tensor,  # (b, h, n_k), uniform numbers
    key_mask: Tensor | None,
    mass: Tensor,
    size: int,
    width: int,
) -> Estimate:
    """`query_gradients` of `size` virtual queries or LEAST, drawn by the numbers that decided the output already."""
    asked = uniform_rows(of_keys, key_mask, ASKED * width)
    return estimate_of(size)._replace(drawn=(fresh_numbers(of_queries), *asked, mass))


def estimate_of(size: int) -> Estimate:
    """`virtual_queries` without what is drawn."""
    return Estimate(query_gradients, (), max(size, LEAST))


def fresh_numbers(u: Tensor) -> Tensor:
    """Other uniform numbers, a function of these: the ranks of one say nothing about those of the other."""
    bits = scramble((u * 2**BITS).long(), BITS)
    fresh: Tensor = bits.to(u.dtype).add(0.5).mul(2.0**-BITS)
    return fresh
