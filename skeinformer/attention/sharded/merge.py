"""Attention of a rank's queries over keys merged from all ranks, the exact rows written over it, and the gradient.

As in `kernels/merge.py`, by hand. Two sums over ranks are in it: virtual keys get gradients from the queries of all
ranks, and exact rows give theirs to the keys of all ranks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.pilots import Pilots
from skeinformer.attention.sharded.queries import SharedQueries, shared_query_gradients
from skeinformer.attention.sharded.rows import rows_backward, virtual_backward
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.distributed.collectives import noted, sum_over
from skeinformer.distributed.group import Group
from skeinformer.distributed.selection import Chosen, choose_rows, is_chosen, rows_here, write_rows_here
from skeinformer.kernels.choice import by_hand, own_backward, recorded, statistics_dtype
from skeinformer.kernels.fused import attend, attend_with_normalizer
from skeinformer.kernels.merge import Merge, Virtual
from skeinformer.kernels.rows import add_rows_


class SharedMerge(NamedTuple):
    """What stands for the keys and values of all ranks, the same on each; of the merge, this rank's part."""

    merge: Merge
    virtual: Virtual
    log_weight: Tensor | None  # (b, h, m')
    pilots: Pilots | None  # rows to be written over the output
    chosen: Chosen | None  # where they are
    estimate: SharedQueries | None = None


def attend_shares(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    merged: SharedMerge,
    full: Tensor | None,
    scale: float,
    group: Group,
) -> Tensor:
    """Attention over what stands for all keys: (b, h, n, p_v), with gradients for query, key and value."""
    if recorded(query, key, value):
        output: Tensor = _AttendShares.apply(query, key, value, log_weight, merged, full, scale, group)  # type: ignore[no-untyped-call]
        return output
    return _attend(query, value, merged, scale)[0]


def _attend(query: Tensor, value: Tensor, merged: SharedMerge, scale: float) -> tuple[Tensor, Tensor, Tensor | None]:
    """The output; attention over the virtual keys alone, and its normalizer where the kernel's gradient takes it."""
    keys, values, slope = merged.virtual
    normalizer = None
    if by_hand(query, value):
        attended, normalizer = attend_with_normalizer(query, keys, values, merged.log_weight, scale)
    else:
        attended = attend(query, keys, values, merged.log_weight, scale)
    output = attended if slope is None else attended + query @ slope.to(query.dtype)
    if merged.pilots is not None and merged.chosen is not None:
        output = write_rows_here(output, merged.chosen, merged.pilots.output)
    return output, attended, normalizer


class _AttendShares(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_weight: Tensor | None,
        merged: SharedMerge,
        full: Tensor | None,
        scale: float,
        group: Group,
    ) -> Tensor:
        merge, virtual, weight, pilots, chosen, estimate = merged
        output, attended, normalizer = _attend(query, value, merged, scale)
        rows = () if pilots is None or chosen is None else (*pilots[1:4], *chosen)
        estimating = () if estimate is None else estimate[:4]
        held = (query, key, value, log_weight, full, output, attended, normalizer, *virtual, weight)
        ctx.save_for_backward(*held, *rows, *estimating, *merge)  # all that was drawn too, for a checkpoint's sake
        ctx.counts, ctx.merge, ctx.scale, ctx.group = (len(rows), len(estimating)), type(merge), scale, group
        ctx.sizes = () if estimate is None else estimate[4:]
        return output

    @staticmethod
    @own_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with noted(ctx.group):
            return _gradients(ctx, gradient)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """Of query, key and value, and None for the rest."""
    query, key, value, log_weight, full, output, attended, normalizer, *rest = ctx.saved_tensors
    keys, values, slope, weight, *rest = rest
    rows, rest = rest[: ctx.counts[0]], rest[ctx.counts[0] :]
    estimating, drawn = rest[: ctx.counts[1]], rest[ctx.counts[1] :]
    merge, group, scale, dtype = ctx.merge(*drawn), ctx.group, ctx.scale, statistics_dtype(query)
    estimate = SharedQueries(*estimating, *ctx.sizes) if estimating else None
    chosen = Chosen(*rows[3:]) if rows else None

    of_others = gradient
    if chosen is not None:
        of_others = gradient.masked_fill(is_chosen(chosen, gradient.shape[-2])[..., None], 0)
    d_query, d_keys, d_values = virtual_backward(of_others, query, keys, values, weight, attended, normalizer, scale)
    sums = [d_keys, d_values]
    if slope is not None:
        wide = of_others.to(dtype)
        d_query += wide @ slope.to(dtype).mT
        sums.append(query.to(dtype).mT @ wide)
    if chosen is not None:
        sums.append(rows_here(gradient, chosen).to(dtype))
    offer = None
    if estimate is not None:
        offer = estimate.offer(of_others)
        sums += offer.slots(group)
    d_keys, d_values, *sums = sum_over(group, "gradients", *sums)
    d_slope = None if slope is None else sums.pop(0)

    # exact rows: their gradients for the keys here, and these keys' part of the gradient of the rows' queries
    d_key, d_value = torch.zeros_like(key, dtype=dtype), torch.zeros_like(value, dtype=dtype)
    parts = []
    if chosen is not None:
        queries, exact, log_sum = rows[:3]
        d_rows, d_key, d_value = rows_backward(sums.pop(0), queries, key, value, log_weight, exact, log_sum, scale)
        parts.append(d_rows)
    candidates = None
    if offer is not None:
        candidates = choose_rows(sums[0], offer.own, group.rank)
        parts += [rows_here(query, candidates).to(dtype), rows_here(offer.norm[..., None], candidates)]
    if parts:
        parts = sum_over(group, "rows", *parts)
    if chosen is not None:
        d_query = add_rows_(d_query, chosen.row, parts[0].where(chosen.mine[..., None], 0))

    if estimate is not None and offer is not None and candidates is not None:
        told = (parts[-2], parts[-1], sums[1].amax(0), query, VirtualKeys(key, value, log_weight), output, of_others)
        e_key, e_value = shared_query_gradients(estimate, offer, candidates, *told, full, scale, group)
        d_key, d_value = d_key + e_key, d_value + e_value
    if estimate is None or full is not None:
        gradients = Virtual(d_keys, d_values, d_slope).where(None if estimate is None else full)
        merge.add_gradients_((d_key, d_value), key, value, Virtual(keys, values, slope), gradients)
    return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), *[None] * 5
