"""Attention over merged keys with exact rows written over it, and its gradient by hand.

A Merge makes m' virtual keys and values out of n as fixed linear maps, K' = M_K K and V' = M_V V. The output

    R = softmax(s Q K'^T + w') V',   R_J = softmax(s Q_J K^T + w) V

has three cheap gradients: those of two calls of the fused kernel, and M^T applied to the first one's. Left to autograd
they meet in a dozen tensors of n rows that are filled, copied and added; by hand there are only the three results. The
rows J are kept out of the first call's gradient by a normalizer of +inf, which makes their weights zero.

A merge may also have a slope G, made of K and V: then R = softmax(s Q K'^T + w') V' + Q G, and G's gradient is Q^T dR.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skeinformer.attention.pilots import Pilots
from skeinformer.attention.virtual_keys import VirtualKeys, attend, attend_backward, attend_with_normalizer
from skeinformer.kernels.rows import batches, gather_rows, plain_cpu, write_rows_

MANY = 1 / 6  # from this share of pilots on, gathering the other rows is quicker than computing all


class Merge(Protocol):
    """M_K and M_V, drawn already: they carry no gradient. Tensors of shape (b, h, n, p) and (b, h, m', p).

    A NamedTuple of what was drawn: it is saved for the backward pass like every other tensor.
    """

    def __iter__(self) -> Iterator[Tensor | None]: ...

    def keys(self, key: Tensor) -> Tensor:
        """M_K K."""

    def values(self, value: Tensor) -> Tensor:
        """M_V V."""

    def add_key_gradient_(self, total: Tensor, gradient: Tensor) -> None:
        """total += M_K^T gradient."""

    def add_value_gradient_(self, total: Tensor, gradient: Tensor) -> None:
        """total += M_V^T gradient."""


class SlopedMerge(Merge, Protocol):
    """A merge with a slope, whose gradients meet in K and V."""

    def add_gradients_(
        self, totals: tuple[Tensor, Tensor], key: Tensor, value: Tensor, virtual: "Sloped", gradients: "Sloped"
    ) -> None:
        """totals += the gradients for K and V from those for virtual keys, virtual values and slope."""


class Sloped(NamedTuple):
    """Virtual keys, virtual values and slope, or the gradients for them."""

    keys: Tensor  # (b, h, m', p)
    values: Tensor  # (b, h, m', p_v)
    slope: Tensor  # (b, h, p, p_v)


def gradient_by_hand(query: Tensor, value: Tensor) -> bool:
    """Whether `attend_merged` takes its own gradient: on a CPU, outside of compiled graphs and function transforms."""
    return plain_cpu(query) and query.shape[-1] == value.shape[-1]


def attend_merged(
    query: Tensor,  # (b, h, n, p)
    source: VirtualKeys,
    merge: Merge,
    virtual: VirtualKeys,  # the merged keys and values
    pilots: Pilots | None,  # the rows to write over the result
    scale: float,
    slope: Tensor | None = None,  # (b, h, p, p_v), with a SlopedMerge
) -> Tensor:
    """Attention over `virtual` plus Q times `slope`, with the pilot rows written over it: (b, h, n, p_v).

    Where `gradient_by_hand` says so, gradients reach query, source.keys and source.values through `merge`, and
    `virtual`, `pilots` and `slope` are taken as constants; elsewhere they flow through those.
    """
    slope = None if slope is None else slope.to(query.dtype)
    if not gradient_by_hand(query, source.values):
        output = attend(query, virtual, scale)
        return write_rows(output if slope is None else output + query @ slope, pilots)
    inputs = (query, source.keys, source.values)
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in inputs):
        return _attend_others(query, virtual, pilots, scale, slope, in_place=True)[0]
    written = _AttendMerged.apply(*inputs, source.log_weight, merge, virtual, pilots, scale, slope)  # type: ignore[no-untyped-call]
    return cast(Tensor, written)


def write_rows(output: Tensor, pilots: Pilots | None) -> Tensor:
    """The pilot rows over a copy of `output`, line 12 of Algorithm 1."""
    if pilots is None:
        return output
    return output.scatter(-2, pilots.rows.indices[..., None].expand_as(pilots.output), pilots.output)


def _add_slope(output: Tensor, query: Tensor, slope: Tensor | None, result: Tensor) -> Tensor:
    """result = output + Q G, `result` may be `output`; output itself where there is no slope."""
    if slope is None:
        return output
    for each, q, g, written in batches(output, query, slope, result):
        torch.baddbmm(each, q, g, out=written)
    return result


class _Others(NamedTuple):
    """The rows that are not pilots and their attention over the virtual keys, or all rows where that is quicker.

    The output is without the slope: the kernel's gradient needs it so.
    """

    rows: Tensor | None  # (b, h, n - P), None for all
    query: Tensor  # (b, h, n - P, p)
    output: Tensor  # (b, h, n - P, p)
    normalizer: Tensor  # (b, h, n - P)


def _attend_others(
    query: Tensor, virtual: VirtualKeys, pilots: Pilots | None, scale: float, slope: Tensor | None, *, in_place: bool
) -> tuple[Tensor, _Others]:
    """The output, and what its gradient needs; in place the slope is added where the latter is."""
    n, num_pilots = query.shape[-2], 0 if pilots is None else pilots.queries.shape[-2]
    if pilots is None or num_pilots == n or num_pilots < MANY * n:
        others = _Others(None, query, *attend_with_normalizer(query, virtual, scale))
        output = _add_slope(others.output, query, slope, others.output if in_place else torch.empty_like(query))
    else:
        left = torch.ones_like(query[..., 0], dtype=torch.bool).scatter_(-1, pilots.rows.indices, False)  # (b, h, n)
        rows = left.nonzero()[:, -1].view(*query.shape[:2], n - num_pilots)
        chosen = gather_rows(query, rows)
        others = _Others(rows, chosen, *attend_with_normalizer(chosen, virtual, scale))
        sloped = _add_slope(others.output, chosen, slope, others.output if in_place else torch.empty_like(chosen))
        output = write_rows_(torch.empty_like(query), rows, sloped)
    if pilots is not None:
        write_rows_(output, pilots.rows.indices, pilots.output)
    return output, others


class _AttendMerged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_weight: Tensor | None,
        merge: Merge,
        virtual: VirtualKeys,
        pilots: Pilots | None,
        scale: float,
        slope: Tensor | None,
    ) -> Tensor:
        output, others = _attend_others(query, virtual, pilots, scale, slope, in_place=False)
        if pilots is not None and others.rows is None:
            others.normalizer.scatter_(-1, pilots.rows.indices, torch.inf)
        exact = () if pilots is None else (pilots.rows.indices, *pilots[1:4])
        # all that was drawn too: a checkpoint that draws anew would else mix two draws
        ctx.save_for_backward(key, value, log_weight, slope, *others, *virtual, *exact, *merge)
        ctx.merge, ctx.num_exact, ctx.scale = type(merge), len(exact), scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        key, value, log_weight, slope, rows, query, output, normalizer, *rest = ctx.saved_tensors
        virtual, pilots, drawn = VirtualKeys(*rest[:3]), rest[3 : 3 + ctx.num_exact], rest[3 + ctx.num_exact :]
        of_others = gradient if rows is None else gather_rows(gradient, rows)
        d_query, d_keys, d_values = attend_backward(of_others, query, virtual, output, normalizer, ctx.scale)
        if slope is not None:
            d_slope = torch.empty_like(slope)
            for dq, dr, g, q, dg in batches(d_query, of_others, slope, query, d_slope):
                dq.baddbmm_(dr, g.mT)
                torch.bmm(q.mT, dr, out=dg)
        if rows is not None:
            d_query = write_rows_(torch.empty_like(gradient, memory_format=torch.contiguous_format), rows, d_query)
        if pilots:
            indices, queries, exact, row_sum = pilots
            source, of_rows = VirtualKeys(key, value, log_weight), gather_rows(gradient, indices)
            d_pilots, d_key, d_value = attend_backward(of_rows, queries, source, exact, row_sum, ctx.scale)
            write_rows_(d_query, indices, d_pilots)
            if slope is not None and rows is None:
                d_slope -= queries.mT @ of_rows
        else:
            d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        merge = ctx.merge(*drawn)
        if slope is not None:
            held, gradients = Sloped(virtual.keys, virtual.values, slope), Sloped(d_keys, d_values, d_slope)
            merge.add_gradients_((d_key, d_value), key, value, held, gradients)
        else:
            merge.add_key_gradient_(d_key, d_keys)
            merge.add_value_gradient_(d_value, d_values)
        return d_query, d_key, d_value, None, None, None, None, None, None
