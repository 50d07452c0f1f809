"""The cluster sketch: softmax attention over d weighted means of keys and values, and one linear term.

Skeinformer's virtual keys are sampled; these are the means of clusters, weighted by what P exact pilot rows J see:

    R = softmax(s Q K'^T + w') V' + a s (Q - mean q_J) C

with K', V', w' and C of `clusters.py` and a factor a in [0, 1] that the pilots choose. Pilot rows are written over the
result as in Algorithm 1 of Chen et al. (2022). Exact where every real key has a cluster of its own.
"""

from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.base import (
    Attention,
    Noise,
    clear_padding,
    default_scale,
    no_autocast,
    prepare,
    settle_noise,
)
from skeinformer.attention.certificate import draw_checks, estimate_error
from skeinformer.attention.clusters import ASKED, Clusters, merge_clusters, query_metric
from skeinformer.attention.merge import attend_merged, gradient_by_hand
from skeinformer.attention.pilots import Pilots, Selection, compute_pilots, uniform_rows
from skeinformer.attention.virtual_keys import VirtualKeys, from_mask
from skeinformer.noise import Rand
from skeinformer.registry import check_choice, check_count, check_flag, check_number
from skeinformer.kernels.rows import gather_rows

Quality = Literal["fast", "accurate"]


class ClusterNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    pilots: Tensor  # (b, h, n): their ranks are the pilots, then the check rows
    centers: Tensor  # (b, h, n_k): Gumbel noise of the first centers


class ClusterInfo(NamedTuple):
    """Which cluster each key is in, what the clusters weigh, and how far off the output is."""

    pilots: Tensor  # (b, h, num_pilots) row indices, -1 for an empty slot
    assignment: Tensor  # (b, h, n_k) the cluster of each key, -1 for padding
    log_weight: Tensor  # (b, h, budget) of each cluster, -inf for an empty one
    factor: Tensor  # (b, h) of the linear term
    error: Tensor  # (b, h) estimated relative Frobenius error of the output
    error_se: Tensor  # (b, h) its standard error


class ClusterOptions(NamedTuple):
    """What `cluster_attention` is told beside its inputs."""

    budget: int
    num_pilots: int
    num_steps: int
    first_order: bool
    scale: float | None
    num_checks: int


class Trace(NamedTuple):
    """What the sketch had in hand on the way to its output."""

    source: VirtualKeys
    pilots: Pilots
    clusters: Clusters


QUALITIES: dict[str, tuple[int, int, int]] = {"fast": (16, 16, 1), "accurate": (128, 64, 1)}  # clusters, pilots, steps


def cluster_sketch(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    value: Tensor,  # (b, h, n_k, p_v)
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    noise: ClusterNoise,
    options: ClusterOptions,
) -> tuple[Tensor, Trace]:
    """Pilots, clusters, attention over them, on checked inputs."""
    scale = default_scale(query, options.scale)
    source = from_mask(key, value, key_mask)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not gradient_by_hand(query, value)):
        rows = uniform_rows(noise.pilots, query_mask, options.num_pilots)
        # from the other end of the ranks: the certificate's rows come next after the pilots, and must decide nothing
        asked = uniform_rows(-noise.pilots, query_mask, ASKED * query.shape[-1])
        pilots = compute_pilots(query, rows, source, scale, with_mass=True)
        clusters = merge_clusters(
            pilots,
            source,
            noise.centers,
            options.budget,
            num_steps=options.num_steps,
            first_order=options.first_order,
            scale=scale,
            metric=query_metric(gather_rows(query, asked.indices), asked.live),
        )
    output = attend_merged(query, source, clusters.merge, clusters.virtual, pilots, scale, clusters.slope)
    return output, Trace(source, pilots, clusters)


