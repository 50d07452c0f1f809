"""Clusters of keys: who belongs to whom, what a cluster weighs, and the linear term for what its mean misses.

With w_j = mean_J b_Jj the mass that the pilot rows J give to key j, c(j) the cluster of key j and W_c its mass,

    k_c = sum_{c(j) = c} w_j k_j / W_c        v_c = sum_{c(j) = c} w_j v_j / W_c
    log weight of c = log( W_c / mean_J exp(s q_J . k_c - lse_J) )
    C = sum_j w_j (k_j - k_c(j)) (v_j - v_c(j))^T

docs/cluster.md derives them. Clusters, mass, log weights and the linear term's factor carry no gradient; keys and
values do, through the means and through C.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.pilots import Pilots, column_mass, log_importance
from skeinformer.attention.selection import Selection, at_most, sample_without_replacement
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.kernels.clusters import add_of_clusters_, cluster_sums, first_of_largest, weighted_sums
from skeinformer.kernels.merge import Virtual
from skeinformer.kernels.ranges import LOWEST, moderate_unit
from skeinformer.kernels.rows import gather_rows

UNSEEN = 1e-20  # the mass of a key that no pilot sees: among its like it counts, beside others it does not
SAMPLED_KEYS = 8  # keys per cluster that the Lloyd steps see
SEEN = 1e-14  # a cluster that weighs less to the pilots is counted, not calibrated
METRIC_QUERIES = 4  # queries per dimension that the metric is made of
RIDGE = 0.1  # of the metric, in its mean eigenvalue: what no query asks for decides between keys that are else alike


class ClusterMerge(NamedTuple):
    """The means of clusters as linear maps with one non-zero per column, and how the slope depends on keys and values.

    The slope is G = a s C; its gradient reaches both keys and values.
    """

    assignment: Tensor  # (b, h, n), the cluster of each key
    weight: Tensor  # (b, h, n), w; 0 for an empty slot
    total: Tensor  # (b, h, d), W; above 0
    rate: Tensor | None = None  # (b, h, 1, 1), a s; None without a slope
    center: Tensor | None = None  # (b, h, 1, p), mean q_J

    def add_gradients_(
        self, totals: tuple[Tensor | None, Tensor], key: Tensor, value: Tensor, virtual: Virtual, gradients: Virtual
    ) -> None:
        """dk_j += w_j (dk_c / W_c + dC (v_j - v_c)), dv_j += w_j (dv_c / W_c + dC^T (k_j - k_c)).

        In units of large gradients: W_c may be 1e-20, and then a gradient of 1e20 over it is beyond float32.
        """
        dtype = self.weight.dtype
        parts = [x.to(dtype) for x in gradients if x is not None]
        unit = moderate_unit(torch.stack([x.abs().amax((-2, -1)) for x in parts]).amax(0)[..., None, None])
        d_keys, d_values, *d_slopes = (x / unit for x in parts)  # (b, h, d, p), (b, h, d, p_v), (b, h, p, p_v)
        weight = self.weight * unit[..., 0]  # (b, h, n)
        if self.rate is None or self.center is None or virtual.slope is None or gradients.slope is None:
            for total, d_means in zip(totals, (d_keys, d_values), strict=True):
                if total is not None:
                    add_of_clusters_(total, d_means / self.total[..., None], self.assignment, weight)
            return
        keys, values, slope = (x.to(dtype) for x in (*virtual[:2], virtual.slope))
        values = values + self.center @ slope  # the means: virtual values are shifted by the slope's constant
        d_covariance = self.rate * (d_slopes[0] - self.center.mT @ d_values.sum(-2, keepdim=True))  # (b, h, p, p_v)
        for total, other, means, d_means, across in (
            (totals[0], value, values, d_keys, d_covariance.mT),
            (totals[1], key, keys, d_values, d_covariance),
        ):
            if total is None:
                continue
            of_cluster = d_means / self.total[..., None] - means @ across  # (b, h, d, p)
            add_of_clusters_(total, of_cluster, self.assignment, weight, other, across)


class Moments(NamedTuple):
    """First moments of keys and values in clusters, and their covariance within clusters."""

    assignment: Tensor  # (b, h, n), the cluster of each key
    total: Tensor  # (b, h, d), W; above 0
    keys: Tensor  # (b, h, d, p), k_c
    values: Tensor  # (b, h, d, p_v), v_c
    covariance: Tensor | None  # (b, h, p, p_v), C


class Clusters(NamedTuple):
    """What stands for a set of keys and values: attention over `virtual`, plus Q times `slope`."""

    merge: ClusterMerge
    virtual: VirtualKeys  # (b, h, d, p); its values hold the constant part of the linear term
    slope: Tensor | None  # (b, h, p, p_v), None without the linear term
    factor: Tensor | None  # (b, h, 1), a


def merge_clusters(
    pilots: Pilots,
    source: VirtualKeys,
    u: Tensor,
    d: int,
    *,
    num_steps: int,
    first_order: bool,
    scale: float,
    metric: Tensor | None = None,
) -> Clusters:
    """At most d clusters of the slots of `source`; where there are no more than d, each has its own.

    u: uniform numbers (b, h, n), one per slot. metric: (b, h, p, p), that of distances between keys; None is the plain
    one. Time O(n d p) for each step, memory O(n p).
    """
    n = source.keys.shape[-2]
    log_weights = source.log_weights()
    largest = log_weights.amax(-1, keepdim=True).clamp(min=-1e4)  # (b, h, 1), finite where nothing is live
    live, share = log_weights > -torch.inf, (log_weights - largest).exp()  # (b, h, n)
    # whether each has its own, (b, h, 1); None where that is known not to be so
    full = None if n > d and source.log_weight is None else live.sum(-1, keepdim=True) <= d
    d = at_most(d, n)
    sample = sample_without_replacement(log_importance(pilots, source, scale), u, SAMPLED_KEYS * d if num_steps else d)
    weight = (column_mass(pilots, source, scale) + UNSEEN * share.clamp(min=1e-6)).where(live, 0)
    weight = weight if full is None else torch.where(full, live.to(weight.dtype), weight)
    moments = find_moments(source, weight, sample, d, full, num_steps, metric, first_order and n > d)
    log_count = largest + _total(share, moments.assignment, d).log()  # (b, h, d)
    own = None
    if full is not None:
        own = log_weights.gather(-1, sample.indices[..., :d]).where(sample.live[..., :d], -torch.inf)
    return form_clusters(pilots, moments, weight, log_count, full, own, scale, source.keys.dtype)


def form_clusters(
    pilots: Pilots,
    moments: Moments,
    weight: Tensor,  # (b, h, n), w
    log_count: Tensor,  # (b, h, d), the log of what the keys of each cluster weigh
    full: Tensor | None,  # (b, h, 1), where each key has its own
    own: Tensor | None,  # (b, h, d), the log weights there
    scale: float,
    dtype: torch.dtype,  # of keys and values
) -> Clusters:
    """What stands for the keys, from the moments of the clusters and the pilot rows: calibration and linear term."""
    merge = ClusterMerge(moments.assignment, weight, moments.total)
    keys, values = moments.keys.to(dtype), moments.values
    log_weight = calibrate(pilots, keys, merge.total, log_count, scale)
    if full is not None and own is not None:
        log_weight = torch.where(full, own, log_weight)
    slope = factor = None
    if moments.covariance is not None:
        center = mean_query(pilots)
        factor = fit_factor(pilots, center, VirtualKeys(keys, values, log_weight), moments.covariance, scale)
        factor = factor if full is None else torch.where(full, 0, factor)
        rate = scale * factor[..., None]  # (b, h, 1, 1)
        merge, slope = merge._replace(rate=rate, center=center), rate * moments.covariance
        values = values - center @ slope
    return Clusters(merge, VirtualKeys(keys, values.to(dtype), log_weight), slope, factor)


def find_moments(
    source: VirtualKeys,
    weight: Tensor,
    sample: Selection,
    d: int,
    full: Tensor | None,
    num_steps: int,
    metric: Tensor | None,
    with_covariance: bool,
) -> Moments:
    """Every slot to its cluster, and the clusters' moments. Where `full`, the first d of the sample have their own."""
    keys = source.keys
    assignment = torch.zeros_like(weight, dtype=torch.long)
    if keys.shape[-2] > d:
        places = keys.detach().to(weight.dtype)
        points = gather_rows(places, sample.indices)
        assignment = nearest(places, find_centers(points, sample.live, d, num_steps, metric), metric)
    if full is not None:
        chosen = sample.indices[..., :d]
        own = assignment.scatter(-1, chosen, torch.arange(d, device=chosen.device).expand_as(chosen))
        assignment = torch.where(full, own, assignment)
    sums = sum_clusters(source, weight, assignment, d, with_covariance)
    return moments_of(sums, assignment, keys.shape[-1])


