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

from skeinformer.attention.base import Attention, Trace, as_function
from skeinformer.attention.certificate import Info
from skeinformer.attention.columns import ColumnMerge, merge_columns
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.operation import OPERATIONS, Operation, as_operation
from skeinformer.attention.pilots import Pilots, column_mass, compute_pilots, log_importance
from skeinformer.attention.queries import Gradient, estimate_of, estimated_gradient, virtual_queries
from skeinformer.attention.selection import Selection, sample_without_replacement, uniform_rows
from skeinformer.attention.sharded.skein import UseOfPilots, sharded_algorithm_1
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask
from skeinformer.distributed.agreement import Shares
from skeinformer.distributed.group import Group
from skeinformer.kernels.choice import recorded, statistics_dtype
from skeinformer.kernels.merge import Merged, Plan, Virtual, attend_merged, write_rows
from skeinformer.kernels.ranges import narrow
from skeinformer.noise import Rand
from skeinformer.registry import check_choice, check_count, check_flag
from skeinformer.sketch.sampling import subsampling

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


def algorithm_1(inputs: Inputs, noise: SkeinNoise, options: SkeinOptions) -> tuple[Tensor, Trace]:
    """Algorithm 1 of Chen et al. (2022), line by line, on checked inputs."""
    selected: Selected
    if options.row_norm == "none":
        query, source, scale = inputs.query, from_mask(*inputs[1:4]), default_scale(inputs.query, options.scale)
        pilots, log_probability = rows_and_importance(inputs, source, noise, options, scale)
        output, columns = sketched_product(query, source, log_probability, noise[1], scale)
        output = write_rows(output, pilots.as_rows() if pilots is not None and options.reuse_pilots else None)
        selected = Selected(pilots, log_probability, columns)
    else:
        # lines 7 and 11: attention over the columns
        output, selected = attend_merged(plan_columns(inputs, noise, options, recorded(inputs.key, inputs.value)))
    return output, Trace(selected.pilots, selected)


def rows_and_importance(
    inputs: Inputs, source: VirtualKeys, noise: SkeinNoise, options: SkeinOptions, scale: float, with_mass: bool = False
) -> tuple[Pilots | None, Tensor]:
    """Lines 1 to 4: pilot rows, where there are any, and log probabilities of the columns up to a constant."""
    # lines 1 to 3: rows J, uniformly, and B_J V
    pilots = None
    if options.reuse_pilots or options.columns == "importance":
        assert options.num_pilots is not None
        rows = uniform_rows(noise[0], inputs.query_mask, options.num_pilots)
        pilots = compute_pilots(inputs.query, rows, source, scale, with_mass=with_mass)
    # line 4: Eq. (5)
    if pilots is not None and options.columns == "importance":
        return pilots, log_importance(pilots, source, scale)
    return pilots, source.log_weights()


def plan_columns(inputs: Inputs, noise: SkeinNoise, options: SkeinOptions, with_gradients: bool) -> Plan:
    """Everything but the attention over the columns; with_gradients: whether keys and values will ask for theirs."""
    _, key, value, key_mask, _ = inputs
    source, scale = from_mask(key, value, key_mask), default_scale(inputs.query, options.scale)
    estimated, full = estimated_gradient(options.gradient, key, key_mask, options.budget, with_gradients)

    def select(key: Tensor, value: Tensor) -> tuple[Merged, Selected]:
        pilots, log_probability = rows_and_importance(inputs, source, noise, options, scale, estimated)
        # lines 5 to 10: columns J', and what stands for the others
        columns = sample_without_replacement(log_probability, noise[1], options.budget)
        merge, virtual = merge_columns(source._replace(keys=key, values=value), columns, options.row_norm == "adaptive")
        # line 12: the pilot rows are known exactly
        rows = pilots.as_rows() if pilots is not None and options.reuse_pilots else None
        estimate = None
        if estimated:
            assert pilots is not None
            assert options.num_pilots is not None
            mass = column_mass(pilots, source, scale)
            estimate = virtual_queries(*noise, key_mask, mass, options.num_pilots, key.shape[-1])
        merged = Merged(merge, Virtual(virtual.keys, virtual.values, None), virtual.log_weight, rows, estimate)
        return merged, Selected(pilots, log_probability, columns)

    return Plan(inputs.query, *source, select, scale, estimated, full)