def compress(
    pilot_queries: Tensor, source: VirtualKeys, d: int, u: Tensor, *, scale: float, num_steps: int = 1
) -> VirtualKeys:
    """d slots that answer queries like the pilots almost as `source` does, by virtual keys alone: no linear term.

    u: uniform numbers (..., m), one per slot of the source. Attending to the result is exact where d >= live slots.
    """
    rows = torch.arange(pilot_queries.shape[-2], device=u.device).expand(pilot_queries.shape[:-1])
    selection = Selection(rows, torch.ones_like(rows, dtype=torch.bool))
    pilots = compute_pilots(pilot_queries, selection, source, scale, with_mass=True)
    return merge_clusters(pilots, source, u, d, num_steps=num_steps, first_order=False, scale=scale).virtual


@torch.no_grad()
def describe(
    output: Tensor, query: Tensor, query_mask: Tensor | None, trace: Trace, noise: ClusterNoise, options: ClusterOptions
) -> ClusterInfo:
    """The clusters, and the certificate of the output."""
    source, pilots, (merge, virtual, _, factor) = trace
    scale = default_scale(query, options.scale)
    checks = draw_checks(noise.pilots, query_mask, options.num_pilots, options.num_checks)
    error, error_se = estimate_error(output, query, query_mask, source, checks, pilots, scale)
    log_weight = virtual.log_weights()
    return ClusterInfo(
        pilots.rows.marked(options.num_pilots),
        merge.assignment.where(source.log_weights() > -torch.inf, -1),
        F.pad(log_weight, (0, options.budget - log_weight.shape[-1]), value=-torch.inf),
        torch.zeros_like(error) if factor is None else factor[..., 0],
        error,
        error_se,
    )


def draw_cluster_noise(query: Tensor, key: Tensor, rand: Rand) -> ClusterNoise:
    """One number per query and per key."""
    return ClusterNoise(rand(query.shape[-2]), rand(key.shape[-2]))


def check_cluster_options(
    quality: Quality,
    budget: int | None,
    num_pilots: int | None,
    num_steps: int | None,
    first_order: bool,
    scale: float | None,
    num_checks: int,
) -> ClusterOptions:
    """The options, those of the quality where None is given, or an error that says which is wrong."""
    check_choice("quality", quality, tuple(QUALITIES))
    clusters, pilots, steps = QUALITIES[quality]
    clusters = clusters if budget is None else budget
    check_count("budget", clusters)
    pilots = min(pilots, clusters) if num_pilots is None else num_pilots
    steps = steps if num_steps is None else num_steps
    for name, count in (("num_pilots", pilots), ("num_checks", num_checks)):
        check_count(name, count)
    check_count("num_steps", steps, at_least=0)
    check_flag("first_order", first_order)
    if scale is not None:
        check_number("scale", scale, "a finite number, or None for 1/sqrt(p)")
    return ClusterOptions(clusters, pilots, steps, first_order, scale, num_checks)