class ClusterSums(NamedTuple):
    """Sums over the keys of clusters. Those of several parts of the keys add up to those of all."""

    weight: Tensor  # (b, h, d), W
    both: Tensor  # (b, h, d, p + p_v), of w_j [k_j, v_j]
    product: Tensor | None  # (b, h, p, p_v), sum_j w_j k_j v_j^T over all keys


def sum_clusters(source: VirtualKeys, weight: Tensor, assignment: Tensor, d: int, with_product: bool) -> ClusterSums:
    """The sums of which the clusters' moments are made."""
    return ClusterSums(
        of_weights(weight, assignment, d), *weighted_sums(*source[:2], weight, assignment, d, with_product)
    )


def moments_of(sums: ClusterSums, assignment: Tensor, width: int) -> Moments:
    """Means, and C, for keys of this width."""
    total = sums.weight.clamp(min=_tiny(sums.weight))
    means = sums.both / total[..., None]
    key_means, value_means = means[..., :width], means[..., width:]
    covariance = None if sums.product is None else sums.product - sums.both[..., :width].mT @ value_means
    return Moments(assignment, total, key_means, value_means, covariance)


@torch.no_grad()
def query_metric(queries: Tensor, live: Tensor) -> Tensor:
    """The covariance of the live queries, (..., m, p) -> (..., p, p), of mean eigenvalue 1 and with a ridge.

    Keys are as far apart as their scores are, for queries like these.
    """
    queries = queries.to(torch.promote_types(queries.dtype, torch.float32))
    weight = live[..., None].to(queries.dtype)  # (..., m, 1)
    around = (queries - (queries * weight).sum(-2, keepdim=True) / weight.sum(-2, keepdim=True).clamp(min=1)) * weight
    around = around / around.abs().amax((-2, -1), keepdim=True).clamp(min=_tiny(around))  # its squares are finite
    covariance = around.mT @ around
    size = covariance.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return covariance / size.clamp(min=_tiny(size)) + RIDGE * identity


