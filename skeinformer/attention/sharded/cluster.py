"""The cluster sketch over shares: what `cluster.py` computes in one process, by six exchanges.

    shares         who holds how many tokens                                               gathered
    pilots         each rank's largest numbers of the noise, with their queries            gathered
    row sums       the logs of the pilot rows' sums                                        gathered
    samples        each rank's largest scores of keys                                      gathered
    centers        the 8 d keys of the best scores, and the queries that make the metric   summed
    clusters       sums over clusters, and the pilot rows                                  summed

Nothing has the size of the sequence. Every rank then knows the same virtual keys, and attends with its own queries.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from skeinformer.attention.base import Trace
from skeinformer.attention.clusters import (
    METRIC_QUERIES,
    SAMPLED_KEYS,
    UNSEEN,
    Clusters,
    ClusterSums,
    find_centers,
    form_clusters,
    moments_of,
    nearest,
    of_weights,
    query_metric,
    sum_clusters,
)
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.pilots import Pilots, column_mass, log_importance
from skeinformer.attention.selection import Selection
from skeinformer.attention.sharded.merge import SharedMerge, attend_shares
from skeinformer.attention.sharded.pilots import SharedPilots, find_pilots, ranked
from skeinformer.attention.sharded.queries import SharedQueries, offered_keys
from skeinformer.attention.sharded.trace import SharedTrace
from skeinformer.attention.virtual_keys import VirtualKeys, from_mask
from skeinformer.distributed.agreement import Shares
from skeinformer.distributed.collectives import gather_over, sum_over
from skeinformer.distributed.selection import Chosen, candidates, choose_rows, rows_here
from skeinformer.kernels.choice import known, recorded, statistics_dtype
from skeinformer.kernels.merge import Virtual
from skeinformer.noise import gumbel

if TYPE_CHECKING:  # which import this file
    from skeinformer.attention.cluster import ClusterNoise, ClusterOptions


def sharded_cluster_sketch(
    inputs: Inputs, noise: "ClusterNoise", options: "ClusterOptions", shares: Shares
) -> tuple[Tensor, Trace]:
    """`cluster_sketch` of this rank's queries, and attention over it."""
    query, key, value, key_mask, query_mask = inputs
    of_queries, of_keys = noise
    d, num_pilots, _ = options.sizes
    source, scale = from_mask(key, value, key_mask), default_scale(query, options.scale)
    estimated = options.gradient == "queries" and shares.n_k > d and recorded(key, value)
    with torch.no_grad():
        asked = candidates(ranked(-of_queries, query_mask), min(METRIC_QUERIES * query.shape[-1], shares.n))
        offers = [asked]
        if estimated:
            offers.append(offered_keys(of_keys, key, key_mask, shares.n_k))
        found = find_pilots(inputs, source, of_queries, num_pilots, offers, scale, shares)
        pilots, clusters, asked_keys = find_clusters(found, inputs, source, of_keys, options, scale, shares)
        few = found.keys <= d  # (b, 1, 1)
        full = None if known(~few) else few[..., None]
        estimate = None
        if asked_keys is not None:
            live, mass = found.others[1].live, clusters.merge.weight
            others = shares.n - pilots.queries.shape[-2]
            estimate = SharedQueries.of(of_queries, asked_keys, live, mass, d, others, scale)
    merged = SharedMerge(
        clusters.merge,
        Virtual(clusters.virtual.keys, clusters.virtual.values, clusters.slope),
        clusters.virtual.log_weight,
        pilots,
        found.chosen,
        estimate,
    )
    output = attend_shares(query, *source, merged, full if estimated else None, scale, shares.group)

    def finish(rows: Selection) -> tuple[Pilots, Clusters]:
        assignment = clusters.merge.assignment[..., : shares.keys[shares.group.rank]]
        return pilots._replace(rows=rows), clusters._replace(merge=clusters.merge._replace(assignment=assignment))

    shared = SharedTrace((found.chosen,), (shares.of_queries.start,), finish)
    return output, Trace(pilots, shared=shared)


def find_clusters(
    found: SharedPilots,
    inputs: Inputs,
    source: VirtualKeys,
    u: Tensor,
    options: "ClusterOptions",
    scale: float,
    shares: Shares,
) -> tuple[Pilots, Clusters, Tensor | None]:
    """The pilots with B_J V of all keys, the clusters of all keys, and the keys that were asked for beside."""
    key, group, n_k = inputs.key, shares.group, shares.n_k
    dtype, (budget, num_pilots, num_steps) = statistics_dtype(key), options.sizes
    d = min(budget, n_k)
    # the best scores of all ranks, and the keys that have them
    own = candidates(
        log_importance(found.pilots, source, scale, found.loudest) + gumbel(u),
        min(SAMPLED_KEYS * d if num_steps else d, n_k),
    )
    sample = choose_rows(gather_over(group, "samples", own.score)[0], own, group.rank)
    asked, *asked_keys = found.others
    rows = [rows_here(key, sample), rows_here(inputs.query, asked), *(rows_here(key, x) for x in asked_keys)]
    points, queries, *asked_rows = sum_over(group, "centers", *(x.to(dtype) for x in rows))
    # every key of this rank to its cluster
    live = source.log_weights() > -torch.inf  # (b, h, n)
    few = (found.keys <= budget).expand(*live.shape[:2], 1)  # (b, h, 1)
    full = None if known(~few) else few
    weight = (column_mass(found.pilots, source, scale) + UNSEEN).where(live, 0)
    weight = weight if full is None else torch.where(full, live.to(weight.dtype), weight)
    assignment = torch.zeros_like(live, dtype=torch.long)
    if n_k > d:
        rank = torch.arange(asked.live.shape[-1], device=key.device)
        metric = query_metric(queries, asked.live & (rank < found.queries - num_pilots))
        centers = find_centers(points, sample.live, d, num_steps, metric)
        assignment = nearest(key.detach().to(dtype), centers, metric)
    if full is not None:
        assignment = torch.where(full, slots_here(sample.part(0, d), assignment), assignment)
    # sums over clusters, of all ranks
    sums = sum_clusters(source, weight, assignment, d, options.first_order and n_k > d)
    count = of_weights(live.to(weight.dtype), assignment, d)
    product = [] if sums.product is None else [sums.product]
    of_weight, both, count, output, *product = sum_over(
        group, "clusters", sums.weight, sums.both, count, found.pilots.output, *product
    )
    sums = ClusterSums(of_weight, both, product[0] if product else None)
    pilots = found.pilots._replace(output=output.to(key.dtype))
    log_count = count.clamp(min=torch.finfo(dtype).tiny).log()  # (b, h, d)
    log_weight = torch.zeros_like(log_count).where(sample.live[..., :d], -torch.inf)
    moments = moments_of(sums, assignment, key.shape[-1])
    clusters = form_clusters(pilots, moments, weight, log_count, full, log_weight, scale, key.dtype)
    return pilots, clusters, asked_rows[0] if asked_rows else None


def slots_here(chosen: Chosen, assignment: Tensor) -> Tensor:
    """The assignment, where each chosen row that is here has the cluster of its own: its rank."""
    slot = torch.arange(1, chosen.mine.shape[-1] + 1, device=assignment.device).where(chosen.mine, 0)
    own = torch.zeros_like(assignment).scatter_add_(-1, chosen.row, slot)
    return torch.where(own > 0, own - 1, assignment)
