"""The cluster sketch: softmax attention over d weighted means of keys and values, and one linear term.

Skeinformer's virtual keys are sampled; these are the means of clusters, weighted by what P exact pilot rows J see:

    R = softmax(s Q K'^T + w') V' + a s (Q - mean q_J) C

with K', V', w' and C of `clusters.py` and a factor a in [0, 1] that the pilots choose. Pilot rows are written over the
result as in Algorithm 1 of Chen et al. (2022). Exact where every real key has a cluster of its own.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.base import Trace, as_function
from skeinformer.attention.certificate import Info
from skeinformer.attention.clusters import METRIC_QUERIES, ClusterMerge, merge_clusters, query_metric
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.merged import MergedAttention, MergedKeys, ToMerge
from skeinformer.attention.pilots import compute_pilots
from skeinformer.attention.queries import Gradient
from skeinformer.attention.selection import Selection, count_real, uniform_rows
from skeinformer.attention.sharded.cluster import sharded_cluster_sketch
from skeinformer.kernels.rows import gather_rows
from skeinformer.registry import check_count

Quality = Literal["fast", "accurate"]
QUALITIES: dict[str, tuple[int, int, int]] = {"fast": (16, 16, 1), "accurate": (128, 64, 1)}  # clusters, pilots, steps


class ClusterOptions(NamedTuple):
    """What the cluster sketch is told beside its inputs; None is what the quality sets."""

    budget: int | None = None
    quality: Quality = "fast"
    num_pilots: int | None = None
    num_steps: int | None = None
    first_order: bool = True
    gradient: Gradient = "keys"
    scale: float | None = None

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Clusters, pilots and steps: those given, else those of the quality (of its pilots no more than clusters)."""
        clusters, pilots, steps = QUALITIES[self.quality]
        clusters = clusters if self.budget is None else self.budget
        pilots = min(pilots, clusters) if self.num_pilots is None else self.num_pilots
        return clusters, pilots, steps if self.num_steps is None else self.num_steps


class ClusterNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    pilots: Tensor  # (b, h, n): the first ranks are the pilots, the last make the metric
    centers: Tensor  # (b, h, n_k): Gumbel noise of the first centers


class ClusterInfo(NamedTuple):
    """Which cluster each key is in, what the clusters weigh, and how far off the output is."""

    pilots: Tensor  # (b, h, num_pilots) row indices, -1 for an empty slot
    assignment: Tensor  # (b, h, n_k) the cluster of each key, -1 for padding
    log_weight: Tensor  # (b, h, budget) of each cluster, -inf for an empty one
    factor: Tensor  # (b, h) of the linear term
    error: Tensor  # (b, h) estimated relative Frobenius error of the output
    error_se: Tensor  # (b, h) its standard error
    error_upper: Tensor  # (b, h) a bound of the error


def cluster_sketch(given: ToMerge, noise: ClusterNoise, options: ClusterOptions) -> MergedKeys:
    """Pilots, a metric, clusters; attention over them is softmax attention over their means."""
    query, source, scale, (d, num_pilots, num_steps) = given.query, given.source, given.scale, options.sizes
    rows = uniform_rows(noise.pilots, given.query_mask, num_pilots)
    pilots = compute_pilots(query, rows, source, scale, with_mass=True)
    asked = rows_of_metric(noise.pilots, given.query_mask, num_pilots, METRIC_QUERIES * query.shape[-1])
    metric = query_metric(gather_rows(query, asked.indices), asked.live)
    clusters = merge_clusters(
        pilots,
        given.through,
        noise.centers,
        d,
        num_steps=num_steps,
        first_order=options.first_order,
        scale=scale,
        metric=metric,
    )
    merge, virtual, slope, _ = clusters
    return MergedKeys(merge, virtual, (pilots, clusters), pilots, slope=slope, mass=merge.weight)


def rows_of_metric(u: Tensor, mask: Tensor | None, num_pilots: int, size: int) -> Selection:
    """The queries that make the metric, (b, h, size): of what the pilots, the first ranks, leave, the last."""
    rows = uniform_rows(-u, mask, size)
    rank = torch.arange(rows.live.shape[-1], device=u.device)
    return Selection(rows.indices, rows.live & (rank < count_real(u[..., None], mask) - num_pilots))


class Cluster(MergedAttention):
    """softmax(s Q K'^T + w') V' + a s (Q - mean q_J) C: attention over d weighted means of clusters of keys.

    P pilot rows J are computed exactly and written over the result (`num_pilots`). Centers are drawn by Eq. (5) of
    Chen et al. (2022) and moved by `num_steps` Lloyd steps over a sample of the keys; every key joins the nearest, in
    the metric of the queries. Means are weighted by the columns' mass in the pilot rows, and the log weights w' give
    each cluster its mass there. `first_order` adds the linear term: C is the covariance of keys and values within
    clusters, a in [0, 1] fits the pilots. `quality` sets what is not given: "fast" is 16 clusters (the `budget`, d)
    and 16 pilots, "accurate" 128 and 64 (pilots never more than clusters), both with 1 Lloyd step. `gradient` is what
    keys and values get in the backward pass: with "keys", the default, the derivative of the output; with "queries" an
    estimate of the gradient of exact attention, from the exact rows of 7 d / 8 virtual queries, but at least 20. Then
    forward and backward take 1.3 to 1.6 times as long; docs/training.md says where that pays. Exact where d is at least
    the number of real keys. No parameters.
    Time O(n (d + P + p) p), memory O((n + d) p).
    """

    Options, Noise, Merge = ClusterOptions, ClusterNoise, ClusterMerge
    merge_keys = staticmethod(cluster_sketch)
    compute_shares = staticmethod(sharded_cluster_sketch)

    @staticmethod
    def complete(options: ClusterOptions) -> ClusterOptions:
        budget, pilots, steps = options.sizes
        check_count("num_pilots", pilots)
        check_count("num_steps", steps, at_least=0)
        return options._replace(budget=budget, num_pilots=pilots, num_steps=steps)

    @staticmethod
    def describe(inputs: Inputs, trace: Trace, options: ClusterOptions, info: Info) -> ClusterInfo:
        pilots, (merge, virtual, _, factor) = trace.found
        d, num_pilots, _ = options.sizes
        assignment, log_weight = merge.assignment, virtual.log_weights()
        if inputs.key_mask is not None:
            assignment = assignment.where(inputs.key_mask, -1)
        return ClusterInfo(
            pilots.rows.marked(num_pilots),
            assignment,
            F.pad(log_weight, (0, d - log_weight.shape[-1]), value=-torch.inf),
            torch.zeros_like(info.error) if factor is None else factor[..., 0],
            *info,
        )


cluster_attention = as_function(Cluster, ClusterInfo, "cluster_attention")
