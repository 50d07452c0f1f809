"""Attention over merged keys with exact rows written over it, and its gradient by hand.

A Merge makes m' virtual keys and values out of n as fixed linear maps, K' = M_K K and V' = M_V V. The output

    R = softmax(s Q K'^T + w') V',   R_J = softmax(s Q_J K^T + w) V

has three cheap gradients: those of two calls of the fused kernel, and M^T applied to the first one's. Left to autograd
they meet in a dozen tensors of n rows that are filled, copied and added; by hand there are only the three results. The
rows J are kept out of the first call's gradient by a normalizer of +inf, which makes their weights zero.

A merge may also have a slope G, made of K and V: then R = softmax(s Q K'^T + w') V' + Q G, and G's gradient is Q^T dR.

Where there is an Estimate, it gives K and V the gradients of exact attention, estimated, in place of the derivative of
R through the merge. Q's gradient is that of R.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from skeinformer.kernels.choice import by_hand, own_backward, recorded, statistics_dtype
from skeinformer.kernels.fused import (
    attend,
    attend_backward,
    attend_with_normalizer,
    virtual_gradients,
)
from skeinformer.kernels.queries import QueryRows, listed, mean_key
from skeinformer.kernels.row_gradients import gradients_by_pieces, takes_pieces
from skeinformer.kernels.rows import batches, gather_rows, rows_left, write_rows_

MANY = 1 / 6  # from this share of exact rows on, gathering the other rows is quicker than computing all


class Virtual(NamedTuple):
    """Virtual keys, virtual values and slope, or the gradients for them."""

    keys: Tensor  # (b, h, m', p)
    values: Tensor  # (b, h, m', p_v)
    slope: Tensor | None  # (b, h, p, p_v)

    def where(self, full: Tensor | None) -> "Virtual":
        """Zeros where not `full`; all of it for None."""
        if full is None:
            return self
        slope = None if self.slope is None else self.slope.masked_fill(~full, 0)
        return Virtual(self.keys.masked_fill(~full, 0), self.values.masked_fill(~full, 0), slope)


class Merge(Protocol):
    """M_K, M_V and the slope as functions of K and V, drawn already: they carry no gradient.

    A NamedTuple of what was drawn: it is saved for the backward pass like every other tensor.
    """

    def __iter__(self) -> Iterator[Tensor | None]: ...

    def add_gradients_(
        self, totals: tuple[Tensor | None, Tensor], key: Tensor, value: Tensor, virtual: Virtual, gradients: Virtual
    ) -> None:
        """totals += the gradients for K (unless None) and V from those for virtual keys, virtual values and slope."""


class Estimate(NamedTuple):
    """Gradients of exact attention for K and V: rows that stand for all queries, made in the backward pass."""

    rows: Callable[..., QueryRows]
    """(query, key, output, gradient, queries that count for nothing or None, *drawn but the last, size, scale)."""
    drawn: tuple[Tensor, ...]  # the first, (b, h, n), belongs to the queries; the last, (b, h, n_k), is the keys' mass
    size: int


class ExactRows(NamedTuple):
    """Rows J of the attention over all keys."""

    indices: Tensor  # (b, h, P)
    queries: Tensor  # (b, h, P, p)
    output: Tensor  # (b, h, P, p_v)
    normalizer: Tensor  # (b, h, P), the log of a row's sum


class Merged(NamedTuple):
    """What stands for all keys and values: attention over it, plus Q times the slope, the exact rows written over."""

    merge: Merge
    virtual: Virtual
    log_weight: Tensor | None  # (b, h, m')
    rows: ExactRows | None
    estimate: Estimate | None = None


class MergePlan(NamedTuple):
    """Merged attention that is still to be computed."""

    query: Tensor  # (b, h, n, p)
    key: Tensor  # (b, h, n_k, p)
    value: Tensor  # (b, h, n_k, p_v)
    log_weight: Tensor | None  # (b, h, n_k)
    make: Callable[[Tensor, Tensor], tuple[Merged, Any]]
    """What key and value are merged into, and what else there is to say of it."""
    scale: float
    estimated: bool = False
    """Whether `make` makes an Estimate of the gradients of key and value."""
    full: Tensor | None = None  # (b, 1, 1, 1)
    """Where R is exact and its derivative taken."""


def attend_merged(plan: MergePlan) -> tuple[Tensor, Any]:
    """Attention over what `make` makes of key and value, and what `make` says beside it: (b, h, n, p_v).

    Gradients reach query, key and value: by hand, from what was drawn, or else by autograd through `make`.
    """
    query, key, value, log_weight, make, scale, estimated, full = plan
    if not by_hand(query, value):
        made, said = make(*((where_full(key, full), where_full(value, full)) if estimated else (key, value)))
        output = attend(query, *made.virtual[:2], made.log_weight, scale)
        if made.virtual.slope is not None:
            output = output + _times_slope(query, made.virtual.slope)
        output = write_rows(output, made.rows)
        if made.estimate is not None and recorded(key, value):
            rows, drawn, size = made.estimate
            held = (query.detach(), log_weight, None if made.rows is None else made.rows.indices, full)
            output = AddGradient.apply(output, key, value, *held, rows, size, scale, *drawn)  # type: ignore[no-untyped-call]
        return output, said
    made, said = merged_of(plan)
    if not recorded(query, key, value):
        return attend_others(query, made, scale, in_place=True)[0], said
    output = _AttendMerged.apply(query, key, value, log_weight, made, full, scale)  # type: ignore[no-untyped-call]
    return output, said


@torch.no_grad()
def merged_of(plan: MergePlan) -> tuple[Merged, Any]:
    """What `make` makes of key and value, without their gradients."""
    made, said = plan.make(plan.key, plan.value)
    if made.virtual.slope is not None:
        made = made._replace(virtual=made.virtual._replace(slope=made.virtual.slope.to(plan.query.dtype)))
    return made, said


def where_full(x: Tensor, full: Tensor | None) -> Tensor:
    """The same tensor, through which a gradient flows only where `full`."""
    return x.detach() if full is None else torch.where(full, x, x.detach())


class AddGradient(torch.autograd.Function):
    """The output as it is; in the backward pass K and V get what is estimated for them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        output: Tensor,
        key: Tensor,
        value: Tensor,
        query: Tensor,
        log_weight: Tensor | None,
        indices: Tensor | None,
        full: Tensor | None,
        rows: Callable[..., QueryRows],
        size: int,
        scale: float,
        *drawn: Tensor,
    ) -> Tensor:
        return output.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.rows, ctx.size, ctx.scale = inputs[7:10]
        ctx.save_for_backward(*inputs[:7], *inputs[10:])

    @staticmethod
    @own_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        output, key, value, query, log_weight, indices, full, *drawn, mass = ctx.saved_tensors
        rows = ctx.rows(query, key, output, gradient, indices, *drawn, ctx.size, ctx.scale).where_not(full)
        d_key, d_value = rows.gradients(key, value, log_weight, mass, ctx.scale)
        return gradient, d_key.to(key.dtype), d_value.to(value.dtype), *[None] * (8 + len(drawn))


