"""Skeinformer: Algorithm 1 of Chen et al. (2022), on virtual keys.

Line 8 fills every unselected entry of row i with the geometric mean of the selected ones. That mean is the score of
query i against the mean of the selected keys,

    g_i = (prod_k a_{i j'_k})^(1/d) = exp( mean_k s q_i . k_{j'_k} ) = exp( s q_i . mean_k k_{j'_k} ),

so lines 7 to 11 are softmax attention over d + 1 weighted keys: the selected ones, and one that stands for the rest,
with the mean of the selected keys, the mean of the unselected values and weight m - d. A softmax on the fused kernel:
safe at any logits, in any precision, without an n x d matrix, and exact when every real key is selected.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import Trace, as_function
from skeinformer.attention.certificate import Info
from skeinformer.attention.columns import ColumnMerge, merge_columns
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.merged import MergedAttention, MergedKeys, ToMerge
from skeinformer.attention.pilots import Pilots, column_mass, compute_pilots, log_importance
from skeinformer.attention.queries import Gradient
from skeinformer.attention.selection import Selection, sample_without_replacement, uniform_rows
from skeinformer.attention.sharded.skein import sharded_algorithm_1
from skeinformer.attention.sketched import sketch_sampled_columns
from skeinformer.attention.virtual_keys import from_mask
from skeinformer.distributed.group import Group
from skeinformer.kernels.merge import write_rows
from skeinformer.noise import Rand
from skeinformer.registry import check_count

Columns = Literal["importance", "uniform"]
RowNorm = Literal["adaptive", "simple", "none"]


class SkeinOptions(NamedTuple):
    """What Algorithm 1 is told beside its inputs."""

    budget: int = 256
    num_pilots: int | None = None
    columns: Columns = "importance"
    row_norm: RowNorm = "adaptive"
    reuse_pilots: bool = True
    gradient: Gradient = "keys"
    scale: float | None = None

    @property
    def pilots(self) -> int:
        """How many pilot rows there are: none where nothing asks for them."""
        wanted = self.budget if self.num_pilots is None else self.num_pilots
        return wanted if self.reuse_pilots or self.columns == "importance" else 0


class SkeinNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    pilots: Tensor  # (b, h, n): their first ranks are the pilots
    columns: Tensor  # (b, h, n_k): Gumbel noise of the columns; (b, h, d) where row_norm is "none"


class SkeinInfo(NamedTuple):
    """What was selected, and how far off the output is."""

    pilots: Tensor  # (b, h, num_pilots) row indices, -1 for an empty slot
    columns: Tensor  # (b, h, budget) column indices, -1 for an empty slot
    log_probability: Tensor  # (b, h, n_k) of Eq. (5), normalized; -inf for padding
    error: Tensor  # (b, h) estimated relative Frobenius error of the output
    error_se: Tensor  # (b, h) its standard error
    error_upper: Tensor  # (b, h) a bound of the error


class Selected(NamedTuple):
    """What Algorithm 1 selected."""

    pilots: Pilots | None
    log_probability: Tensor  # (b, h, n_k), up to a constant
    columns: Selection  # (b, h, d)
    log_total: Tensor | None = None  # (b, h, 1), the log of its sum over all keys; None where these are all


def algorithm_1(given: ToMerge, noise: SkeinNoise, options: SkeinOptions) -> MergedKeys:
    """Algorithm 1 of Chen et al. (2022), line by line."""
    source, scale = given.source, given.scale
    # lines 1 to 4: pilot rows J, and how much they ask for each column
    pilots, log_probability = rows_and_importance(given, noise, options)
    # lines 5 and 6: columns J'
    columns = sample_without_replacement(log_probability, noise.columns, options.budget)
    # lines 7 to 11: softmax attention over the columns and what stands for the others
    merge, virtual = merge_columns(given.through, columns, with_rest=options.row_norm == "adaptive")
    mass = column_mass(pilots, source, scale) if pilots is not None and given.with_mass else None
    # line 12: the pilot rows are written over the result
    found = Selected(pilots, log_probability, columns)
    return MergedKeys(merge, virtual, found, pilots, write_pilots=options.reuse_pilots, mass=mass)


def rows_and_importance(given: ToMerge, noise: SkeinNoise, options: SkeinOptions) -> tuple[Pilots | None, Tensor]:
    """Lines 1 to 4: pilot rows, where there are any, and log probabilities of the columns up to a constant."""
    query, source, scale, pilots = given.query, given.source, given.scale, None
    # lines 1 to 3: rows J, uniformly, and B_J V
    if options.pilots:
        rows = uniform_rows(noise.pilots, given.query_mask, options.pilots)
        pilots = compute_pilots(query, rows, source, scale, with_mass=given.with_mass)
    # line 4: Eq. (5)
    if pilots is not None and options.columns == "importance":
        return pilots, log_importance(pilots, source, scale)
    return pilots, source.log_weights()


class Skeinformer(MergedAttention):
    """softmax(s Q K^T) V from d of its columns: softmax over [K_J'; mean K_J'] with weights [1, ..., 1, m - d].

    Algorithm 1 of Chen et al. (2022). P pilot rows are computed exactly (`num_pilots`, by default as many as columns;
    fewer are faster, and 32 are about as good on long sequences). Then d = `budget` columns J' are drawn without
    replacement with p_i ~ (sum_J b_ji^2)^(1/2) |V_i| (`columns`: "importance"). The others are filled with the
    geometric mean of those (`row_norm`: "adaptive"; "simple" leaves them out; "none" is the unbiased D^-1 A S S^T V).
    The pilot rows are written over the result (`reuse_pilots`). Selection carries no gradient; everything selected, the
    mean key and the mean value do: that is `gradient` "keys", the default. With "queries" keys and values get an
    estimate of the gradient of exact attention instead, from the exact rows of 7 P / 8 virtual queries (20 or more).
    No parameters.
    Time O(n (d + P) p), memory O((n + d) p); `row_norm="none"` O(n^2 p).
    """

    Options, Noise, Merge = SkeinOptions, SkeinNoise, ColumnMerge
    merge_keys = staticmethod(algorithm_1)
    compute_shares = staticmethod(sharded_algorithm_1)

    @staticmethod
    def complete(options: SkeinOptions) -> SkeinOptions:
        if options.num_pilots is None:
            options = options._replace(num_pilots=options.budget)
        check_count("num_pilots", options.num_pilots)
        if options.gradient == "queries" and (options.row_norm == "none" or not options.pilots):
            raise ValueError(
                'gradient="queries" needs pilot rows and a row normalization: set columns="importance" or '
                'reuse_pilots=True, and row_norm="adaptive" or "simple"; or set gradient="keys"'
            )
        return options

    @classmethod
    def accept(cls, group: Any, options: SkeinOptions) -> Group:
        if options.row_norm == "none":
            raise ValueError(
                "row_norm='none' is D^-1 A S S^T V with the exact D, of quadratic time, and takes no group; choose "
                "row_norm='adaptive' or 'simple'"
            )
        return super().accept(group, options)

    @staticmethod
    def num_virtual_queries(options: SkeinOptions) -> int:
        return options.pilots

    @classmethod
    def draw(cls, query: Tensor, key: Tensor, rand: Rand, options: SkeinOptions) -> SkeinNoise:
        """One number per query and per key (per sample, for the inverse CDF of Definition 1)."""
        pilots = rand(query.shape[-2])
        if options.row_norm == "none":
            return SkeinNoise(pilots, rand(options.budget, dtype=torch.float64))
        return SkeinNoise(pilots, rand(key.shape[-2]))

    @classmethod
    def compute(cls, inputs: Inputs, noise: Any, options: SkeinOptions) -> tuple[Tensor, Trace]:
        """Attention over what `algorithm_1` makes; for `row_norm="none"` D^-1 A S S^T V with the exact D. O(n^2 p)."""
        if options.row_norm != "none":
            return super().compute(inputs, noise, options)
        query, source, scale = inputs.query, from_mask(*inputs[1:4]), default_scale(inputs.query, options.scale)
        given, u = ToMerge(query, source, source, inputs.query_mask, scale, with_mass=False), noise[1]
        pilots, log_probability = rows_and_importance(given, SkeinNoise(*noise), options)
        output, columns = sketch_sampled_columns(query, source, log_probability, u, options.budget, scale)
        if pilots is not None and options.reuse_pilots:
            output = write_rows(output, pilots.as_rows())
        return output, Trace(pilots, Selected(pilots, log_probability, columns))

    @classmethod
    def as_operation(cls, inputs: Inputs, noise: Any, options: SkeinOptions) -> Tensor | None:
        return None if options.row_norm == "none" else super().as_operation(inputs, noise, options)

    @staticmethod
    def describe(inputs: Inputs, trace: Trace, options: SkeinOptions, info: Info) -> SkeinInfo:
        pilots, log_probability, columns, log_total = trace.found
        none = columns.indices.new_full((*inputs.query.shape[:2], options.num_pilots or options.budget), -1)
        rows = none if pilots is None else pilots.rows.marked(none.shape[-1])
        log_probability = log_probability.log_softmax(-1) if log_total is None else log_probability - log_total
        if inputs.key_mask is not None:
            log_probability = log_probability.where(inputs.key_mask, -torch.inf)
        return SkeinInfo(rows, columns.marked(options.budget), log_probability, *info)


skein_attention = as_function(Skeinformer, SkeinInfo, "skein_attention")