@torch.no_grad()
def find_centers(points: Tensor, live: Tensor, d: int, num_steps: int, metric: Tensor | None = None) -> Tensor:
    """The first d points of a sample in order of rank, moved by Lloyd steps (1982) over the sample: (b, h, d, p).

    points, live: (b, h, m, p), (b, h, m). Time O(m d p) for each step.
    """
    weight = live.to(points.dtype)
    centers, points = points[..., :d, :], points * weight[..., None]
    for _ in range(num_steps):
        assignment = nearest(points, centers, metric)
        total = _total(weight, assignment, d)[..., None]
        centers = torch.where(total > _tiny(total), cluster_sums(points, assignment, d) / total, centers)
    return centers


@torch.no_grad()
def nearest(keys: Tensor, centers: Tensor, metric: Tensor | None = None) -> Tensor:
    """argmin_c (k - c)^T Sigma (k - c), Sigma the metric or the identity: (..., n, p), (..., d, p) -> (..., n).

    It is the largest of k . Sigma (c - m) - (c + m) . Sigma (c - m) / 2 for any m: with the mean center, what keys have
    in common does not cost digits.
    """
    mean = centers.mean(-2, keepdim=True)  # (..., 1, p)
    around = centers - mean
    direction = around if metric is None else around @ metric  # (..., d, p)
    size = (around * direction).sum(-1).amax(-1)[..., None, None].clamp(min=_tiny(around) ** 0.5)  # (..., 1, 1)
    direction = direction / size  # a difference of scores is one of distances, in that of the farthest center
    offset = -(direction * (centers + mean)).sum(-1) / 2  # (..., d)
    return first_of_largest(keys, direction, offset)