def write_rows(output: Tensor, rows: ExactRows | None) -> Tensor:
    """The exact rows over a copy of `output`, line 12 of Algorithm 1."""
    if rows is None:
        return output
    return output.scatter(-2, rows.indices[..., None].expand_as(rows.output), rows.output)


def _times_slope(query: Tensor, slope: Tensor) -> Tensor:
    """Q G. In float16 the gradient of G, a sum over all queries, leaves the range: a zero carries it in float32."""
    if query.dtype != torch.float16 or not recorded(slope):
        return query @ slope.to(query.dtype)
    wide = query.detach().float() @ slope
    return query @ slope.detach().to(query.dtype) + (wide - wide.detach()).to(query.dtype)


def _add_slope(output: Tensor, query: Tensor, slope: Tensor | None, result: Tensor) -> Tensor:
    """result = output + Q G, `result` may be `output`; output itself where there is no slope."""
    if slope is None:
        return output
    for each, q, g, written in batches(output, query, slope, result):
        torch.baddbmm(each, q, g, out=written)
    return result


class _Others(NamedTuple):
    """The rows that are not exact and their attention over the virtual keys, or all rows where that is quicker.

    The output is without the slope: the kernel's gradient needs it so.
    """

    rows: Tensor | None  # (b, h, n - P), None for all
    query: Tensor  # (b, h, n - P, p)
    output: Tensor  # (b, h, n - P, p)
    normalizer: Tensor  # (b, h, n - P)


