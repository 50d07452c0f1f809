"""Algorithm 1 over shares: what `skein.py` computes in one process, by five exchanges.

    shares     who holds how many tokens                                        gathered
    pilots     each rank's largest numbers of the noise, with their queries     gathered
    row sums   the logs of the pilot rows' sums                                 gathered
    samples    each rank's largest scores of columns                            gathered
    columns    the d columns, the sum of the other values, the pilot rows       summed

With `gradient="queries"` the keys that make its metric go with the second and the last, and the backward pass has four.
Without pilots the second and the third are left out.
"""

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.base import Trace
from skeinformer.attention.columns import ColumnMerge
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.pilots import column_mass, log_importance
from skeinformer.attention.selection import Selection
from skeinformer.attention.sharded.merge import SharedMerge, attend_shares
from skeinformer.attention.sharded.pilots import SharedPilots, count_here, find_pilots, total
from skeinformer.attention.sharded.queries import SharedQueries, offered_keys
from skeinformer.attention.sharded.trace import SharedTrace
from skeinformer.attention.virtual_keys import VirtualKeys, from_mask
from skeinformer.distributed.agreement import Shares
from skeinformer.distributed.collectives import gather_over, sum_over
from skeinformer.distributed.selection import Chosen, candidates, choose_rows, is_chosen, rows_here
from skeinformer.kernels.choice import known, recorded, statistics_dtype
from skeinformer.kernels.clusters import weighted_row
from skeinformer.kernels.merge import Virtual
from skeinformer.noise import gumbel

if TYPE_CHECKING:  # which import this file
    from skeinformer.attention.skein import SkeinNoise, SkeinOptions


class SharedColumns(NamedTuple):
    """The columns as a merge of this rank's keys: the other ranks' are not written to."""

    columns: Tensor  # (b, h, d), of local rows
    mine: Tensor  # (b, h, d)
    share: Tensor | None  # (b, h, d), of each chosen key in their mean, 0 where it is another rank's
    rest: Tensor | None  # (b, h, n_k), of each value here in the mean of the unchosen ones

    def add_gradients_(
        self, totals: tuple[Tensor | None, Tensor], key: Tensor, value: Tensor, virtual: Virtual, gradients: Virtual
    ) -> None:
        mine = self.mine if self.share is None else F.pad(self.mine, (0, 1), value=True)  # the last stands for the rest
        d_keys, d_values = (x.where(mine[..., None], 0) for x in gradients[:2])
        merge = ColumnMerge(self.columns, self.share, self.rest)
        merge.add_gradients_(totals, key, value, virtual, Virtual(d_keys, d_values, None))


def sharded_algorithm_1(
    inputs: Inputs, noise: "SkeinNoise", options: "SkeinOptions", shares: Shares
) -> tuple[Tensor, Trace]:
    """`algorithm_1` of this rank's queries, and attention over it."""
    key, budget, (of_queries, of_keys) = inputs.key, options.budget, noise
    source, scale = from_mask(key, inputs.value, inputs.key_mask), default_scale(key, options.scale)
    estimated = options.gradient == "queries" and shares.n_k > budget and recorded(key, inputs.value)
    with torch.no_grad():
        found = full = estimate = None
        if options.pilots:
            offers = [offered_keys(of_keys, key, inputs.key_mask, shares.n_k)] if estimated else []
            found = find_pilots(inputs, source, of_queries, options.pilots, offers, scale, shares)
        log_probability = source.log_weights()
        if found is not None and options.columns == "importance":
            log_probability = log_importance(found.pilots, source, scale, found.loudest)
        own = candidates(log_probability + gumbel(of_keys), min(budget, shares.n_k))
        scores, real = gather_over(shares.group, "samples", own.score, count_here(key, inputs.key_mask))
        columns = choose_rows(scores, own, shares.group.rank)
        with_rest = options.row_norm == "adaptive"
        merge, virtual, output, asked = find_columns(source, columns, total(real), found, with_rest, shares)
        if asked is not None and found is not None:
            mass, live = column_mass(found.pilots, source, scale), found.others[0].live
            others = shares.n - (found.pilots.queries.shape[-2] if options.reuse_pilots else 0)
            estimate = SharedQueries.of(of_queries, asked, live, mass, options.pilots, others, scale)
            few = found.keys <= budget  # (b, 1, 1)
            full = None if known(~few) else few[..., None]
    pilots = chosen = None
    if found is not None and output is not None:
        pilots, chosen = found.pilots._replace(output=output.to(inputs.value.dtype)), found.chosen
    merged = SharedMerge(merge, Virtual(*virtual[:2], None), virtual.log_weight, None, None, estimate)
    if options.reuse_pilots:
        merged = merged._replace(pilots=pilots, chosen=chosen)
    result = attend_shares(inputs.query, *source, merged, full, scale, shares.group)

    def finish(*chosen: Selection, log_total: Tensor) -> tuple[object, ...]:
        held = pilots if pilots is None else pilots._replace(rows=chosen[0])
        return held, log_probability[..., : shares.keys[shares.group.rank]], chosen[-1], log_total

    who = (columns,) if chosen is None else (chosen, columns)
    starts = (shares.of_keys.start,) if chosen is None else (shares.of_queries.start, shares.of_keys.start)
    return result, Trace(pilots, shared=SharedTrace(who, starts, finish, log_probability))


def find_columns(
    source: VirtualKeys, columns: Chosen, real: Tensor, found: SharedPilots | None, with_rest: bool, shares: Shares
) -> tuple[SharedColumns, VirtualKeys, Tensor | None, Tensor | None]:
    """Lines 5 to 10 of Algorithm 1 over the keys of all ranks; where there are pilots their rows over all keys.

    And the keys that were asked for beside, if any.
    """
    dtype, (keys, values, _) = statistics_dtype(source.keys), source
    left = ~is_chosen(columns, keys.shape[-2])  # (b, h, n_k)
    if source.log_weight is not None:
        left = left & (source.log_weight > -torch.inf)
    sums = [rows_here(keys, columns), rows_here(values, columns), weighted_row(values.to(dtype), left.to(dtype))]
    if found is not None:
        sums += [found.pilots.output, *(rows_here(keys, asked) for asked in found.others)]
    keys, values, rest, *more = sum_over(shares.group, "columns", *(x.to(dtype) for x in sums))
    keys, values = keys.to(source.keys.dtype), values.to(source.values.dtype)
    log_weight = torch.zeros_like(keys[..., 0], dtype=dtype).where(columns.live, -torch.inf)  # (b, h, d)
    merge = SharedColumns(columns.row, columns.mine, None, None)
    if with_rest:
        live = columns.live.sum(-1, keepdim=True)  # (b, h, 1)
        count = (real - live).to(dtype)  # unchosen keys of all ranks
        share = columns.live / live.clamp(min=1).to(dtype)  # (b, h, d)
        each = 1 / count.clamp(min=1)
        keys = torch.cat([keys, weighted_row(keys, share)], -2)
        values = torch.cat([values, (rest * each[..., None]).to(values.dtype)], -2)
        log_weight = torch.cat([log_weight, count.log()], -1)
        merge = merge._replace(share=share.where(columns.mine, 0), rest=left * each)
    output, asked = (*more, None, None)[:2]
    return merge, VirtualKeys(keys, values, log_weight), output, asked
