"""Rows of a tensor by index, means of rows, and numbers near the ends of their range.

A tensor (..., n, p) whose rows are dense in memory is a list of rows, whatever the order of its other dimensions. On a
CPU and without gradients whole rows are copied several times faster than `gather` and `scatter` move their elements.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from skeinformer.kernels.choice import is_eager_cpu, needs_grad

LOWEST = -1e30  # a finite stand-in for -inf in float32: what is added to it, and its exp, are no NaN
MODERATE = 1e-12, 1e12  # squares of numbers between these, and sums of many, are in the range of float32
FEW = 2**17  # so many numbers are moved by `gather` and `scatter` before the list of rows is set up


def is_one_batch(x: Tensor) -> bool:
    """Whether (..., n, p) is (B, n, p) without a copy. Heads that lie beside each other in a row of tokens are not."""
    strides, shape = x.stride(), x.shape
    return all(strides[i] == strides[i + 1] * shape[i + 1] or shape[i] == 1 for i in range(x.dim() - 3))


def pieces(size: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of the tensors in pieces of their leading dimensions: at most `size` numbers of the first, or one head."""
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
    if listed := _list_of_rows(x, index):
        rows, row = listed
        return rows.index_select(0, row).view(*index.shape, x.shape[-1])
    return x.gather(-2, _per_element(index, x))


def write_rows_(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """x[..., index, :] = rows, in place: (..., n, p), (..., k), (..., k, p). The indices are distinct."""
    if listed := _list_of_rows(x, index):
        listed[0].index_copy_(0, listed[1], rows.reshape(-1, rows.shape[-1]))
        return x
    return x.scatter_(-2, _per_element(index, x), rows)


def add_rows_(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """x[..., index, :] += rows, in place."""
    if listed := _list_of_rows(x, index):
        listed[0].index_add_(0, listed[1], rows.reshape(-1, rows.shape[-1]))
        return x
    return x.scatter_add_(-2, _per_element(index, x), rows)


def _per_element(index: Tensor, x: Tensor) -> Tensor:
    return index[..., None].expand(*index.shape, x.shape[-1])  # (..., k, p)


def _list_of_rows(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor] | None:
    """The memory of x as rows (r, p), and where in it the rows `index` are; None where they are few or not dense."""
    p = x.shape[-1]
    if index.numel() * p < FEW or not p or needs_grad(x) or not is_eager_cpu(x):
        return None
    if x.stride(-1) != 1 or any(stride % p for stride in x.stride()[:-1]):
        return None
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
    return x.masked_fill(~mask[..., None], 0).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def is_moderate(largest: Tensor) -> bool:
    """Whether squares of numbers up to these are known to be in range; False on a device one would have to wait for."""
    if not is_eager_cpu(largest):
        return False
    low, high = largest.aminmax()
    return MODERATE[0] < low.item() and high.item() < MODERATE[1]


def moderate_unit(largest: Tensor) -> Tensor:
    """Return the unit in which numbers up to `largest` have squares: 1 where they are of moderate size already."""
    return largest.where((largest <= MODERATE[0]) | (largest >= MODERATE[1]), 1).where(largest > 0, 1)


def log_row_norms(x: Tensor, dtype: torch.dtype) -> Tensor:
    """log |x_i|, (..., n, p) -> (..., n), -inf for 0; squares are taken in units in which they are in range."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, dtype=dtype)
    largest = norm.amax(-1, keepdim=True)  # (..., 1)
    if is_moderate(largest):
        return norm.log_()
    x, moderate = x.to(dtype), (largest > MODERATE[0]) & (largest < MODERATE[1])
    unit = moderate_unit(x.abs().amax((-2, -1), keepdim=True)).where(~moderate[..., None], 1)  # (..., 1, 1)
    scaled: Tensor = torch.linalg.vector_norm(x / unit, dim=-1)
    return scaled.log() + unit[..., 0].log()


def narrow(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in another precision; a number beyond its range becomes its largest, where a cast would make it infinite."""
    return x if x.dtype == dtype else saturated(x, dtype).to(dtype)


def saturated(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x cut off at the largest numbers of a precision."""
    return x.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
