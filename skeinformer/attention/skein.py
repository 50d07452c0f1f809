"""Skeinformer: Algorithm 1 of Chen et al. (2022), on virtual keys.

Line 8 fills every unselected entry of row i with the geometric mean of the selected ones. That mean is the score of
query i against the mean of the selected keys,

    g_i = (prod_k a_{i j'_k})^(1/d) = exp( mean_k s q_i . k_{j'_k} ) = exp( s q_i . mean_k k_{j'_k} ),

so lines 7 to 11 are softmax attention over d + 1 weighted keys: the selected ones, and one that stands for the rest,
with the mean of the selected keys, the mean of the unselected values and weight m - d. A softmax on the fused kernel:
safe at any logits, in any precision, without an n x d matrix, and exact when every real key is selected.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, cast, overload

import torch
from torch import Tensor

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
from skeinformer.attention.columns import merge_columns
from skeinformer.attention.merge import attend_merged, gradient_by_hand, write_rows
from skeinformer.attention.pilots import (
    Pilots,
    Selection,
    compute_pilots,
    log_importance,
    sample_without_replacement,
    uniform_rows,
)
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask, statistics_dtype
from skeinformer.noise import Rand
from skeinformer.registry import check_choice, check_count, check_flag, check_number
from skeinformer.sketch.sampling import subsampling

Columns = Literal["importance", "uniform"]
RowNorm = Literal["adaptive", "simple", "none"]


class SkeinNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    pilots: Tensor  # (b, h, n): their ranks are the pilots, then the check rows
    columns: Tensor  # (b, h, n_k): Gumbel noise of the columns; (b, h, d) where row_norm is "none"


class SkeinInfo(NamedTuple):
    """What was selected, and how far off the output is."""

    pilots: Tensor  # (b, h, num_pilots) row indices, -1 for an empty slot
    columns: Tensor  # (b, h, budget) column indices, -1 for an empty slot
    log_probability: Tensor  # (b, h, n_k) of Eq. (5), normalized; -inf for padding
    error: Tensor  # (b, h) estimated relative Frobenius error of the output
    error_se: Tensor  # (b, h) its standard error


class SkeinOptions(NamedTuple):
    """What `skein_attention` is told beside its inputs."""

    budget: int
    num_pilots: int
    columns: Columns
    row_norm: RowNorm
    reuse_pilots: bool
    scale: float | None
    num_checks: int


class Trace(NamedTuple):
    """What Algorithm 1 had in hand on the way to its output."""

    source: VirtualKeys
    pilots: Pilots | None
    log_probability: Tensor  # (b, h, n_k), up to a constant
    chosen: Selection  # (b, h, d)


def algorithm_1(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    value: Tensor,  # (b, h, n_k, p_v)
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    noise: SkeinNoise,
    options: SkeinOptions,
) -> tuple[Tensor, Trace]:
    """Algorithm 1 of Chen et al. (2022), line by line, on checked inputs."""
    scale = default_scale(query, options.scale)
    source = from_mask(key, value, key_mask)
    sampled = options.row_norm == "none"
    with torch.set_grad_enabled(torch.is_grad_enabled() and (sampled or not gradient_by_hand(query, value))):
        # lines 1 to 3: rows J, uniformly, and B_J V
        pilots = None
        if options.reuse_pilots or options.columns == "importance":
            rows = uniform_rows(noise.pilots, query_mask, options.num_pilots)
            pilots = compute_pilots(query, rows, source, scale)
        # line 4: Eq. (5)
        log_probability = source.log_weights()
        if pilots is not None and options.columns == "importance":
            log_probability = log_importance(pilots, source, scale)
        if not sampled:
            # lines 5 to 10: columns J', and what stands for the others
            chosen = sample_without_replacement(log_probability, noise.columns, options.budget)
            merge, virtual = merge_columns(source, chosen, with_rest=options.row_norm == "adaptive")
    reused = pilots if options.reuse_pilots else None
    if sampled:
        output, chosen = sketched_product(query, source, log_probability, noise.columns, scale)
        output = write_rows(output, reused)
    else:
        # lines 7, 11 and 12: attention over the columns; the pilot rows are known exactly
        output = attend_merged(query, source, merge, virtual, reused, scale)
    return output, Trace(source, pilots, log_probability, chosen)


def sketched_product(
    query: Tensor, source: VirtualKeys, log_probability: Tensor, u: Tensor, scale: float
) -> tuple[Tensor, Selection]:
    """D^-1 A S S^T V with exact D and S of Definition 1: attention over the values S S^T V. Unbiased, O(n^2 p)."""
    dtype = statistics_dtype(query)  # the weights 1/(d p_i) overflow half precision
    n, d = source.keys.shape[-2], u.shape[-1]
    sketch = subsampling((u,), n, d, dtype=dtype, log_probability=log_probability)
    values = sketch.lift(sketch.apply(source.values.to(dtype)))  # (b, h, n_k, p_v)
    output = attend(query.to(dtype), VirtualKeys(source.keys.to(dtype), values, source.log_weight), scale)
    return output.to(query.dtype), Selection(sketch.index[..., 0], sketch.weight[..., 0] > 0)


def compress(pilot_queries: Tensor, source: VirtualKeys, d: int, u: Tensor, *, scale: float) -> VirtualKeys:
    """d + 1 slots that answer queries like the pilots almost as `source` does: lines 3 to 10 for any weighted set.

    u: uniform numbers (..., m), one per slot of the source. Attending to the result is exact where d >= live slots.
    """
    rows = torch.arange(pilot_queries.shape[-2], device=u.device).expand(pilot_queries.shape[:-1])
    pilots = compute_pilots(pilot_queries, Selection(rows, torch.ones_like(rows, dtype=torch.bool)), source, scale)
    chosen = sample_without_replacement(log_importance(pilots, source, scale), u, d)
    return merge_columns(source, chosen)[1]


@torch.no_grad()
def describe(
    output: Tensor, query: Tensor, query_mask: Tensor | None, trace: Trace, noise: SkeinNoise, options: SkeinOptions
) -> SkeinInfo:
    """What was selected, and the certificate of the output."""
    source, pilots, log_probability, chosen = trace
    num_pilots = 0 if pilots is None else options.num_pilots
    checks = draw_checks(noise.pilots, query_mask, num_pilots, options.num_checks)
    scale = default_scale(query, options.scale)
    error, error_se = estimate_error(output, query, query_mask, source, checks, pilots, scale)
    if pilots is None:
        pilot_rows = chosen.indices.new_full((*query.shape[:2], options.num_pilots), -1)
    else:
        pilot_rows = pilots.rows.marked(options.num_pilots)
    log_probability = log_probability.log_softmax(-1).where(source.log_weights() > -torch.inf, -torch.inf)
    return SkeinInfo(pilot_rows, chosen.marked(options.budget), log_probability, error, error_se)


def draw_skein_noise(options: SkeinOptions, query: Tensor, key: Tensor, rand: Rand) -> SkeinNoise:
    """Noise for `algorithm_1`: one number per query and per key (per sample, for the inverse CDF of Definition 1)."""
    pilots = rand(query.shape[-2])
    if options.row_norm == "none":
        return SkeinNoise(pilots, rand(options.budget, dtype=torch.float64))
    return SkeinNoise(pilots, rand(key.shape[-2]))


def check_skein_options(
    budget: int,
    num_pilots: int | None,
    columns: Columns,
    row_norm: RowNorm,
    reuse_pilots: bool,
    scale: float | None,
    num_checks: int,
) -> SkeinOptions:
    """The options, or an error that says which of them is wrong and what it may be."""
    num_pilots = budget if num_pilots is None else num_pilots
    for name, count in (("budget", budget), ("num_pilots", num_pilots), ("num_checks", num_checks)):
        check_count(name, count)
    check_choice("columns", columns, ("importance", "uniform"))
    check_choice("row_norm", row_norm, ("adaptive", "simple", "none"))
    check_flag("reuse_pilots", reuse_pilots)
    if scale is not None:
        check_number("scale", scale, "a finite number, or None for 1/sqrt(p)")
    return SkeinOptions(budget, num_pilots, columns, row_norm, reuse_pilots, scale, num_checks)


class Skeinformer(Attention):
    """softmax(s Q K^T) V from d of its columns: softmax over [K_J'; mean K_J'] with weights [1, ..., 1, m - d].

    Algorithm 1 of Chen et al. (2022), as `skein_attention`: P pilot rows are computed exactly (`num_pilots`, by default
    as many as samples), d columns J' are drawn without replacement with p_i ~ (sum_J b_ji^2)^(1/2) |V_i|, the others
    are filled with the geometric mean of those (`row_norm`: "adaptive"; "simple" leaves them out; "none" is
    D^-1 A S S^T V), and the pilot rows are written over the result (`reuse_pilots`). `budget`, d, is the budget
    unless given. `certify` also estimates the error. No parameters.
    Time O(n (d + P) p), memory O((n + d) p); `row_norm="none"` O(n^2 p).
    """

    def __init__(
        self,
        *,
        head_dim: int,
        max_len: int | None = None,
        budget: int = 256,
        seed: int | None = None,
        num_pilots: int | None = None,
        columns: Columns = "importance",
        row_norm: RowNorm = "adaptive",
        reuse_pilots: bool = True,
        scale: float | None = None,
    ) -> None:
        super().__init__(head_dim=head_dim, max_len=max_len, budget=budget, seed=seed)
        self.options = check_skein_options(budget, num_pilots, columns, row_norm, reuse_pilots, scale, 32)

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        return draw_skein_noise(self.options, query, key, rand)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        noise: SkeinNoise,
    ) -> Tensor:
        return algorithm_1(query, key, value, key_mask, query_mask, SkeinNoise(*noise), self.options)[0]

    def certify(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        noise: SkeinNoise | None = None,
        generator: torch.Generator | None = None,
        num_checks: int = 32,
    ) -> tuple[Tensor, SkeinInfo]:
        """What a call returns, and its estimated error: `skein_attention(..., return_info=True)` with these options."""
        settled = cast(SkeinNoise, self.settle(query, key, value, key_mask, query_mask, noise, generator)[1])
        options: dict[str, Any] = self.options._replace(num_checks=num_checks)._asdict()
        return skein_attention(
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
def skein_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = ...,
    query_mask: Tensor | None = ...,
    budget: int = ...,
    num_pilots: int | None = ...,
    columns: Columns = ...,
    row_norm: RowNorm = ...,
    reuse_pilots: bool = ...,
    scale: float | None = ...,
    noise: SkeinNoise | None = ...,
    generator: torch.Generator | None = ...,
    return_info: Literal[False] = ...,
    num_checks: int = ...,
) -> Tensor: ...


@overload
def skein_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = ...,
    query_mask: Tensor | None = ...,
    budget: int = ...,
    num_pilots: int | None = ...,
    columns: Columns = ...,
    row_norm: RowNorm = ...,
    reuse_pilots: bool = ...,
    scale: float | None = ...,
    noise: SkeinNoise | None = ...,
    generator: torch.Generator | None = ...,
    return_info: Literal[True],
    num_checks: int = ...,
) -> tuple[Tensor, SkeinInfo]: ...


def skein_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    budget: int = 256,
    num_pilots: int | None = None,
    columns: Columns = "importance",
    row_norm: RowNorm = "adaptive",
    reuse_pilots: bool = True,
    scale: float | None = None,
    noise: SkeinNoise | None = None,
    generator: torch.Generator | None = None,
    return_info: bool = False,
    num_checks: int = 32,
) -> Tensor | tuple[Tensor, SkeinInfo]:
    """softmax(s Q K^T) V approximated by `budget` of its columns: (b, h, n, p_v).

    Algorithm 1 of Chen et al. (2022). With `return_info` the result is (output, SkeinInfo), the output the same to the
    bit; `num_checks` more rows are then computed to estimate its error. `num_pilots` defaults to `budget`, as in
    the paper; fewer are faster, and 32 are about as good on long sequences. `row_norm="none"` is the unbiased
    D^-1 A S S^T V with exact D, in quadratic time. Selection carries no gradient; everything selected, the mean key and
    the mean value do.
    Time O(n (d + P) p) for P pilots, memory O((n + d) p).
    """
    options = check_skein_options(budget, num_pilots, columns, row_norm, reuse_pilots, scale, num_checks)
    inputs = prepare(query, key, value, key_mask, query_mask)
    settled = settle_noise(partial(draw_skein_noise, options), inputs, noise, generator)
    with no_autocast(inputs.query.device):
        output, trace = algorithm_1(*inputs, SkeinNoise(*settled), options)
        if return_info:
            info = describe(output, inputs.query, inputs.query_mask, trace, SkeinNoise(*settled), options)
    output = clear_padding(output, inputs.query_mask)
    return (output, info) if return_info else output