def attend_others(query: Tensor, merged: Merged, scale: float, *, in_place: bool) -> tuple[Tensor, _Others]:
    """The output, and what its gradient needs; in place the slope is added where the latter is."""
    _, (keys, values, slope), weight, exact, _ = merged
    n, num_exact = query.shape[-2], 0 if exact is None else exact.queries.shape[-2]
    if exact is None or num_exact == n or num_exact < MANY * n:
        others = _Others(None, query, *attend_with_normalizer(query, keys, values, weight, scale))
        output = _add_slope(others.output, query, slope, others.output if in_place else torch.empty_like(query))
    else:
        rows = rows_left(exact.indices, n)
        chosen = gather_rows(query, rows)
        others = _Others(rows, chosen, *attend_with_normalizer(chosen, keys, values, weight, scale))
        sloped = _add_slope(others.output, chosen, slope, others.output if in_place else torch.empty_like(chosen))
        output = write_rows_(torch.empty_like(query), rows, sloped)
    if exact is not None:
        write_rows_(output, exact.indices, exact.output)
    return output, others


class Kept(NamedTuple):
    """What the backward pass needs beside its inputs, the output, the Merge and what the Estimate has drawn."""

    rows: Tensor | None  # (b, h, n - P), None for all
    query: Tensor | None  # (b, h, n - P, p), None where it is all of the query
    output: Tensor | None  # (b, h, n - P, p), None where it is that of the forward pass
    normalizer: Tensor  # (b, h, n - P), +inf for exact rows
    keys: Tensor  # (b, h, m', p)
    values: Tensor  # (b, h, m', p_v)
    slope: Tensor | None  # (b, h, p, p_v)
    weight: Tensor | None  # (b, h, m')
    indices: Tensor | None  # (b, h, P), None where no row is exact; so are the next three
    queries: Tensor | None  # (b, h, P, p)
    exact: Tensor | None  # (b, h, P, p_v)
    log_sum: Tensor | None  # (b, h, P)
    full: Tensor | None  # (b, 1, 1, 1)


def merged_forward(query: Tensor, merged: Merged, full: Tensor | None, scale: float) -> tuple[Tensor, Kept]:
    """The output by hand, without gradient, and what its gradient needs."""
    output, others = attend_others(query, merged, scale, in_place=False)
    exact = merged.rows
    if exact is not None and others.rows is None:
        others.normalizer.scatter_(-1, exact.indices, torch.inf)
    chosen = None if others.rows is None else others.query
    without_slope = None if others.output is output else others.output
    rows = (None, None, None, None) if exact is None else tuple(exact)
    kept = (others.rows, chosen, without_slope, others.normalizer, *merged.virtual, merged.log_weight, *rows, full)
    return output, Kept(*kept)


class Source(NamedTuple):
    """What the forward pass was given."""

    query: Tensor | None
    key: Tensor
    value: Tensor
    log_weight: Tensor | None


