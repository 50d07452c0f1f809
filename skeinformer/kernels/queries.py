"""Sums over clusters of queries and of the gradients that come with them."""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.choice import fast_form
from skeinformer.kernels.clusters import cluster_sums
from skeinformer.kernels.pilots import CACHED
from skeinformer.kernels.rows import add_rows_, pieces


class QuerySums(NamedTuple):
    """With r_i the weight of query i, delta_i = G_i . O_i; sums are over each cluster's queries of weight above 0."""

    weighted: Tensor  # (b, h, d, p), sum r_i q_i
    total: Tensor  # (b, h, d, 1), sum r_i
    queries: Tensor  # (b, h, d, p), sum q_i
    members: Tensor  # (b, h, d, 1), sum 1
    gradient: Tensor  # (b, h, d, p_v + 1), sum [G_i, delta_i]
    product: Tensor  # (b, h, p, p_v + 1), sum q_i [G_i, delta_i]^T over all queries


def whole_query_sums(
    query: Tensor,  # (b, h, n, p)
    gradient: Tensor,  # (b, h, n, p_v)
    output: Tensor,  # (b, h, n, p_v)
    weight: Tensor,  # (b, h, n), r; its precision is that of the sums
    unit: Tensor,  # (b, h, 1, 1)
    assignment: Tensor,  # (b, h, n)
    d: int,
) -> QuerySums:
    """`query_sums` of all heads at once."""
    dtype, p_v = weight.dtype, gradient.shape[-1]
    query, G, r = query.to(dtype), gradient.to(dtype) / unit, weight[..., None]
    delta = (G * output.to(dtype)).sum(-1, keepdim=True)
    one = (r > 0).to(dtype)
    columns = torch.cat([query * r, r, query * one, one, G, delta], -1)
    return _named(cluster_sums(columns, assignment, d), query.mT @ columns[..., -p_v - 1 :])


@fast_form(whole_query_sums)
def query_sums(
    query: Tensor, gradient: Tensor, output: Tensor, weight: Tensor, unit: Tensor, assignment: Tensor, d: int
) -> QuerySums:
    """The sums that virtual queries are made of, with the gradient divided by `unit`. A few heads at a time."""
    p, p_v, batch = query.shape[-1], gradient.shape[-1], query.shape[:-2]
    width = 2 * p + p_v + 3
    sums = weight.new_zeros(*batch, d, width)
    product = weight.new_empty(*batch, p, p_v + 1)
    held = weight.new_empty(0)  # one piece of memory: a fresh one costs more than a sum
    tensors = (query, gradient, output, weight[..., None], unit, assignment, sums, product)
    for q, g, o, r, u, cluster, total, of_all in pieces(CACHED // 2, *tensors):
        shape = (*q.shape[:-1], width)
        size = q.shape[:-1].numel() * width
        held = held if held.numel() >= size else held.new_empty(size)
        columns = held[:size].view(shape)
        weighted, root, plain, one, G, delta = columns.split([p, 1, p, 1, p_v, 1], -1)  # type: ignore[no-untyped-call]
        root.copy_(r)
        torch.gt(r, 0, out=one)
        torch.mul(q, one, out=plain)
        torch.mul(plain, r, out=weighted)
        torch.div(g, u, out=G)
        torch.sum(G * o, -1, keepdim=True, out=delta)
        add_rows_(total, cluster, columns)
        torch.matmul(plain.mT, columns[..., -p_v - 1 :], out=of_all)
    return _named(sums, product)


def _named(sums: Tensor, product: Tensor) -> QuerySums:
    """The sums of all columns, (b, h, d, 2 p + p_v + 3), by name."""
    p, last = product.shape[-2:]
    weighted, total, queries, members, gradient = torch.split(sums, [p, 1, p, 1, last], -1)
    return QuerySums(weighted, total, queries, members, gradient, product)
