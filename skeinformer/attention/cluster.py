"""The cluster sketch: softmax attention over d weighted means of keys and values, and one linear term.

Skeinformer's virtual keys are sampled; these are the means of clusters. P queries, drawn at random, are the pilots J:
their rows b_J = softmax(s q_J K^T) are exact, and lse_J are the logs of their sums. With w_j = mean_J b_Jj, the
attention that the pilots give to key j, c(j) the cluster of key j and W_c the sum of its weights,

    k_c = sum_{c(j) = c} w_j k_j / W_c        v_c = sum_{c(j) = c} w_j v_j / W_c
    w'_c = log( W_c / mean_J exp(s q_J . k_c - lse_J) )
    C = sum_j w_j (k_j - k_c(j)) (v_j - v_c(j))^T

    R = softmax(s Q K'^T + w') V' + a s (Q - mean q_J) C

where K' and V' have the rows k_c and v_c, and the pilots choose a factor a in [0, 1]. Their exact rows are written over
R as in Algorithm 1 of Chen et al. (2022). Distances between keys and centers are those of their scores with other
queries, the metric. docs/cluster.md derives all of it. Clusters, weights and the factor carry no gradient; keys and
values do, through the means and through C. Over several ranks no exchange has the size of the sequence
(docs/distributed.md); every rank then has the same virtual keys, and attends with its own queries.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.base import NUM_CHECKS, Call, Trace, attend_once
from skeinformer.attention.centers import METRIC_QUERIES, find_centers, linear_scores, own_clusters, query_metric
from skeinformer.attention.certificate import Info
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.near import attend as attend_near
from skeinformer.attention.pilots import Pilots, compute_pilots
from skeinformer.attention.rows import Rows, count_real, masked_scores, places, top_of_all, weighted_mean
from skeinformer.attention.sketch_method import Gradients, Sketch, SketchMethod
from skeinformer.attention.virtual_keys import VirtualKeys, from_mask
from skeinformer.checks import check_count
from skeinformer.kernels import steps_for
from skeinformer.kernels.choice import all_true, statistics_dtype
from skeinformer.kernels.rows import LOWEST, is_moderate, moderate_unit
from skeinformer.noise import Rand, gumbel

Quality = Literal["fast", "accurate"]
QUALITIES: dict[str, tuple[int, int, int]] = {"fast": (16, 16, 1), "accurate": (128, 64, 1)}  # clusters, pilots, steps
MASS_FLOOR = 1e-20  # added to the weight of every key, so that keys that no pilot attends to have equal weights
SAMPLED_KEYS = 8  # keys per cluster that the Lloyd steps see
CALIBRATED = 1e-14  # a cluster of less weight has the number of its keys as its weight


class ClusterNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    pilots: Tensor  # (b, h, n): the queries of the largest are the pilots, those of the smallest make the metric
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


class Clusters(NamedTuple):
    """Pilot rows, and the cluster and weight that each key has by them."""

    pilots: Pilots
    assignment: Tensor  # (b, h, n_k), the cluster of each key
    weight: Tensor  # (b, h, n_k), 0 for padding
    is_real: Tensor  # (b, h, n_k), 1 or 0 for padding
    few_keys: Tensor | None  # (b, h, 1), where each key is its own cluster, those of `single`
    single: Rows


class Cluster(SketchMethod):
    """softmax(s Q K'^T + w') V' + a s (Q - mean q_J) C: attention over d weighted means of clusters of keys.

    Exact where d is at least the number of real keys. No parameters. Time O(n (d + 3 w + P + p) p), memory
    O((n + d) p).

    Args:
        budget: d, the number of clusters.
        quality: The defaults of what is None: "fast" is 16 clusters and 16 pilots, "accurate" 128 and 64, one step.
        num_pilots: P, the rows that are computed exactly; by default no more than clusters.
        num_steps: Lloyd steps that move the first centers, which are drawn by Eq. (5) of Chen et al. (2022).
        first_order: Whether to add the linear term with C, the covariance of keys and values within clusters.
        window: w, the size of a block of tokens: a query sees its own block and both neighbours exactly, and clusters
            of all other keys. For self-attention; 0 for clusters alone.
    """

    budget: int = None  # type: ignore[assignment]  # None stands for the quality's, and is replaced below
    quality: Quality = "fast"
    num_pilots: int = None  # type: ignore[assignment]
    num_steps: int = None  # type: ignore[assignment]
    first_order: bool = True
    window: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        clusters, pilots, steps = QUALITIES[self.quality]
        clusters = clusters if self.budget is None else self.budget
        pilots = min(pilots, clusters) if self.num_pilots is None else self.num_pilots
        steps = steps if self.num_steps is None else self.num_steps
        check_count("num_pilots", pilots)
        check_count("num_steps", steps, at_least=0)
        check_count("window", self.window, at_least=0)
        for name, size in (("budget", clusters), ("num_pilots", pilots), ("num_steps", steps)):
            object.__setattr__(self, name, size)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if self.window and (n := query.shape[2]) != (n_k := key.shape[2]):
            needs = f"window={self.window} needs the same number: one sequence. Set window=0 for cross-attention"
            raise ValueError(f"query has {n} tokens and key {n_k}, but {needs}")

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        return ClusterNoise(rand(query.shape[-2]), rand(key.shape[-2]))

    def sketch(self, inputs: Inputs, noise: Noise) -> tuple[Sketch, Trace]:
        return self.merge(inputs, self.find_clusters(inputs, noise))

    def find_clusters(self, inputs: Inputs, noise: Noise) -> "Clusters":
        """Compute the pilot rows, and by them the weights and clusters of keys; a window does not change them."""
        query, key, value, key_mask, query_mask, scale, world = inputs  # masks are (b, 1, n) or None
        (pilot_noise, center_noise), dtype, steps = noise, statistics_dtype(query), steps_for(query)
        n, n_k = world.num_queries(query.shape[-2]), world.num_keys(key.shape[-2])
        source = from_mask(key.to(dtype), value.to(dtype), key_mask)  # half precision is widened once
        # pilot rows; for each key its weight, and the log of the probability to be sampled
        best, least = masked_scores(pilot_noise, query_mask), masked_scores(-pilot_noise, query_mask)
        requests = [(best, self.num_pilots, query), (least, METRIC_QUERIES * query.shape[-1], None)]
        (rows, metric_rows), (queries,) = top_of_all(world, "pilots", requests, n, masked=query_mask is not None)
        queries = queries.to(dtype)
        pilots, log_probability, mass = compute_pilots(rows, queries, source, scale, steps, world, with_mass=True)
        assert mass is not None
        weight, is_real = mass.add_(MASS_FLOOR), torch.ones_like(mass)
        if key_mask is not None:
            weight, is_real = weight.where(key_mask, 0), is_real.where(key_mask, 0)
        # a sample of keys; one more than d are drawn at least, to see where there are no more real keys than clusters
        size = min(SAMPLED_KEYS * self.budget if self.num_steps else self.budget, n_k)
        request = (log_probability.add_(gumbel(center_noise)), max(size, self.budget + 1), None)
        masked = key_mask is not None or n_k <= self.budget
        ((sample,), _) = top_of_all(world, "samples", [request], n_k, masked=masked)
        assignment = self.assign(inputs, source, metric_rows, sample.first(size))
        single, few_keys = sample.first(min(self.budget, n_k)), None
        if sample.live is not None:
            few_keys = sample.live.sum(-1, keepdim=True) <= self.budget  # (b, h, 1): each key is its own cluster there
            few_keys = None if all_true(~few_keys) else few_keys
        if few_keys is not None:
            assignment = torch.where(few_keys, own_clusters(single, assignment), assignment)
            weight = torch.where(few_keys, is_real, weight)
        return Clusters(pilots, assignment, weight, is_real, few_keys, single)

    def assign(self, inputs: Inputs, source: VirtualKeys, metric_rows: Rows, sample: Rows) -> Tensor:
        """Return the cluster of the nearest center for every key, (b, h, n_k); zeros where all have their own."""
        query, key, world = inputs.query, source.keys, inputs.world
        (b, h, _, p), steps = key.shape, steps_for(key)
        n, n_k = world.num_queries(query.shape[-2]), world.num_keys(key.shape[-2])
        parts = [sample.take(key), metric_rows.take(query.to(key.dtype))]
        # with few queries the smallest numbers of the noise are those of pilots: they are no part of the metric
        overlaps = metric_rows.live is not None or n - self.num_pilots < metric_rows.index.shape[-1]
        if overlaps:
            parts.append(count_real(query, inputs.query_mask).expand(b, 1, 1).to(key.dtype))
        points, metric_queries, *count = world.sum("centers", *parts)
        if n_k <= self.budget:
            return torch.zeros(key.shape[:-1], dtype=torch.long, device=key.device)
        live = None
        if overlaps:
            place = torch.arange(metric_rows.index.shape[-1], device=key.device)
            live = metric_rows.is_live() & (place < count[0] - self.num_pilots)
        metric = query_metric(metric_queries.view(b * h, -1, p), live)
        centers = find_centers(points, sample.live, self.budget, self.num_steps, metric, steps)
        assignment: Tensor = steps.nearest_center(key, *linear_scores(centers, metric))
        return assignment

    def merge(self, inputs: Inputs, clusters: "Clusters") -> tuple[Sketch, Trace]:
        """Compute the means of the clusters, their log weights and the linear term; B = b h heads."""
        key, value, scale, world = inputs.key, inputs.value, inputs.scale, inputs.world
        pilots, assignment, weight, is_real, few_keys, single = clusters
        (b, h, _, p), dtype = key.shape, weight.dtype
        source = from_mask(key.to(dtype), value.to(dtype), inputs.key_mask)
        n_k, heads = world.num_keys(key.shape[-2]), b * h
        d, with_product = min(self.budget, n_k), self.first_order and n_k > self.budget
        # sums over clusters of w [k, v], (B, d, p + p_v), of w and of 1, (B, d); sum_j w_j k_j v_j^T, (B, p, p_v)
        sums, product = steps_for(key).cluster_sums(source.keys, source.values, weight, assignment, d, with_product)
        index = assignment.view(heads, -1)
        total, number = (x.new_zeros(heads, d).scatter_add_(-1, index, x.reshape(heads, -1)) for x in (weight, is_real))
        parts = [sums, total, number, pilots.output, *([] if product is None else [product])]
        sums, total, number, output, *products = world.sum("clusters", *parts)  # of pilot rows ranks have parts
        total = total.clamp_(min=torch.finfo(dtype).tiny)
        means = sums / total[..., None]
        # with a window they keep their precision: what is near is taken out of them
        mean_keys, mean_values = means[..., :p].to(dtype if self.window else key.dtype), means[..., p:]
        rows = PilotRows.of(pilots, output)
        # s q_J . k_c - lse_J, (B, P, d)
        log_ratio = torch.baddbmm(rows.lse, rows.queries, mean_keys.to(dtype).mT, beta=-1, alpha=scale)
        log_weight = calibrate(log_ratio, rows.live, total, number)
        if few_keys is not None:
            few_keys = few_keys.view(heads, 1)
            single_log_weight = torch.zeros_like(log_weight).where(single.is_live().view(heads, d), -torch.inf)
            log_weight = torch.where(few_keys, single_log_weight, log_weight)
        virtual = VirtualKeys(mean_keys.view(b, h, d, p), mean_values.view(b, h, d, -1), log_weight.view(b, h, d))
        near = slope = rate = center = factor = None
        if self.window:
            near = attend_near(
                inputs, virtual, self.window, assignment, weight / total.gather(-1, index).view_as(weight)
            )
        if products:  # slope = a s C, rate = a s
            covariance = torch.baddbmm(products[0], sums[..., :p].mT, mean_values, alpha=-1)
            if near is None:
                weights = (log_ratio + log_weight[:, None]).clamp_(min=LOWEST).softmax(-1)
                attended = torch.bmm(weights, mean_values)
            else:
                (attended,) = world.sum("near rows", pilots.rows.take(near.output))
            center, factor = rows.fit(attended.view_as(rows.output), covariance, scale)  # (B, 1, p), (B, 1, 1)
            factor = factor if few_keys is None else factor.where(~few_keys[..., None], 0)
            rate = factor * scale
            slope = rate * covariance
            constant = torch.bmm(center, slope)  # softmax weights sum to 1: subtracted from all values
            slope = slope.view(b, h, p, -1)
            if near is None:
                virtual = virtual._replace(values=virtual.values - constant.view(b, h, 1, -1))
            else:
                near = near.plus_linear(inputs.query, slope, center.view(b, h, 1, p), constant.view(b, h, 1, -1))
            slope = slope.to(key.dtype)
        virtual = virtual if near is not None else virtual._replace(values=virtual.values.to(value.dtype))
        pilots = pilots._replace(queries=pilots.queries.to(key.dtype), output=output.to(value.dtype))
        sketch = Sketch(virtual, slope, pilots, (assignment, weight, total, rate, center), near)
        return sketch, Trace(pilots, details=(pilots, assignment, virtual.log_weight, factor))

    def add_gradients_(
        self, sketch: Sketch, d_virtual: Gradients, key: Tensor, value: Tensor, d_key: Tensor, d_value: Tensor
    ) -> None:
        """dk_j += w_j (dk_c / W_c + dC (v_j - v_c)), dv_j += w_j (dv_c / W_c + dC^T (k_j - k_c)).

        d_virtual: the gradients of virtual keys, virtual values and slope. Gradients are divided by `unit` and weights
        multiplied: W_c may be 1e-20, and a large gradient divided by it would be beyond float32.
        """
        assignment, weight, total, rate, center = sketch.saved
        steps, (b, h) = steps_for(key), key.shape[:2]
        total = total.view(b, h, -1)
        largest = torch.stack([x.abs().amax((-2, -1)) for x in d_virtual if x is not None]).amax(0)
        unit = moderate_unit(largest[..., None, None])
        d_keys, d_values = d_virtual[0] / unit, d_virtual[1] / unit
        weight = weight * unit[..., 0]  # (b, h, n_k)
        if d_virtual[2] is None or sketch.slope is None:
            for result, gradient in ((d_key, d_keys), (d_value, d_values)):
                steps.add_cluster_gradients_(result, gradient / total[..., None], assignment, weight)
            return
        keys, values, slope = (x.to(weight.dtype) for x in (*sketch.virtual[:2], sketch.slope))
        d_slope = d_virtual[2] / unit  # (b, h, p, p_v)
        if sketch.near is None:  # the constant of the linear term was subtracted from the mean values
            center = center.view(b, h, 1, -1)
            values, d_slope = values + center @ slope, d_slope - center.mT @ d_values.sum(-2, keepdim=True)
        d_covariance = rate.view(b, h, 1, 1) * d_slope
        of_keys = d_keys / total[..., None] - values @ d_covariance.mT  # (b, h, d, p)
        of_values = d_values / total[..., None] - keys @ d_covariance
        steps.add_cluster_gradients_(d_key, of_keys, assignment, weight, value, d_covariance.mT)
        steps.add_cluster_gradients_(d_value, of_values, assignment, weight, key, d_covariance)

    def info(self, inputs: Inputs, trace: Trace, error: Info) -> ClusterInfo:
        pilots, assignment, log_weight, factor = trace.details
        world, key_mask = inputs.world, inputs.key_mask
        if key_mask is not None:
            assignment = assignment.where(key_mask, -1)
        (pilot_places,) = places(world, (pilots.rows, world.query_start, self.num_pilots))
        return ClusterInfo(
            pilot_places,
            assignment[..., : world.keys_here(assignment.shape[-1])],
            F.pad(log_weight, (0, self.budget - log_weight.shape[-1]), value=-torch.inf),
            torch.zeros_like(error.error) if factor is None else factor.view(error.error.shape),
            *error,
        )


def cluster_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    budget: int | None = None,
    quality: Quality = "fast",
    num_pilots: int | None = None,
    num_steps: int | None = None,
    first_order: bool = True,
    window: int = 0,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
    noise: Noise | None = None,
    generator: torch.Generator | None = None,
    return_info: bool = False,
    num_checks: int = NUM_CHECKS,
    group: Any = None,
) -> Any:
    """Approximate softmax(s Q K^T) V by attention over d weighted means of clusters of keys.

    Exact where d is at least the number of real keys. Time O(n (d + 3 w + P + p) p), memory O((n + d) p).

    Args:
        query, key, value: (b, h, n, p), (b, h, n_k, p) and (b, h, n_k, p_v).
        budget, quality, num_pilots, num_steps, first_order, window: Options of `Cluster`.
        key_mask: (b, n_k), True where a key is real.
        query_mask: (b, n), True where a query is real; rows of other queries are zero.
        scale: s, 1/sqrt(p) by default.
        noise: A ClusterNoise, instead of drawing.
        generator: Where numbers are drawn from; torch's global state by default.
        return_info: Whether to return (output, ClusterInfo) with the estimated error; the output is the same.
        num_checks: How many rows are computed exactly to estimate the error.
        group: A ProcessGroup or a one-dimensional DeviceMesh whose ranks each pass, and get, a share of the tokens.

    Returns:
        The output, (b, h, n, p_v), or with `return_info` the output and a ClusterInfo.

    Raises:
        ValueError: Shapes, devices or values do not fit; the message names which.
        TypeError: An argument has the wrong type.

    Example:
        >>> output, info = cluster_attention(q, k, v, budget=64, return_info=True)
        >>> float(info.error_upper.max())
    """
    options = (budget, quality, num_pilots, num_steps, first_order, window)
    call = Call(query, key, value, key_mask, query_mask, scale, None, noise, generator)
    return attend_once(Cluster, options, call, return_info, num_checks, group)


def calibrate(log_ratio: Tensor, live: Tensor | None, total: Tensor, number: Tensor) -> Tensor:
    """log( W_c / mean_J exp(s q_J . k_c - lse_J) ): (B, P, d), (B, d) -> (B, d); -inf for an empty cluster.

    With it the mean attention of the pilots to a cluster is that to its keys. Where they give it almost none, it is the
    log of the number of its keys. log_ratio: s q_J . k_c - lse_J.
    """
    if live is None:
        largest = log_ratio.amax(1, keepdim=True)
        log_seen = (log_ratio - largest).exp_().mean(1).log_().add_(largest[:, 0])
    else:
        count = live.sum(1).clamp(min=1).to(total.dtype)  # (B, 1)
        log_seen = log_ratio.where(live, -torch.inf).logsumexp(1) - count.log()
    seen = torch.minimum(total, log_seen.exp()) > CALIBRATED
    return torch.where(seen, total.log() - log_seen, number.log())


class PilotRows(NamedTuple):
    """Pilot rows of all ranks, as B = b h heads."""

    queries: Tensor  # (B, P, p)
    output: Tensor  # (B, P, p_v), exact
    lse: Tensor  # (B, P, 1)
    live: Tensor | None  # (B, P, 1), False where there is no row

    @classmethod
    def of(cls, pilots: Pilots, output: Tensor) -> "PilotRows":
        parts = (pilots.queries, output, pilots.lse[..., None])
        queries, output, lse = (x.reshape(-1, *x.shape[-2:]) for x in parts)
        return cls(queries, output, lse, None if pilots.rows.live is None else pilots.rows.live.view_as(lse))

    def fit(self, attended: Tensor, covariance: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the mean query q, (B, 1, p), and the factor a of the linear term a s (Q - q) C, (B, 1, 1).

        a in [0, 1] is the one with which the term is nearest to what `attended`, (B, P, p_v), misses of these rows: the
        term is left out where attention is too peaked for it.
        """
        queries, live = self.queries, self.live
        center = queries.mean(1, keepdim=True) if live is None else weighted_mean(queries, live)
        term, missed = torch.bmm(queries - center, covariance) * scale, self.output - attended
        if live is not None:
            term, missed = term * live, missed * live
        largest = term.abs().amax((1, 2), keepdim=True)  # (B, 1, 1)
        if not is_moderate(largest):
            unit = moderate_unit(largest)
            missed, term = missed / unit, term / unit
        size = term.square().sum((1, 2), keepdim=True).clamp_(min=torch.finfo(term.dtype).tiny)
        return center, ((missed * term).sum((1, 2), keepdim=True) / size).clamp_(0, 1)
