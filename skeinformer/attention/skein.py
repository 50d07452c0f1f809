"""Skeinformer: Algorithm 1 of Chen et al. (2022), on virtual keys.

Line 8 fills every unselected entry of row i with the geometric mean of the selected ones. That mean is the score of
query i against the mean of the selected keys,

    g_i = (prod_k a_{i j'_k})^(1/d) = exp( mean_k s q_i . k_{j'_k} ) = exp( s q_i . mean_k k_{j'_k} ),

so lines 7 to 11 are softmax attention over d + 1 weighted keys: the selected ones, and one that stands for the rest,
with the mean of the selected keys, the mean of the unselected values and weight m - d. A softmax on the fused kernel:
safe at any logits, in any precision, without an n x d matrix, and exact when every real key is selected.

docs/distributed.md has the exchanges between ranks.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import NUM_CHECKS, Call, Trace, attend_once
from skeinformer.attention.certificate import Info
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.pilots import Pilots, compute_pilots
from skeinformer.attention.rows import masked_scores, places, top_of_all
from skeinformer.attention.sketch_method import Gradients, Sketch, SketchMethod
from skeinformer.attention.sketched import sketch_sampled_columns
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask
from skeinformer.checks import check_count
from skeinformer.kernels import steps_for
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import add_rows_, gather_rows
from skeinformer.noise import Rand, gumbel

Columns = Literal["importance", "uniform"]
RowNorm = Literal["adaptive", "simple", "none"]


class SkeinNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    pilots: Tensor  # (b, h, n): the largest are the pilots
    columns: Tensor  # (b, h, n_k): Gumbel noise of the columns; (b, h, d) where row_norm is "none"


class SkeinInfo(NamedTuple):
    """What was selected, and how far off the output is."""

    pilots: Tensor  # (b, h, num_pilots) row indices, -1 for an empty slot
    columns: Tensor  # (b, h, budget) column indices, -1 for an empty slot
    log_probability: Tensor  # (b, h, n_k) of Eq. (5), normalized; -inf for padding
    error: Tensor  # (b, h) estimated relative Frobenius error of the output
    error_se: Tensor  # (b, h) its standard error
    error_upper: Tensor  # (b, h) a bound of the error


class Skeinformer(SketchMethod):
    """softmax(s Q K^T) V from d of its columns: softmax over [K_J'; mean K_J'] with weights [1, ..., 1, m - d].

    Algorithm 1 of Chen et al. (2022). Selection carries no gradient; everything selected, the mean key and the mean
    value do. No parameters. Time O(n (d + P) p), memory O((n + d) p); `row_norm="none"` O(n^2 p).

    Args:
        budget: d, the number of columns J', drawn without replacement with p_i ~ (sum_J b_ji^2)^(1/2) |V_i|.
        num_pilots: P, the exact rows, by default as many as columns; on long sequences 32 are faster and about as good.
        columns: "importance" as above, or "uniform".
        row_norm: "adaptive" fills the other columns with the geometric mean of the selected ones, "simple" leaves them
            out, "none" is the unbiased D^-1 A S S^T V.
        reuse_pilots: Whether the pilot rows are written over the result.
    """

    budget: int = 256
    num_pilots: int | None = None
    columns: Columns = "importance"
    row_norm: RowNorm = "adaptive"
    reuse_pilots: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_pilots is None:
            object.__setattr__(self, "num_pilots", self.budget)
        check_count("num_pilots", self.num_pilots)

    @property
    def pilots_in_use(self) -> int:
        """How many pilot rows there are: none where nothing asks for them."""
        assert self.num_pilots is not None
        return self.num_pilots if self.reuse_pilots or self.columns == "importance" else 0

    def check_group(self) -> None:
        if self.row_norm == "none":
            what = "row_norm='none' is D^-1 A S S^T V with the exact D, of quadratic time, and takes no group"
            raise ValueError(f"{what}; choose row_norm='adaptive' or 'simple'")

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Draw one number for each query and key (for each sample, for the inverse CDF of Definition 1)."""
        pilots = rand(query.shape[-2])
        if self.row_norm == "none":
            return SkeinNoise(pilots, rand(self.budget, dtype=torch.float64))
        return SkeinNoise(pilots, rand(key.shape[-2]))

    def attend(self, inputs: Inputs, noise: Any) -> tuple[Tensor, Trace]:
        """Attend over the sketch; for `row_norm="none"` compute D^-1 A S S^T V with the exact D in O(n^2 p)."""
        if self.row_norm != "none":
            return super().attend(inputs, noise)
        pilots, log_probability = self.select_rows(inputs, noise)
        source = from_mask(*inputs[1:4])
        query, scale = inputs.query, inputs.scale
        output, columns = sketch_sampled_columns(query, source, log_probability, noise[1], self.budget, scale)
        if pilots is not None and self.reuse_pilots:
            dtype, index = pilots.output.dtype, pilots.rows.index
            wide = source._replace(keys=source.keys.to(dtype), values=source.values.to(dtype))
            rows = attend(gather_rows(query, index).to(dtype), wide, scale)  # with gradients
            output = output.scatter(-2, index[..., None].expand_as(rows), rows.to(output.dtype))
            pilots = pilots._replace(output=rows.detach())
        return output, Trace(pilots, (pilots, log_probability, columns))

    def select_rows(self, inputs: Inputs, noise: Any) -> tuple[Pilots | None, Tensor]:
        """Lines 1 to 4: pilot rows, where there are any, and log probabilities of the columns up to a constant."""
        query, key, value, key_mask, query_mask, scale, world = inputs
        dtype, pilots = statistics_dtype(query), None
        source = from_mask(key.to(dtype), value.to(dtype), key_mask)
        if not self.pilots_in_use:
            return None, source.log_weights()
        # lines 1 to 3: rows J, uniformly, and B_J V
        request = (masked_scores(noise[0], query_mask), self.pilots_in_use, query)
        n = world.num_queries(query.shape[-2])
        ((rows,), (queries,)) = top_of_all(world, "pilots", [request], n, masked=query_mask is not None)
        # line 4: Eq. (5)
        steps, queries = steps_for(query), queries.to(dtype)
        pilots, log_importance, _ = compute_pilots(rows, queries, source, scale, steps, world, with_mass=False)
        return pilots, log_importance if self.columns == "importance" else source.log_weights()

    def sketch(self, inputs: Inputs, noise: Any) -> tuple[Sketch, Trace]:
        """Algorithm 1 of Chen et al. (2022), line by line."""
        _, key, value, key_mask, _, _, world = inputs
        dtype, steps, n_k = statistics_dtype(key), steps_for(key), world.num_keys(key.shape[-2])
        # lines 1 to 4: pilot rows J, and how much they ask for each column
        pilots, log_probability = self.select_rows(inputs, noise)
        # lines 5 and 6: columns J'
        request = (log_probability + gumbel(noise[1]), self.budget, None)
        ((columns,), _) = top_of_all(world, "samples", [request], n_k, masked=key_mask is not None)
        # lines 7 to 11: softmax attention over the columns and what stands for the others
        parts = [columns.take(key).to(dtype), columns.take(value).to(dtype)]
        if self.row_norm == "adaptive":
            others = columns.are_chosen(key.shape[-2]).logical_not_()  # (b, h, n_k)
            others = (others if key_mask is None else others & key_mask).to(dtype)
            parts += [steps.weighted_row(value, others), others.sum(-1, keepdim=True)]
        if pilots is not None:
            parts.append(pilots.output)
        keys, values, *parts = world.sum("columns", *parts)
        live = columns.is_live()
        log_weight = torch.zeros_like(keys[..., 0]).where(live, -torch.inf)  # (b, h, d)
        share = mean_weight = None
        if self.row_norm == "adaptive":
            (rest, count), parts = parts[:2], parts[2:]
            share = live / live.sum(-1, keepdim=True).clamp(min=1).to(dtype)  # (b, h, d)
            each = 1 / count.clamp(min=1)  # (b, h, 1)
            mean_weight = others.mul_(each)
            keys = torch.cat([keys, share[..., None, :] @ keys], -2)
            values = torch.cat([values, rest * each[..., None]], -2)
            log_weight = torch.cat([log_weight, count.log()], -1)
        virtual = VirtualKeys(keys.to(key.dtype), values.to(value.dtype), log_weight)
        if pilots is not None:
            pilots = pilots._replace(queries=pilots.queries.to(key.dtype), output=parts[0].to(value.dtype))
        # line 12: the pilot rows are written over the result
        written = pilots if self.reuse_pilots else None
        sketch = Sketch(virtual, None, written, (columns.index, columns.here, share, mean_weight))
        return sketch, Trace(pilots, (pilots, log_probability, columns))

    def add_gradients_(
        self, sketch: Sketch, d_virtual: Gradients, key: Tensor, value: Tensor, d_key: Tensor, d_value: Tensor
    ) -> None:
        """Keys [K_J'; share K_J'] and values [V_J'; mean_weight V]: the last slot may be missing."""
        (index, here, share, mean_weight), (d_keys, d_values, _) = sketch.saved, d_virtual
        if share is not None and mean_weight is not None:
            d_keys, last = d_keys.tensor_split((-1,), -2)  # (b, h, d, p), (b, h, 1, p)
            d_keys = d_keys.addcmul(share[..., None], last)
            d_values, last = d_values.tensor_split((-1,), -2)
            if last.dtype == d_value.dtype:
                d_value.addcmul_(mean_weight[..., None], last)
            else:  # small shares and large sums meet in the wider precision
                d_value += (mean_weight[..., None] * last).to(d_value.dtype)
        for total, rows in ((d_key, d_keys), (d_value, d_values)):
            rows = rows if here is None else rows.where(here[..., None], 0)
            add_rows_(total, index, rows.to(total.dtype))

    def info(self, inputs: Inputs, trace: Trace, error: Info) -> SkeinInfo:
        pilots, log_probability, columns = trace.details
        world, key_mask = inputs.world, inputs.key_mask
        assert self.num_pilots is not None
        rows_request = [] if pilots is None else [(pilots.rows, world.query_start, self.num_pilots)]
        requests = [(columns, world.key_start, self.budget), *rows_request]
        column_places, *row_places = places(world, *requests)
        shape = (*column_places.shape[:2], self.num_pilots)
        rows = row_places[0] if row_places else column_places.new_full(shape, -1)
        # the largest is subtracted first: without a pilot all are so low that their differences would be lost
        largest = log_probability.amax(-1, keepdim=True).clamp(min=torch.finfo(log_probability.dtype).min)
        all_largest, sums = world.gather("total", largest, (log_probability - largest).exp().sum(-1, keepdim=True))
        largest = all_largest.amax(0)
        total = (sums * (all_largest - largest).exp()).sum(0)
        log_probability = log_probability - largest - total.log()
        if key_mask is not None:
            log_probability = log_probability.where(key_mask, -torch.inf)
        log_probability = log_probability[..., : world.keys_here(log_probability.shape[-1])]
        return SkeinInfo(rows, column_places, log_probability, *error)


