"""Virtual queries over shares: what `queries.py` estimates in one process, in the four exchanges of a backward pass.

gradients      candidates of the virtual queries                      with the gradients of virtual keys, summed
rows           the 4 d candidates of the best scores                  with the gradients of pilot queries, summed
queries        sums over clusters of queries                          summed
query sums     the logs of their rows' sums, and G_c . O_c of each    gathered
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.clusters import find_centers, nearest, query_metric
from skeinformer.attention.queries import METRIC_KEYS, SAMPLED_QUERIES, fresh_numbers, num_rows, spread
from skeinformer.attention.sharded.pilots import merge_sums, ranked, rows_over_own_keys
from skeinformer.attention.sharded.rows import rows_backward
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.distributed.collectives import gather_over, sum_over
from skeinformer.distributed.group import Group
from skeinformer.distributed.selection import Candidates, Chosen, candidates
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.clusters import weighted_row
from skeinformer.kernels.queries import QueryRows, QuerySums, Sampled, query_sums
from skeinformer.noise import gumbel


class Offer(NamedTuple):
    """A rank's candidates for virtual queries."""

    own: Candidates  # (b, h, k)
    norm: Tensor  # (b, h, n), |G_i| of its queries, without squares

    def slots(self, group: Group) -> list[Tensor]:
        """Scores and largest norm, (R, b, h, k) and (R, b, h), at this rank's place: a sum puts in the others'."""
        return [beside(x, group) for x in (self.own.score, self.norm.amax(-1))]


class SharedQueries(NamedTuple):
    """What the estimate needs of the forward pass."""

    u: Tensor  # (b, h, n), uniform numbers of this rank's queries
    metric: Tensor  # (b, h, p, p), of the keys of all ranks
    mass: Tensor  # (b, h, n_k), of this rank's keys
    spread: Tensor  # (b, h, 1, 1), of the scores of keys
    d: int
    k: int
    """Candidates."""

    @staticmethod
    def of(u: Tensor, keys: Tensor, live: Tensor, mass: Tensor, size: int, n: int, scale: float) -> "SharedQueries":
        """For virtual queries among n of all ranks; size: how many are asked for; keys: those of the metric."""
        d = num_rows(size, n)
        apart = spread(keys, live, scale)
        return SharedQueries(fresh_numbers(u), query_metric(keys, live), mass, apart, d, min(SAMPLED_QUERIES * d, n))

    def offer(self, gradient: Tensor) -> Offer:
        """This rank's candidates, for gradients (b, h, n, p_v)."""
        norm = torch.maximum(gradient.amax(-1), -gradient.amin(-1)).to(statistics_dtype(gradient))
        return Offer(candidates(norm.log() + gumbel(self.u).to(norm.dtype), self.k), norm)


def offered_keys(of_keys: Tensor, key: Tensor, key_mask: Tensor | None, n_k: int) -> Candidates:
    """This rank's candidates for the keys that make the metric, by their uniform numbers."""
    return candidates(ranked(of_keys, key_mask), min(METRIC_KEYS * key.shape[-1], n_k))


def beside(x: Tensor, group: Group) -> Tensor:
    """x at this rank's place, zeros at the others': a sum over ranks then gathers."""
    every = x.new_zeros(group.size, *x.shape)
    every[group.rank] = x
    return every


def shared_query_gradients(
    drawn: SharedQueries,
    offer: Offer,
    chosen: Chosen,
    points: Tensor,  # (b, h, k, p), the chosen queries of all ranks
    sizes: Tensor,  # (b, h, k, 1), |G_i| of these, without squares
    unit: Tensor,  # (b, h), the largest gradient of all ranks
    query: Tensor,
    source: VirtualKeys,
    output: Tensor,
    gradient: Tensor,  # 0 in rows that count for nothing
    full: Tensor | None,  # (b, 1, 1, 1), where nothing is to be estimated
    scale: float,
    group: Group,
) -> tuple[Tensor, Tensor]:
    """dK and dV of virtual queries for this rank's keys and values, in the precision of statistics."""
    dtype, d, p_v = statistics_dtype(query), drawn.d, gradient.shape[-1]
    unit = unit.where(unit > 0, 1)[..., None]  # (b, h, 1)
    norm = offer.norm / unit  # (b, h, n)
    centers = find_centers(points, chosen.live, d, 1, drawn.metric)
    assignment = nearest(query.to(dtype), centers, drawn.metric)  # (b, h, n)
    near = Sampled(points, sizes[..., 0] / unit, nearest(points, centers, drawn.metric))
    mass, keys = drawn.mass, source.keys.to(drawn.mass.dtype)
    key_sums = weighted_row(keys, mass), mass.sum(-1)[..., None, None]  # (b, h, 1, p), (b, h, 1, 1)
    here = query_sums(query, gradient, output, norm.sqrt(), assignment, d)
    *every_sum, key_sum, total = sum_over(group, "queries", *here, *key_sums)
    found = QueryRows.of(QuerySums(*every_sum), p_v, unit[..., None], drawn.spread, near).where_not(full)
    mean, G = found.queries, found.gradient
    # the exact rows of q_c over all keys, of which only lse and G_c . O_c cross ranks
    rows, row_sum = rows_over_own_keys(mean.to(query.dtype), source, scale)
    rows = rows.to(dtype)
    of_sums, of_products = gather_over(group, "query sums", row_sum, (G * rows).sum(-1))
    normalizer = merge_sums(of_sums)  # (b, h, d)
    product = ((of_sums - normalizer).exp() * of_products).sum(0)  # (b, h, d), G_c . O_c
    # all that a gradient asks of O_c is G_c . O_c; in units of the largest of G_c, so that squares are in range
    size = G.abs().amax(-1, keepdim=True)  # (b, h, d, 1)
    size = size.where(size > 0, 1)
    direction = G / size
    missing = (product - (G * rows).sum(-1))[..., None] / size  # (b, h, d, 1)
    standing = rows + missing / direction.square().sum(-1, keepdim=True).clamp(min=1) * direction
    _, d_key, d_value = rows_backward(G, mean, *source, standing, normalizer, scale)
    mean_key = key_sum / total.clamp(min=torch.finfo(dtype).tiny)
    found.add_missed_((d_key, d_value), source.keys, source.values, mass, mean_key, scale)
    return d_key, d_value
