"""Sums over clusters of queries and of the gradients that come with them."""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.choice import fast_form
from skeinformer.kernels.clusters import cluster_sums
from skeinformer.kernels.pilots import CACHED
from skeinformer.kernels.rows import add_rows_, batches, pieces


class QuerySums(NamedTuple):
    """With r_i the weight of query i and delta_i = G_i . O_i; sums are over the queries of each cluster."""

    queries: Tensor  # (b, h, d, p), sum r_i q_i
    weight: Tensor  # (b, h, d, 1), sum r_i
    gradient: Tensor  # (b, h, d, p_v + 1), sum [G_i, delta_i]
    product: Tensor  # (b, h, p, p_v + 1), sum q_i [G_i, delta_i]^T over all queries


def whole_query_sums(
    query: Tensor,  # (b, h, n, p)
    gradient: Tensor,  # (b, h, n, p_v)
    output: Tensor,  # (b, h, n, p_v)
    weight: Tensor,  # (b, h, n), r; its precision is that of the sums
    assignment: Tensor,  # (b, h, n)
    d: int,
) -> QuerySums:
    """`query_sums` of all heads at once."""
    dtype, p, last = weight.dtype, query.shape[-1], gradient.shape[-1] + 1
    query, G, r = query.to(dtype), gradient.to(dtype), weight[..., None]
    delta = (G * output.to(dtype)).sum(-1, keepdim=True)
    columns = torch.cat([query * r, r, G, delta], -1)
    sums = cluster_sums(columns, assignment, d)
    return QuerySums(*torch.split(sums, [p, 1, last], -1), query.mT @ columns[..., -last:])  # type: ignore[call-arg]


@fast_form(whole_query_sums)
def query_sums(
    query: Tensor, gradient: Tensor, output: Tensor, weight: Tensor, assignment: Tensor, d: int
) -> QuerySums:
    """The sums that virtual queries are made of, a few heads at a time."""
    p, last, batch = query.shape[-1], gradient.shape[-1] + 1, query.shape[:-2]
    width = p + 1 + last
    sums = weight.new_zeros(*batch, d, width)
    product = weight.new_empty(*batch, p, last)
    held = weight.new_empty(0)  # one piece of memory: a fresh one costs more than a sum
    tensors = (query, gradient, output, weight[..., None], assignment, sums, product)
    for q, g, o, r, cluster, total, of_all in pieces(CACHED // 2, *tensors):
        size = q.shape[:-1].numel() * width
        held = held if held.numel() >= size else held.new_empty(size)
        columns = held[:size].view(*q.shape[:-1], width)
        torch.mul(q, r, out=columns[..., :p])
        columns[..., p : p + 1] = r
        columns[..., p + 1 : -1] = g
        torch.linalg.vecdot(columns[..., p + 1 : -1], o.to(weight.dtype), out=columns[..., -1])
        add_rows_(total, cluster, columns)
        for x, y, result in batches(q.to(weight.dtype), columns[..., -last:], of_all):
            torch.bmm(x.mT, y, out=result)
    return QuerySums(*torch.split(sums, [p, 1, last], -1), product)  # type: ignore[call-arg]


def add_whole_product_(total: Tensor, x: Tensor, by: Tensor, less: Tensor, weight: Tensor) -> Tensor:
    """`add_weighted_product_` of all heads at once."""
    return total.addcmul_(weight[..., None], x.to(total.dtype) @ by - less)


@fast_form(add_whole_product_)
def add_weighted_product_(total: Tensor, x: Tensor, by: Tensor, less: Tensor, weight: Tensor) -> Tensor:
    """total_j += w_j (x_j by - less), in place, a few heads at a time.

    (b, h, n, p), (b, h, n, p_v), (b, h, p_v, p), (b, h, 1, p), (b, h, n).
    """
    held = total.new_empty(0)  # one piece of memory: a fresh one costs more than a sum
    for added, y, b, c, w in pieces(CACHED // 2, total, x, by, less, weight):
        held = held if held.numel() >= added.numel() else held.new_empty(added.numel())
        product = held[: added.numel()].view(added.shape)
        for result, left, right, constant in batches(product, y.to(total.dtype), b, c):
            torch.baddbmm(constant, left, right, beta=-1, out=result)
        added.addcmul_(w[..., None], product)
    return total