def skein_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    budget: int = 256,
    num_pilots: int | None = None,
    columns: Columns = "importance",
    row_norm: RowNorm = "adaptive",
    reuse_pilots: bool = True,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
    noise: Noise | None = None,
    generator: torch.Generator | None = None,
    return_info: bool = False,
    num_checks: int = NUM_CHECKS,
    group: Any = None,
) -> Any:
    """Approximate softmax(s Q K^T) V from d of its columns: Algorithm 1 of Chen et al. (2022).

    Exact where d is at least the number of real keys. Time O(n (d + P) p), memory O((n + d) p).

    Args:
        query, key, value: (b, h, n, p), (b, h, n_k, p) and (b, h, n_k, p_v).
        budget, num_pilots, columns, row_norm, reuse_pilots: Options of `Skeinformer`.
        key_mask: (b, n_k), True where a key is real.
        query_mask: (b, n), True where a query is real; rows of other queries are zero.
        scale: s, 1/sqrt(p) by default.
        noise: A SkeinNoise, instead of drawing.
        generator: Where numbers are drawn from; torch's global state by default.
        return_info: Whether to return (output, SkeinInfo) with the estimated error; the output is the same.
        num_checks: How many rows are computed exactly to estimate the error.
        group: A ProcessGroup or a one-dimensional DeviceMesh whose ranks each pass, and get, a share of the tokens.

    Returns:
        The output, (b, h, n, p_v), or with `return_info` the output and a SkeinInfo.

    Raises:
        ValueError: Shapes, devices or values do not fit; the message names which.
        TypeError: An argument has the wrong type.

    Example:
        >>> output = skein_attention(q, k, v, budget=256, num_pilots=32)
    """
    options = (budget, num_pilots, columns, row_norm, reuse_pilots)
    call = Call(query, key, value, key_mask, query_mask, scale, None, noise, generator)
    return attend_once(Skeinformer, options, call, return_info, num_checks, group)