class Cluster(Attention):
    """softmax(s Q K'^T + w') V' + a s (Q - mean q_J) C: attention over d weighted means of clusters of keys.

    `cluster_attention` as a module. P pilot rows J are computed exactly and written over the result (`num_pilots`).
    Centers are drawn by Eq. (5) of Chen et al. (2022) and moved by `num_steps` Lloyd steps over a sample of the keys;
    every key joins the nearest, in the metric of the queries. Means are weighted by the columns' mass in the pilot
    rows, and the log weights w' give each cluster its mass there. `first_order` adds the linear term: C is the
    covariance of keys and values within clusters, a in [0, 1] fits the pilots. `budget`, d, is the budget unless
    given; `quality` sets the rest: "fast" is 16 pilots, "accurate" 64, never more than d, and 1 step. `certify` also
    estimates the error. No parameters.
    Time O(n (d + P + p) p), memory O((n + d) p).
    """

    def __init__(
        self,
        *,
        head_dim: int,
        max_len: int | None = None,
        budget: int | None = None,
        seed: int | None = None,
        quality: Quality = "fast",
        num_pilots: int | None = None,
        num_steps: int | None = None,
        first_order: bool = True,
        scale: float | None = None,
    ) -> None:
        self_options = check_cluster_options(quality, budget, num_pilots, num_steps, first_order, scale, 32)
        super().__init__(head_dim=head_dim, max_len=max_len, budget=self_options.budget, seed=seed)
        self.options = self_options

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        return draw_cluster_noise(query, key, rand)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        noise: ClusterNoise,
    ) -> Tensor:
        return cluster_sketch(query, key, value, key_mask, query_mask, ClusterNoise(*noise), self.options)[0]

    def certify(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        noise: ClusterNoise | None = None,
        generator: torch.Generator | None = None,
        num_checks: int = 32,
    ) -> tuple[Tensor, ClusterInfo]:
        """What a call returns, and its estimated error: `cluster_attention` with return_info and these options."""
        settled = cast(ClusterNoise, self.settle(query, key, value, key_mask, query_mask, noise, generator)[1])
        options: dict[str, Any] = self.options._replace(num_checks=num_checks)._asdict()
        return cluster_attention(
            query,
            key,
            value,
            key_mask=key_mask,
            query_mask=query_mask,
            noise=settled,
            return_info=True,
            **options,
        )

    def extra_repr(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.options._asdict().items() if name != "num_checks")
        return f"head_dim={self.head_dim}, {shown}"


@overload
def cluster_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = ...,
    query_mask: Tensor | None = ...,
    quality: Quality = ...,
    budget: int | None = ...,
    num_pilots: int | None = ...,
    num_steps: int | None = ...,
    first_order: bool = ...,
    scale: float | None = ...,
    noise: ClusterNoise | None = ...,
    generator: torch.Generator | None = ...,
    return_info: Literal[False] = ...,
    num_checks: int = ...,
) -> Tensor: ...


@overload
def cluster_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = ...,
    query_mask: Tensor | None = ...,
    quality: Quality = ...,
    budget: int | None = ...,
    num_pilots: int | None = ...,
    num_steps: int | None = ...,
    first_order: bool = ...,
    scale: float | None = ...,
    noise: ClusterNoise | None = ...,
    generator: torch.Generator | None = ...,
    return_info: Literal[True],
    num_checks: int = ...,
) -> tuple[Tensor, ClusterInfo]: ...


def cluster_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    quality: Quality = "fast",
    budget: int | None = None,
    num_pilots: int | None = None,
    num_steps: int | None = None,
    first_order: bool = True,
    scale: float | None = None,
    noise: ClusterNoise | None = None,
    generator: torch.Generator | None = None,
    return_info: bool = False,
    num_checks: int = 32,
) -> Tensor | tuple[Tensor, ClusterInfo]:
    """softmax(s Q K^T) V approximated over `budget` weighted means of clusters of keys: (b, h, n, p_v).

    `quality` sets what is not given: "fast" is 16 clusters and 16 pilots, "accurate" 128 and 64 (pilots never more than
    clusters), both with 1 Lloyd step. With `return_info` the result is (output, ClusterInfo), the output the same to
    the bit; `num_checks` more rows are then computed to estimate its error. Clusters and their weights carry no
    gradient; all keys and values do, through the means, the linear term and the pilot rows. Exact where budget
    is at least the number of real keys.
    Time O(n (d + P + p) p) for P pilots, memory O((n + d) p).
    """
    options = check_cluster_options(quality, budget, num_pilots, num_steps, first_order, scale, num_checks)
    inputs = prepare(query, key, value, key_mask, query_mask)
    settled = settle_noise(draw_cluster_noise, inputs, noise, generator)
    with no_autocast(inputs.query.device):
        output, trace = cluster_sketch(*inputs, ClusterNoise(*settled), options)
        if return_info:
            info = describe(output, inputs.query, inputs.query_mask, trace, ClusterNoise(*settled), options)
    output = clear_padding(output, inputs.query_mask)
    return (output, info) if return_info else output