def sketched_product(
    query: Tensor, source: VirtualKeys, log_probability: Tensor, u: Tensor, scale: float
) -> tuple[Tensor, Selection]:
    """D^-1 A S S^T V with exact D and S of Definition 1: attention over the values S S^T V. Unbiased, O(n^2 p)."""
    dtype = statistics_dtype(query)  # the weights 1/(d p_i) overflow half precision
    n, d = source.keys.shape[-2], u.shape[-1]
    sketch = subsampling((u,), n, d, dtype=dtype, log_probability=log_probability)
    values = sketch.lift(sketch.apply(source.values.to(dtype)))  # (b, h, n_k, p_v)
    output = attend(query.to(dtype), VirtualKeys(source.keys.to(dtype), values, source.log_weight), scale)
    return narrow(output, query.dtype), Selection(sketch.index[..., 0], sketch.weight[..., 0] > 0)


class Skeinformer(Attention):
    """softmax(s Q K^T) V from d of its columns: softmax over [K_J'; mean K_J'] with weights [1, ..., 1, m - d].

    Algorithm 1 of Chen et al. (2022). P pilot rows are computed exactly (`num_pilots`, by default as many as columns;
    fewer are faster, and 32 are about as good on long sequences). Then d = `budget` columns J' are drawn without
    replacement with p_i ~ (sum_J b_ji^2)^(1/2) |V_i| (`columns`: "importance"). The others are filled with the
    geometric mean of those (`row_norm`: "adaptive"; "simple" leaves them out; "none" is the unbiased D^-1 A S S^T V).
    The pilot rows are written over the result (`reuse_pilots`). Selection carries no gradient; everything
    selected, the mean key and the mean value do. With `gradient` "queries" keys and values get an estimate of the
    gradient of exact attention instead, from the exact rows of P virtual queries or 32. No parameters.
    Time O(n (d + P) p), memory O((n + d) p); `row_norm="none"` O(n^2 p).
    """

    Options = SkeinOptions
    compute = staticmethod(algorithm_1)
    along = ("queries", "keys")

    @staticmethod
    def complete(options: SkeinOptions) -> SkeinOptions:
        if options.num_pilots is None:
            options = options._replace(num_pilots=options.budget)
        check_count("num_pilots", options.num_pilots)
        check_choice("columns", options.columns, ("importance", "uniform"))
        check_choice("row_norm", options.row_norm, ("adaptive", "simple", "none"))
        check_flag("reuse_pilots", options.reuse_pilots)
        check_choice("gradient", options.gradient, ("queries", "keys"))
        without_pilots = options.columns == "uniform" and not options.reuse_pilots
        if options.gradient == "queries" and (options.row_norm == "none" or without_pilots):
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
    def compute_shares(
        inputs: Inputs, noise: SkeinNoise, options: SkeinOptions, shares: Shares
    ) -> tuple[Tensor, Trace]:
        by_pilots = options.columns == "importance"
        pilots = options.num_pilots if by_pilots or options.reuse_pilots else None
        return sharded_algorithm_1(
            inputs,
            *noise,
            options.budget,
            UseOfPilots(pilots, by_pilots, options.reuse_pilots),
            with_rest=options.row_norm == "adaptive",
            from_queries=options.gradient == "queries",
            scale=default_scale(inputs.query, options.scale),
            shares=shares,
        )

    @staticmethod
    def draw(query: Tensor, key: Tensor, rand: Rand, options: SkeinOptions) -> SkeinNoise:
        """One number per query and per key (per sample, for the inverse CDF of Definition 1)."""
        pilots = rand(query.shape[-2])
        if options.row_norm == "none":
            return SkeinNoise(pilots, rand(options.budget, dtype=torch.float64))
        return SkeinNoise(pilots, rand(key.shape[-2]))

    @staticmethod
    def as_operation(inputs: Inputs, noise: SkeinNoise, options: SkeinOptions) -> Tensor | None:
        return None if options.row_norm == "none" else as_operation("skeinformer", inputs, noise, options)

    @staticmethod
    def describe(inputs: Inputs, trace: Trace, options: SkeinOptions, info: Info) -> SkeinInfo:
        pilots, log_probability, columns, log_total = trace.found
        assert options.num_pilots is not None
        if pilots is None:
            rows = columns.indices.new_full((*inputs.query.shape[:2], options.num_pilots), -1)
        else:
            rows = pilots.rows.marked(options.num_pilots)
        log_probability = log_probability.log_softmax(-1) if log_total is None else log_probability - log_total
        if inputs.key_mask is not None:
            log_probability = log_probability.where(inputs.key_mask, -torch.inf)
        return SkeinInfo(rows, columns.marked(options.budget), log_probability, *info)


OPERATIONS["skeinformer"] = Operation(
    SkeinOptions, plan_columns, ColumnMerge, len(ColumnMerge._fields), lambda options: estimate_of(options.num_pilots)
)
skein_attention = as_function(Skeinformer, SkeinInfo, "skein_attention")
