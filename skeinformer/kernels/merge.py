"""Attention over merged keys with exact rows written over it, and its gradient by hand.

A Merge makes m' virtual keys and values out of n as fixed linear maps, K' = M_K K and V' = M_V V. The output

    R = softmax(s Q K'^T + w') V',   R_J = softmax(s Q_J K^T + w) V

has three cheap gradients: those of two calls of the fused kernel, and M^T applied to the first one's. Left to autograd
they meet in a dozen tensors of n rows that are filled, copied and added; by hand there are only the three results. The
rows J are kept out of the first call's gradient by a normalizer of +inf, which makes their weights zero.

A merge may also have a slope G, made of K and V: then R = softmax(s Q K'^T + w') V' + Q G, and G's gradient is Q^T dR.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skeinformer.kernels.choice import at_hand, recorded
from skeinformer.kernels.fused import attend, attend_backward, attend_with_normalizer
from skeinformer.kernels.rows import batches, gather_rows, write_rows_

MANY = 1 / 6  # from this share of exact rows on, gathering the other rows is quicker than computing all
T = TypeVar("T")


class Virtual(NamedTuple):
    """Virtual keys, virtual values and slope, or the gradients for them."""

    keys: Tensor  # (b, h, m', p)
    values: Tensor  # (b, h, m', p_v)
    slope: Tensor | None  # (b, h, p, p_v)


class Merge(Protocol):
    """M_K, M_V and the slope as functions of K and V, drawn already: they carry no gradient.

    A NamedTuple of what was drawn: it is saved for the backward pass like every other tensor.
    """

    def __iter__(self) -> Iterator[Tensor | None]: ...

    def add_gradients_(
        self, totals: tuple[Tensor, Tensor], key: Tensor, value: Tensor, virtual: Virtual, gradients: Virtual
    ) -> None:
        """totals += the gradients for K and V from those for virtual keys, virtual values and slope."""


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


def attend_merged(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    value: Tensor,  # (b, h, n_k, p_v)
    log_weight: Tensor | None,  # (b, h, n_k)
    make: Callable[[], tuple[Merged, T]],
    scale: float,
) -> tuple[Tensor, T]:
    """Attention over what `make` makes of query, key and value, and what `make` says beside it: (b, h, n, p_v).

    Gradients reach query, key and value: by hand, from what was drawn, or else by autograd through `make`.
    """
    if not by_hand(query, value):
        (merge, virtual, weight, rows), said = make()
        output = attend(query, virtual.keys, virtual.values, weight, scale)
        if virtual.slope is not None:
            output = output + query @ virtual.slope.to(query.dtype)
        return write_rows(output, rows), said
    with torch.no_grad():
        (merge, virtual, weight, rows), said = make()
    if virtual.slope is not None:
        virtual = virtual._replace(slope=virtual.slope.to(query.dtype))
    if not recorded(query, key, value):
        return _attend_others(query, virtual, weight, rows, scale, in_place=True)[0], said
    written = _AttendMerged.apply(query, key, value, log_weight, Merged(merge, virtual, weight, rows), scale)  # type: ignore[no-untyped-call]
    return cast(Tensor, written), said


def by_hand(query: Tensor, value: Tensor) -> bool:
    """Whether `attend_merged` takes its own gradient: on a CPU, outside of compiled graphs and function transforms."""
    return at_hand(query) and query.shape[-1] == value.shape[-1]


def write_rows(output: Tensor, rows: ExactRows | None) -> Tensor:
    """The exact rows over a copy of `output`, line 12 of Algorithm 1."""
    if rows is None:
        return output
    return output.scatter(-2, rows.indices[..., None].expand_as(rows.output), rows.output)


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


def _attend_others(
    query: Tensor, virtual: Virtual, weight: Tensor | None, exact: ExactRows | None, scale: float, *, in_place: bool
) -> tuple[Tensor, _Others]:
    """The output, and what its gradient needs; in place the slope is added where the latter is."""
    keys, values, slope = virtual
    n, num_exact = query.shape[-2], 0 if exact is None else exact.queries.shape[-2]
    if exact is None or num_exact == n or num_exact < MANY * n:
        others = _Others(None, query, *attend_with_normalizer(query, keys, values, weight, scale))
        output = _add_slope(others.output, query, slope, others.output if in_place else torch.empty_like(query))
    else:
        left = torch.ones_like(query[..., 0], dtype=torch.bool).scatter_(-1, exact.indices, False)  # (b, h, n)
        rows = left.nonzero()[:, -1].view(*query.shape[:2], n - num_exact)
        chosen = gather_rows(query, rows)
        others = _Others(rows, chosen, *attend_with_normalizer(chosen, keys, values, weight, scale))
        sloped = _add_slope(others.output, chosen, slope, others.output if in_place else torch.empty_like(chosen))
        output = write_rows_(torch.empty_like(query), rows, sloped)
    if exact is not None:
        write_rows_(output, exact.indices, exact.output)
    return output, others


class _AttendMerged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, log_weight: Tensor | None, merged: Merged, scale: float
    ) -> Tensor:
        merge, virtual, weight, exact = merged
        output, others = _attend_others(query, virtual, weight, exact, scale, in_place=False)
        if exact is not None and others.rows is None:
            others.normalizer.scatter_(-1, exact.indices, torch.inf)
        rows = () if exact is None else tuple(exact)
        # all that was drawn too: a checkpoint that draws anew would else mix two draws
        ctx.save_for_backward(key, value, log_weight, *others, *virtual, weight, *rows, *merge)
        ctx.merge, ctx.num_exact, ctx.scale = type(merge), len(rows), scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        key, value, log_weight, rows, query, output, normalizer, keys, values, slope, weight, *rest = ctx.saved_tensors
        exact, drawn = rest[: ctx.num_exact], rest[ctx.num_exact :]
        of_others = gradient if rows is None else gather_rows(gradient, rows)
        d_query, d_keys, d_values = attend_backward(
            of_others, query, keys, values, weight, output, normalizer, ctx.scale
        )
        d_slope = None
        if slope is not None:
            d_slope = torch.empty_like(slope)
            for dq, dr, g, q, dg in batches(d_query, of_others, slope, query, d_slope):
                dq.baddbmm_(dr, g.mT)
                torch.bmm(q.mT, dr, out=dg)
        if rows is not None:
            d_query = write_rows_(torch.empty_like(gradient, memory_format=torch.contiguous_format), rows, d_query)
        if exact:
            indices, queries, exact_output, log_sum = exact
            of_rows = gather_rows(gradient, indices)
            d_rows, d_key, d_value = attend_backward(
                of_rows, queries, key, value, log_weight, exact_output, log_sum, ctx.scale
            )
            write_rows_(d_query, indices, d_rows)
            if d_slope is not None and rows is None:
                d_slope -= queries.mT @ of_rows
        else:
            d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
        virtual, gradients = Virtual(keys, values, slope), Virtual(d_keys, d_values, d_slope)
        ctx.merge(*drawn).add_gradients_((d_key, d_value), key, value, virtual, gradients)
        return d_query, d_key, d_value, None, None, None