@torch.no_grad()
def calibrate(pilots: Pilots, keys: Tensor, total: Tensor, log_count: Tensor, scale: float) -> Tensor:
    """log( W_c / mean_J exp(s q_J . k_c - lse_J) ): (b, h, d). -inf for an empty cluster.

    With it the pilots give each cluster on average what they give to its keys. A cluster that they hardly see counts
    its keys.
    """
    live = pilots.rows.live[..., None]  # (b, h, P, 1)
    log_seen = _pilot_scores(pilots, keys, total.dtype, scale).where(live, -torch.inf).logsumexp(-2)
    log_seen = log_seen - live.sum(-2).clamp(min=1).to(total.dtype).log()
    seen = (total > SEEN) & (log_seen.exp() > SEEN)
    log_weight = torch.where(seen, total.log() - log_seen, log_count)
    return log_weight.where(total > _tiny(total), -torch.inf)


@torch.no_grad()
def mean_query(pilots: Pilots) -> Tensor:
    """The mean of the live pilot queries: (b, h, 1, p)."""
    live = pilots.rows.live[..., None]  # (b, h, P, 1)
    queries = pilots.queries.to(torch.promote_types(pilots.queries.dtype, torch.float32))
    return (queries * live).sum(-2, keepdim=True) / live.sum(-2, keepdim=True).clamp(min=1)


@torch.no_grad()
def fit_factor(pilots: Pilots, center: Tensor, virtual: VirtualKeys, covariance: Tensor, scale: float) -> Tensor:
    """The a in [0, 1] for which a s (q_J - mean q_J) C is nearest to what attention over `virtual` misses: (b, h, 1).

    It keeps the linear term out where attention is too peaked for it.
    """
    dtype = covariance.dtype
    scores = _pilot_scores(pilots, virtual.keys, dtype, scale) + virtual.log_weights()[..., None, :]  # (b, h, P, d)
    weights = (scores - scores.amax(-1, keepdim=True).clamp(min=LOWEST)).exp()
    weights = weights / weights.sum(-1, keepdim=True).clamp(min=_tiny(weights))
    missed = pilots.output.to(dtype) - weights @ virtual.values.to(dtype)  # (b, h, P, p_v)
    term = scale * (pilots.queries.to(dtype) - center) @ covariance * pilots.rows.live[..., None]
    unit = moderate_unit(term.abs().amax((-2, -1), keepdim=True))  # (b, h, 1, 1)
    missed, term = missed / unit, term / unit
    size = term.square().sum((-2, -1))[..., None]  # (b, h, 1)
    factor = (missed * term).sum((-2, -1))[..., None] / size.clamp(min=_tiny(size))
    return factor.clamp(0, 1)


def _pilot_scores(pilots: Pilots, keys: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """s q_J . k_c - lse_J: (b, h, P, d)."""
    return scale * (pilots.queries.to(dtype) @ keys.to(dtype).mT) - pilots.normalizer.to(dtype)[..., None]


def of_weights(weight: Tensor, assignment: Tensor, d: int) -> Tensor:
    """Sums of weights over clusters: (..., n) -> (..., d)."""
    return weight.new_zeros(*weight.shape[:-1], d).scatter_add(-1, assignment, weight)


def _total(weight: Tensor, assignment: Tensor, d: int) -> Tensor:
    """`of_weights`, no less than the smallest number above 0."""
    return of_weights(weight, assignment, d).clamp(min=_tiny(weight))


def _tiny(x: Tensor) -> float:
    return torch.finfo(x.dtype).tiny