def merged_backward(
    gradient: Tensor,
    source: Source,
    output: Tensor | None,
    kept: Kept,
    merge: Merge,
    estimate: Estimate | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value. The query is not asked for where Kept has its own.

    Nor is the output, unless there is an Estimate of all rows.
    """
    _, key, value, log_weight = source
    rows, keys, values, slope, indices, full = kept.rows, kept.keys, kept.values, kept.slope, kept.indices, kept.full
    query = source.query if kept.query is None else kept.query
    attended = output if kept.output is None else kept.output
    assert query is not None
    assert attended is not None
    of_others = gradient if rows is None else gather_rows(gradient, rows)
    d_query, d_keys, d_values = virtual_gradients(
        of_others, query, keys, values, kept.weight, attended, kept.normalizer, scale
    )
    derived = estimate is None or full is not None  # whether K and V get the derivative of R, at least somewhere
    d_slope = None
    if slope is not None:
        if derived:
            d_slope = torch.empty_like(slope, dtype=statistics_dtype(slope))  # a sum over all queries
        for dq, dr, g, q, *dg in batches(d_query, of_others, slope, query, *listed(d_slope)):
            dq.baddbmm_(dr, g.mT)
            for result in dg:
                torch.bmm(q.to(result.dtype).mT, dr.to(result.dtype), out=result)
    if rows is not None:
        d_query = write_rows_(torch.empty_like(gradient, memory_format=torch.contiguous_format), rows, d_query)
    found = None
    if estimate is not None:
        u, *drawn, mass = estimate.drawn
        if rows is not None:
            u = u.gather(-1, rows)
        if rows is not None or output is None:
            output = _add_slope(attended, query, slope, torch.empty_like(attended))
        absent = indices if rows is None else None
        virtual = estimate.rows(query, key, output, of_others, absent, u, *drawn, estimate.size, scale)
        found = virtual.where_not(full), mass
    known = None
    if indices is not None and kept.queries is not None and kept.exact is not None and kept.log_sum is not None:
        known = ExactRows(indices, kept.queries, kept.exact, kept.log_sum)
    d_rows, d_key, d_value = given_to_keys(gradient, known, found, key, value, log_weight, scale)
    if known is not None and d_rows is not None:
        write_rows_(d_query, known.indices, d_rows)
        if d_slope is not None and rows is None:
            of_rows = gather_rows(gradient, known.indices)
            d_slope -= known.queries.to(d_slope.dtype).mT @ of_rows.to(d_slope.dtype)
    if derived:
        gradients = Virtual(d_keys, d_values, d_slope).where(None if estimate is None else full)
        merge.add_gradients_((d_key, d_value), key, value, Virtual(keys, values, slope), gradients)
    return d_query, d_key, d_value


def given_to_keys(
    gradient: Tensor,
    known: ExactRows | None,
    found: tuple[QueryRows, Tensor] | None,
    key: Tensor,
    value: Tensor,
    log_weight: Tensor | None,
    scale: float,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """What exact rows and virtual queries (with the mass of the keys) give to the former's queries, keys and values."""
    if known is None:
        if found is None:
            return None, torch.zeros_like(key), torch.zeros_like(value)
        d_key, d_value = found[0].gradients(key, value, log_weight, found[1], scale)
        return None, d_key.to(key.dtype), d_value.to(value.dtype)
    of_rows = gather_rows(gradient, known.indices)
    if found is not None and takes_pieces(found[0].queries, key):  # all rows in one go
        virtual, mass = found
        queries, asking = torch.cat([known.queries, virtual.queries], -2), known.queries.shape[-2]
        gradients = torch.cat([of_rows, virtual.gradient], -2)
        d_rows, *totals = gradients_by_pieces(queries, key, value, log_weight, gradients, scale, asking)
        virtual.add_missed_(totals, key, value, mass, mean_key(key, mass), scale)
        return d_rows, totals[0], totals[1]
    _, queries, output, normalizer = known
    d_rows, d_key, d_value = attend_backward(of_rows, queries, key, value, log_weight, output, normalizer, scale)
    if found is not None:
        parts = found[0].gradients(key, value, log_weight, found[1], scale)
        d_key, d_value = (part.add_(x).to(x.dtype) for part, x in zip(parts, (d_key, d_value), strict=True))
    return d_rows, d_key, d_value


class _AttendMerged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_weight: Tensor | None,
        merged: Merged,
        full: Tensor | None,
        scale: float,
    ) -> Tensor:
        output, kept = merged_forward(query, merged, full, scale)
        drawn = () if merged.estimate is None else merged.estimate.drawn
        # all that was drawn too: a checkpoint that draws anew would else mix two draws
        needed = kept.output is None or (merged.estimate is not None and kept.rows is None)
        whole = (query if kept.query is None else None, key, value, log_weight, output if needed else None)
        ctx.save_for_backward(*whole, *kept, *drawn, *merged.merge)
        ctx.merge, ctx.scale, ctx.num_drawn = type(merged.merge), scale, len(drawn)
        ctx.estimate = None if merged.estimate is None else merged.estimate._replace(drawn=())
        return output

    @staticmethod
    @own_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        (source, output), kept, rest = (saved[:4], saved[4]), saved[5 : 5 + SIZE], saved[5 + SIZE :]
        drawn, merge = rest[: ctx.num_drawn], ctx.merge(*rest[ctx.num_drawn :])
        estimate = None if ctx.estimate is None else ctx.estimate._replace(drawn=drawn)
        gradients = merged_backward(gradient, Source(*source), output, Kept(*kept), merge, estimate, ctx.scale)
        return *gradients, None, None, None, None


SIZE = len(Kept._fields)
