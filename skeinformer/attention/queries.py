"""Virtual queries: what the gradient of exact attention gives to keys and values, from d exact rows.

With P the exact weights, O the output, G its gradient and delta_i = G_i . O_i,

    dV_j = sum_i P_ij G_i            dK_j = s sum_i P_ij (G_i . v_j - delta_i) q_i

are sums over queries. The derivative of a sketched output gives all keys of a cluster nearly the same, and leaves out
what flows through the clusters' weights. So the backward pass sketches the other side: queries are clustered, and each
cluster c is one exact row, that of the mean query q_c with the summed gradient G_c,

    dV = sum_c P_cj G_c              dK_j = s sum_c P_cj (G_c . v_j - G_c . O_c) q_c + s m_j (C v_j - e)
    C = sum_i (q_i - q_c) G_i^T about the plain means        e likewise with delta        m_j the mass of key j

where the last term of dK is what the means miss, to first order. Rows are exact, so nothing can blow up; where every
query has a cluster of its own the gradients are exact. docs/cluster.md derives it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.clusters import find_centers, nearest, query_metric
from skeinformer.attention.selection import sample_without_replacement
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.clusters import cluster_sums
from skeinformer.kernels.fused import attend_backward, attend_with_normalizer
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import scramble

SAMPLE = 8  # queries per virtual query that the Lloyd step sees
ASKED = 4  # keys per dimension that the metric is made of
BITS = 23  # of a uniform number


class VirtualQueries(NamedTuple):
    """What decides the virtual queries of a backward pass, drawn in the forward pass."""

    u: Tensor  # (b, h, n), uniform numbers of the queries
    asked: Tensor  # (b, h, k), keys that make the metric
    asked_live: Tensor  # (b, h, k)
    mass: Tensor  # (b, h, n_k), m
    size: int  # d

    @torch.no_grad()
    def gradients(
        self,
        query: Tensor,  # (b, h, n, p)
        key: Tensor,
        value: Tensor,
        log_weight: Tensor | None,
        output: Tensor,  # (b, h, n, p_v)
        gradient: Tensor,  # (b, h, n, p_v), 0 in rows that count for nothing
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        """dK and dV. Time O(n d p), memory O(n p)."""
        dtype, d = statistics_dtype(query), min(self.size, query.shape[-2])
        G = gradient.to(dtype)
        unit = G.abs().amax((-2, -1), keepdim=True)  # in it squares and sums are of moderate size
        unit = unit.where(unit > 0, 1)
        G = G / unit
        size: Tensor = torch.linalg.vector_norm(G, dim=-1)  # (b, h, n)
        places = query.detach().to(dtype)
        metric = query_metric(gather_rows(key, self.asked), self.asked_live)
        sample = sample_without_replacement(size.log(), self.u, SAMPLE * d)
        assignment = nearest(places, find_centers(places, sample, d, 1, metric), metric)  # (b, h, n)
        # one sum over clusters: the queries by the root of |G|, that root, queries, 1, gradients, delta
        root, one = size.sqrt()[..., None], torch.ones_like(size)[..., None]
        delta = (G * output.to(dtype)).sum(-1, keepdim=True)
        p, p_v = query.shape[-1], value.shape[-1]
        columns = torch.cat([places * root, root, places, one, G, delta], -1)  # (b, h, n, 2 p + p_v + 3)
        weighted, total, plain, count, G_c, delta_c = cluster_sums(columns, assignment, d).split(
            [p, 1, p, 1, p_v, 1], -1
        )
        q_c = weighted / total.clamp(min=torch.finfo(dtype).tiny)  # (b, h, d, p)
        mean = plain / count.clamp(min=1)
        C = places.mT @ G - mean.mT @ G_c  # (b, h, p, p_v)
        e = (places.mT @ delta - mean.mT @ delta_c).mT  # (b, h, 1, p)
        rows, G_c = q_c.to(query.dtype), G_c.to(query.dtype)
        d_key, d_value = row_gradients(rows, key, value, log_weight, G_c, scale)
        first_order = (value.to(dtype) @ C.mT - e) * (scale * self.mass[..., None])
        return (d_key.add_(first_order) * unit).to(key.dtype), (d_value * unit).to(value.dtype)


def row_gradients(
    queries: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """What a few exact rows give to keys and values, in the precision of statistics: O(d n p), O(n p) in memory."""
    dtype = statistics_dtype(key)
    output, normalizer = attend_with_normalizer(queries, key, value, log_weight, scale)
    _, d_key, d_value = attend_backward(gradient, queries, key, value, log_weight, output, normalizer, scale)
    return d_key.to(dtype), d_value.to(dtype)


def fresh_numbers(u: Tensor) -> Tensor:
    """Other uniform numbers, a function of these: the ranks of one say nothing about those of the other."""
    bits = scramble((u * 2**BITS).long(), BITS)
    return (bits.to(u.dtype) + 0.5) * 2.0**-BITS
