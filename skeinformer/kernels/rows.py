"""Rows of a tensor by index: read, written over, added to; and the mean of those that a mask marks.

A tensor (..., n, p) whose rows are dense in memory is a list of rows, whatever the order of its other dimensions, and
whole rows are copied several times faster than `gather` and `scatter` move their elements. These need a tensor at hand
on a CPU and no gradient; elsewhere `gather` and `scatter` do the same.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from skeinformer.kernels.choice import at_hand, fast_form, recorded


def is_one_batch(x: Tensor) -> bool:
    """Whether (..., n, p) is (B, n, p) without a copy. Heads that lie beside each other in a row of tokens are not."""
    leading = range(x.dim() - 3)
    return all(x.stride(dim) == x.stride(dim + 1) * x.shape[dim + 1] or x.shape[dim] == 1 for dim in leading)


def pieces(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the tensors in pieces of their leading dimensions, which they share.

    The first, (..., n, p), has at most `size` numbers in a piece, or is one head. A result for all heads would lie in
    fresh memory, which costs more than most sums over it; head by head short sequences cost as many calls.
    """
    first = tensors[0]
    if first.dim() > 3 and first[0].numel() > size:
        for example in zip(*(x.unbind(0) for x in tensors), strict=True):
            yield from pieces(size, *example)
    else:
        count = max(1, size // max(1, first[0].numel()))
        yield from zip(*(torch.split(x, count) for x in tensors), strict=True)


def batches(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views (B, n, p) of tensors (..., n, p): one of each where none needs a copy for it, else one per example."""
    if all(is_one_batch(x) for x in tensors):
        yield tuple(x.flatten(0, -3) for x in tensors)
    else:
        for example in zip(*(x.unbind(0) for x in tensors), strict=True):
            yield from batches(*example)


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows `index` of x: (..., n, p), (..., k) -> (..., k, p). Batch dimensions broadcast."""
    if x.shape[:-2] != index.shape[:-1]:
        batch = torch.broadcast_shapes(x.shape[:-2], index.shape[:-1])  # type: ignore[no-untyped-call]
        x, index = x.expand(*batch, *x.shape[-2:]), index.expand(*batch, -1)
    if _moves_whole_rows(x):
        rows, row = _list_of_rows(x, index)
        return rows.index_select(0, row).view(*index.shape, x.shape[-1])
    return x.gather(-2, _per_element(index, x))


def write_rows_(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """x[..., index, :] = rows, in place: (..., n, p), (..., k), (..., k, p). The indices are distinct."""
    if _moves_whole_rows(x):
        listed, row = _list_of_rows(x, index)
        listed.index_copy_(0, row, rows.reshape(-1, rows.shape[-1]))
        return x
    return x.scatter_(-2, _per_element(index, x), rows)


def add_rows_(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """x[..., index, :] += rows, in place."""
    if _moves_whole_rows(x):
        listed, row = _list_of_rows(x, index)
        listed.index_add_(0, row, rows.reshape(-1, rows.shape[-1]))
        return x
    return x.scatter_add_(-2, _per_element(index, x), rows)


def rows_left_by_rank(index: Tensor, n: int) -> Tensor:
    """`rows_left` as the first of all rows in order, the others after them."""
    taken = torch.zeros((*index.shape[:-1], n), dtype=torch.uint8, device=index.device).scatter_(-1, index, 1)
    return taken.argsort(dim=-1, stable=True)[..., : n - index.shape[-1]]


@fast_form(rows_left_by_rank)
def rows_left(index: Tensor, n: int) -> Tensor:
    """The rows of n that are not among distinct ones: (..., k) -> (..., n - k), in their order."""
    left = torch.ones((*index.shape[:-1], n), dtype=torch.bool, device=index.device).scatter_(-1, index, False)
    return left.nonzero()[:, -1].view(*index.shape[:-1], n - index.shape[-1])


def _per_element(index: Tensor, x: Tensor) -> Tensor:
    return index[..., None].expand(*index.shape, x.shape[-1])  # (..., k, p)


def _moves_whole_rows(x: Tensor) -> bool:
    if recorded(x) or not at_hand(x) or not x.shape[-1]:
        return False
    *strides, inner = x.stride()
    return inner == 1 and all(stride % x.shape[-1] == 0 for stride in strides)


def _list_of_rows(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """The memory of x as rows (r, p), and where in it the rows `index` are: (prod(index.shape),)."""
    p = x.shape[-1]
    *strides, inner = (stride // p for stride in x.stride()[:-1])  # in rows
    row = index * inner
    for dim, (extent, stride) in enumerate(zip(x.shape[:-2], strides, strict=True)):
        if extent > 1 and stride:
            row = row + torch.arange(0, extent * stride, stride).view(-1, *[1] * (index.dim() - dim - 1))
    last = sum((extent - 1) * stride for extent, stride in zip(x.shape[:-1], (*strides, inner), strict=True))
    return x.as_strided((last + 1, p), (p, 1)), row.reshape(-1)


def masked_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    """The mean of the real rows: (b, n, dim), (b, n) -> (b, dim); zeros where there is none."""
    if mask is None:
        return x.mean(1)
    total = x.masked_fill(~mask[..., None], 0).sum(1)
    return total / mask.sum(1, keepdim=True).clamp(min=1)
