"""Virtual queries: sums over clusters of queries and of their gradients, and what these give to keys and values."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.choice import fast_form
from skeinformer.kernels.clusters import cluster_sums, weighted_row
from skeinformer.kernels.pilots import CACHED
from skeinformer.kernels.row_gradients import given_by_rows
from skeinformer.kernels.rows import add_rows_, batches, gather_rows, pieces

WIDE = 50  # the variance of scores within clusters at which their rows are believed by half
LARGE = 4  # a first-order term of half the size of the gradients is believed by half


class QuerySums(NamedTuple):
    """With r_i the weight of query i and delta_i = G_i . O_i; sums are over the queries of each cluster."""

    queries: Tensor  # (b, h, d, p), sum r_i q_i
    weight: Tensor  # (b, h, d, 1), sum r_i
    gradient: Tensor  # (b, h, d, p_v + 1), sum [G_i, delta_i]
    product: Tensor  # (b, h, p, p_v + 1), sum q_i [G_i, delta_i]^T over all queries
    total: Tensor  # (b, h, 1, 1), sum r_i^2 over all queries


class Sampled(NamedTuple):
    """Some of the queries, drawn by the size of their gradients."""

    points: Tensor  # (b, h, k, p)
    weight: Tensor  # (b, h, k), |G_i|; 0 for an empty slot
    assignment: Tensor  # (b, h, k), their clusters

    def distance(self, mean: Tensor) -> Tensor:
        """The root of the weighted mean of |q_i - q_c|^2: (b, h, d, p) -> (b, h, 1, 1)."""
        weight = self.weight[..., None]
        away = (self.points - gather_rows(mean, self.assignment)).where(weight > 0, 0)  # (b, h, k, p)
        unit = away.abs().amax((-2, -1), keepdim=True)
        unit = unit.where(unit > 0, 1)  # squares stay in range
        total = weight.sum(-2, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)
        return unit * (((away / unit).square() * weight).sum((-2, -1), keepdim=True) / total).sqrt()


class QueryRows(NamedTuple):
    """What stands for all queries in the gradients of keys and values: a few exact rows, and what their means miss."""

    queries: Tensor  # (b, h, d, p), q_c
    gradient: Tensor  # (b, h, d, p_v), f G_c
    C: Tensor  # (b, h, p, p_v), sum_i (q_i - q_c) G_i^T
    e: Tensor  # (b, h, p, 1), sum_i (q_i - q_c) delta_i
    keys_part: Tensor  # (b, h, 1, 1), a: how much of what is missed keys get
    values_part: Tensor  # (b, h, 1, 1), a': how much values get
    rest: Tensor  # (b, h, 1, p_v), (1 - f) sum_c G_c

    @staticmethod
    def of(sums: QuerySums, p_v: int, unit: Tensor, spread: Tensor, near: Sampled) -> "QueryRows":
        """The mean queries, their summed gradients, and what is missed.

        unit: (b, h, 1, 1), the size of a gradient whose r is 1. spread: (b, h, 1, 1), how far scores of keys are apart
        for a query of length 1.

        Rows are believed as far as clusters are narrow: with y^2 the variance of the scores within them, were all
        directions alike, f = 1 / (1 + y^2 / WIDE). The rest of the gradients goes to the mean row. With
        t = spread |C| / sum_i |G_i|, the size of what is missed in that of the gradients, keys get f / (1 + LARGE t^2)
        of it, and values half of 1 / (1 + LARGE t^2): a small term is right, a large one is not believed.
        """
        mean = sums.queries / sums.weight.clamp(min=torch.finfo(sums.weight.dtype).tiny)  # (b, h, d, p)
        missed = sums.product - mean.mT @ sums.gradient  # (b, h, p, p_v + 1)
        G, C, e = sums.gradient[..., :p_v], missed[..., :p_v], missed[..., p_v:]
        variance = (spread * near.distance(mean)).square() / mean.shape[-1]  # (b, h, 1, 1)
        believed = 1 / (1 + variance / WIDE)
        size = (C / unit).square().sum((-2, -1), keepdim=True).div(p_v).sqrt()
        t = spread * size / sums.total.clamp(min=torch.finfo(size.dtype).tiny)
        part = 1 / (1 + LARGE * t.square())
        rest = (1 - believed) * G.sum(-2, keepdim=True)
        return QueryRows(mean, believed * G, C, e, believed * part, part / 2, rest)

    def where_not(self, full: Tensor | None) -> "QueryRows":
        """Rows that give nothing where `full`, (b, 1, 1, 1)."""
        if full is None:
            return self
        gradient, C, e, rest = (x.masked_fill(full, 0) for x in (self.gradient, self.C, self.e, self.rest))
        return self._replace(gradient=gradient, C=C, e=e, rest=rest)

    def gradients(
        self, key: Tensor, value: Tensor, log_weight: Tensor | None, mass: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """dK and dV, fresh tensors in the precision of statistics."""
        totals = given_by_rows(self.queries, key, value, log_weight, self.gradient, scale)
        self.add_missed_(totals, key, value, mass, mean_key(key, mass), scale)
        return totals

    def add_missed_(
        self, totals: Sequence[Tensor], key: Tensor, value: Tensor, mass: Tensor, mean: Tensor, scale: float
    ) -> None:
        """What the means miss, to first order, and the mean row's part, m_j the mass of key j:

        dK_j += a s m_j (C v_j - e)            dV_j += m_j (a' s C^T (k_j - mean key) + (1 - f) sum_c G_c)
        """
        along, across = scale * self.keys_part, scale * self.values_part * self.C
        add_weighted_product_(totals[0], value, along * self.C.mT, along * self.e.mT, mass)
        add_weighted_product_(totals[1], key, across, mean @ across - self.rest, mass)


def mean_key(key: Tensor, mass: Tensor) -> Tensor:
    """sum_j m_j k_j / sum_j m_j, in the precision of the mass: (b, h, 1, p)."""
    total = mass.sum(-1)[..., None, None]
    return weighted_row(key.to(mass.dtype), mass) / total.clamp(min=torch.finfo(mass.dtype).tiny)


def whole_query_sums(
    query: Tensor,  # (b, h, n, p)
    gradient: Tensor,  # (b, h, n, p_v)
    output: Tensor,  # (b, h, n, p_v)
    weight: Tensor,  # (b, h, n), r; its precision is that of the sums
    assignment: Tensor,  # (b, h, n)
    d: int,
    left_out: Tensor | None = None,  # (b, h, P), rows that count for nothing; their weight is 0
) -> QuerySums:
    """`query_sums` of all heads at once."""
    dtype, p, last = weight.dtype, query.shape[-1], gradient.shape[-1] + 1
    query, G, r = query.to(dtype), gradient.to(dtype), weight[..., None]
    if left_out is not None:
        G = G.scatter(-2, left_out[..., None].expand(*left_out.shape, last - 1), 0)
    delta = (G * output.to(dtype)).sum(-1, keepdim=True)
    columns = torch.cat([query * r, r, G, delta], -1)
    sums = cluster_sums(columns, assignment, d)
    product, total = query.mT @ columns[..., -last:], weight.square().sum(-1)[..., None, None]
    return QuerySums(*torch.split(sums, [p, 1, last], -1), product, total)  # type: ignore[call-arg]


@fast_form(whole_query_sums)
def query_sums(
    query: Tensor,
    gradient: Tensor,
    output: Tensor,
    weight: Tensor,
    assignment: Tensor,
    d: int,
    left_out: Tensor | None = None,
) -> QuerySums:
    """The sums that virtual queries are made of, a few heads at a time."""
    p, last, batch = query.shape[-1], gradient.shape[-1] + 1, query.shape[:-2]
    width = p + 1 + last
    sums = weight.new_zeros(*batch, d, width)
    product = weight.new_empty(*batch, p, last)
    held = weight.new_empty(0)  # one piece of memory: a fresh one costs more than a sum
    tensors = (query, gradient, output, weight[..., None], assignment, sums, product)
    for q, g, o, r, cluster, total, of_all, *absent in pieces(CACHED, *tensors, *listed(left_out)):
        size = q.shape[:-1].numel() * width
        held = held if held.numel() >= size else held.new_empty(size)
        columns = held[:size].view(*q.shape[:-1], width)
        torch.mul(q, r, out=columns[..., :p])
        columns[..., p : p + 1] = r
        columns[..., p + 1 : -1] = g
        torch.linalg.vecdot(columns[..., p + 1 : -1], o.to(weight.dtype), out=columns[..., -1])
        for rows in absent:
            columns[..., p + 1 :].scatter_(-2, rows[..., None].expand(*rows.shape, last), 0)
        add_rows_(total, cluster, columns)
        for x, y, result in batches(q.to(weight.dtype), columns[..., -last:], of_all):
            torch.bmm(x.mT, y, out=result)
    total = weight.square().sum(-1)[..., None, None]
    return QuerySums(*torch.split(sums, [p, 1, last], -1), product, total)  # type: ignore[call-arg]


def listed(x: Tensor | None) -> list[Tensor]:
    """Of nothing or one tensor."""
    return [] if x is None else [x]


def add_whole_product_(total: Tensor, x: Tensor, by: Tensor, less: Tensor, weight: Tensor) -> Tensor:
    """`add_weighted_product_` of all heads at once."""
    return total.addcmul_(weight[..., None], x.to(total.dtype) @ by - less)


@fast_form(add_whole_product_)
def add_weighted_product_(total: Tensor, x: Tensor, by: Tensor, less: Tensor, weight: Tensor) -> Tensor:
    """total_j += w_j (x_j by - less), in place, a few heads at a time.

    (b, h, n, p), (b, h, n, p_v), (b, h, p_v, p), (b, h, 1, p), (b, h, n).
    """
    held = total.new_empty(0)  # one piece of memory: a fresh one costs more than a sum
    for added, y, b, c, w in pieces(CACHED, total, x, by, less, weight):
        held = held if held.numel() >= added.numel() else held.new_empty(added.numel())
        product = held[: added.numel()].view(added.shape)
        for result, left, right, constant in batches(product, y.to(total.dtype), b, c):
            torch.baddbmm(constant, left, right, beta=-1, out=result)
        added.addcmul_(w[..., None], product)
    return total
