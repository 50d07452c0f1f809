"""Virtual queries: what the gradient of exact attention gives to keys and values, from d exact rows.

With P the exact weights, O the output, G its gradient and delta_i = G_i . O_i,

    dV_j = sum_i P_ij G_i            dK_j = s sum_i P_ij (G_i . v_j - delta_i) q_i

are sums over queries. The derivative of a sketched output gives all keys of a cluster nearly the same, and leaves out
what flows through the clusters' weights. So the backward pass sketches the other side: queries are clustered, and each
cluster c is one exact row, that of the mean query q_c with the summed gradient G_c,

    dV_j = f sum_c P_cj G_c + (1 - f) m_j sum_c G_c + a' s m_j C^T (k_j - k)
    dK_j = f s sum_c P_cj (G_c . v_j - G_c . O_c) q_c + a s m_j (C v_j - e)
    C = sum_i (q_i - q_c) G_i^T        e = sum_i (q_i - q_c) delta_i        m_j the mass of key j, k the mean key

where the last terms are what the means miss, to first order. f in [0, 1] says how narrow the clusters are; a and a'
keep the first order out where it is large. Rows are exact, so nothing can blow up; where every query has a cluster of
its own the gradients are exact. docs/cluster.md derives it.
"""

from typing import Literal

import torch
from torch import Tensor

from skeinformer.attention.clusters import find_centers, nearest, query_metric
from skeinformer.attention.selection import sample_without_replacement, uniform_rows
from skeinformer.kernels.choice import known, statistics_dtype
from skeinformer.kernels.merge import Estimate
from skeinformer.kernels.queries import QueryRows, Sampled, query_sums
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import scramble

Gradient = Literal["queries", "keys"]  # of exact attention, estimated; or the derivative of the output
SAMPLED_QUERIES = 4  # queries per virtual query that the Lloyd step sees
SHARE = 7, 8  # 7/8 of the virtual queries that are asked for: 6 % more error of dK for 5 % less time
FEWEST_QUERIES = 20  # virtual queries
METRIC_KEYS = 4  # keys per dimension that the metric is made of
BITS = 23  # of a uniform number


def query_rows(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    output: Tensor,  # (b, h, n, p_v), O or what stands for it
    gradient: Tensor,  # (b, h, n, p_v), G
    left_out: Tensor | None,  # (b, h, P), queries that count for nothing
    u: Tensor,  # (b, h, n), uniform numbers of the queries
    asked: Tensor,  # (b, h, k), keys that make the metric
    asked_live: Tensor,  # (b, h, k)
    size: int,  # virtual queries that are asked for
    scale: float,
) -> QueryRows:
    """d virtual queries. Time O(n d p), memory O(n p)."""
    others = query.shape[-2] - (0 if left_out is None else left_out.shape[-1])
    dtype, d = statistics_dtype(query), num_rows(size, others)
    norm = torch.maximum(gradient.amax(-1), -gradient.amin(-1)).to(dtype)  # (b, h, n), no squares
    if left_out is not None:
        norm = norm.scatter(-1, left_out, 0)
    unit = norm.amax(-1, keepdim=True)
    unit = unit.where(unit > 0, 1)  # (b, h, 1)
    norm = norm / unit
    places = query.detach().to(dtype)
    keys = gather_rows(key, asked)
    metric = query_metric(keys, asked_live)
    sample = sample_without_replacement(norm.log(), u, SAMPLED_QUERIES * d)
    points = gather_rows(places, sample.indices)  # (b, h, 4 d, p)
    centers = find_centers(points, sample.live, d, 1, metric)
    assignment = nearest(places, centers, metric)  # (b, h, n)
    near = Sampled(points, norm.gather(-1, sample.indices), assignment.gather(-1, sample.indices))
    sums = query_sums(query.detach(), gradient, output.detach(), norm.sqrt(), assignment, d, left_out)
    return QueryRows.of(sums, gradient.shape[-1], unit[..., None], spread(keys, asked_live, scale), near)


def spread(keys: Tensor, live: Tensor, scale: float) -> Tensor:
    """s (mean |k_j - mean k|^2)^(1/2) over the live keys: (b, h, k, p), (b, h, k) -> (b, h, 1, 1)."""
    weight = live[..., None].to(statistics_dtype(keys))  # (b, h, k, 1)
    count = weight.sum(-2, keepdim=True).clamp(min=1)
    around = (keys - (keys * weight).sum(-2, keepdim=True) / count) * weight
    largest = around.abs().amax((-2, -1), keepdim=True)
    unit = largest.where(largest > 0, 1)  # squares stay in range
    return abs(scale) * unit * ((around / unit).square().sum((-2, -1), keepdim=True) / count).sqrt()


def estimated_gradient(
    gradient: Gradient, key: Tensor, key_mask: Tensor | None, d: int, with_gradients: bool
) -> tuple[bool, Tensor | None]:
    """Whether keys and values get the gradient of exact attention, estimated, and where not, (b, 1, 1, 1).

    with_gradients: whether keys and values will ask for any. Where no more than d keys are real, all of them are kept:
    the output is exact, and so is its own gradient. An exported program has the derivative of its output.
    """
    if gradient == "keys" or not with_gradients or torch.compiler.is_exporting() or key.shape[-2] <= d:
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
    """Virtual queries, drawn by the numbers that decided the output already."""
    asked = uniform_rows(of_keys, key_mask, METRIC_KEYS * width)
    return estimate_of(size)._replace(drawn=(fresh_numbers(of_queries), *asked, mass))


def estimate_of(size: int) -> Estimate:
    """`virtual_queries` without what is drawn."""
    return Estimate(query_rows, (), size)


def num_rows(asked: int, n: int) -> int:
    """How many virtual queries stand for n queries, where `asked` are asked for. No more than that: each its own."""
    part, whole = SHARE
    return max(n, 1) if n <= max(asked, FEWEST_QUERIES) else max(part * asked // whole, FEWEST_QUERIES)


def fresh_numbers(u: Tensor) -> Tensor:
    """Other uniform numbers, a function of these: the ranks of one say nothing about those of the other."""
    bits = scramble((u * 2**BITS).long(), BITS)
    fresh: Tensor = bits.to(u.dtype).add(0.5).mul(2.0**-BITS)
    return fresh
