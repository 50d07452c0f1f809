"""Shares of a sequence: contiguous, in the order of ranks, of any lengths. `shard` divides, `gather` puts together."""

import hashlib
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from skeinformer.distributed.agreement import agree, told
from skeinformer.distributed.collectives import gathered, outside_of_graphs, sum_over, summed
from skeinformer.distributed.group import Group
from skeinformer.kernels.choice import statistics_dtype

SHAPES = "shapes"  # the exchange before a sum


def share_lengths(n: int, ranks: int) -> tuple[int, ...]:
    """n tokens over so many ranks, as evenly as it goes: the first have one more."""
    return tuple(n // ranks + (rank < n % ranks) for rank in range(ranks))


@overload
def shard(tensor: Tensor, /, *, group: Any, dim: int = 1, lengths: Sequence[int] | None = None) -> Tensor: ...


@overload
def shard(
    tensor: Tensor | None,
    /,
    *more: Tensor | None,
    group: Any,
    dim: int = 1,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor | None, ...]: ...


def shard(*tensors: Tensor | None, group: Any, dim: int = 1, lengths: Sequence[int] | None = None) -> Any:
    """This rank's share of each tensor, along its tokens: token ids, masks, labels, position ids.

    Every rank gives the whole tensors; None stays None. One small exchange makes sure that they are the same on all
    ranks. lengths: of the shares, in the order of ranks, where they are not to be as equal as possible; 0 is possible.
    """
    shares = _shares(tensors, Group.of(group), dim, None if lengths is None else tuple(lengths))
    return shares[0] if len(shares) == 1 else tuple(shares)


@outside_of_graphs
def _shares(
    tensors: Sequence[Tensor | None], group: Group, dim: int, lengths: tuple[int, ...] | None
) -> list[Tensor | None]:
    """Where tensors differ between ranks, all ranks raise and say which and how."""
    with told(group, "shard"):
        shares = [None if x is None else _share(x, group, dim, lengths) for x in tensors]
        facts = {f"tensor {i}": _described(x) for i, x in enumerate(tensors)}
    hint = "Every rank gives shard the whole tensors, and the same ones: load the same batch on all ranks of the group"
    agree(group, {**facts, "dim": dim, "lengths": lengths}, step="shard", hint=hint)
    return shares


def _share(x: Tensor, group: Group, dim: int, lengths: tuple[int, ...] | None) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"shard divides tensors, got {type(x).__name__}; make one with torch.as_tensor")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no dim={dim} along which its tokens could be divided")
    n = x.shape[dim]
    own = share_lengths(n, group.size) if lengths is None else lengths
    if len(own) != group.size or any(type(each) is not int for each in own) or sum(own) != n or min(own) < 0:
        raise ValueError(
            f"lengths={own} must be one whole number for each of {group.size} ranks and sum to the {n} tokens of "
            f"{tuple(x.shape)} along dim={dim}"
        )
    return x.narrow(dim, sum(own[: group.rank]), own[group.rank]).clone()  # a view would keep all of x


def _described(x: Tensor | None) -> str:
    if x is None:
        return "None"
    held = x.detach().cpu().contiguous()
    digest = hashlib.blake2b(held.view(-1).view(torch.uint8).numpy().data, digest_size=4).hexdigest()
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} with checksum {digest}"


def gather(x: Tensor, group: Any, *, dim: int = 1) -> Tensor:
    """The whole of which every rank holds a share along `dim`, on all ranks, with gradients."""
    group = Group.of(group)
    return gathered(x, dim, _lengths(x, dim, group), group)


@outside_of_graphs
def _lengths(x: Tensor, dim: int, group: Group, **facts: object) -> tuple[int, ...]:
    """Of the shares of all ranks, which are alike in all else, and ask for the same."""
    with told(group, "lengths"):
        n, shape = x.shape[dim], list[object](x.shape)
        shape[dim] = "tokens"
    return agree(group, {"dtype": x.dtype, "shape": shape, **facts}, n, step="lengths").queries


def all_sum(x: Tensor, group: Any) -> Tensor:
    """The sum of x over all ranks, on all ranks, with gradients. A small exchange makes sure that shapes agree."""
    group = Group.of(group)
    _check_shapes(x, group)
    return summed(x, group)


@outside_of_graphs
def _check_shapes(x: Tensor, group: Group, **facts: object) -> None:
    """On all ranks an error that names the shape or dtype that differs, where the backend would mix up numbers."""
    with told(group, SHAPES):
        facts = {"shape": tuple(x.shape), "dtype": x.dtype, **facts}
    agree(group, facts, step=SHAPES, hint="What is summed over ranks has one shape and dtype on all of them")


def mean_over_tokens(x: Tensor, mask: Tensor | None, group: Any) -> Tensor:
    """The mean over the real tokens of all ranks, on all ranks, with gradients: (b, n, ...), (b, n) -> (b, ...).

    Zeros where an example has none. Sums are taken in float32 at least. Two collectives, which a mean over the tokens
    of one process has not: whether all ranks have examples of one shape, and the sum.
    """
    group = Group.of(group)
    with told(group, SHAPES):
        dtype = statistics_dtype(x)  # a count of tokens, and their sum, would leave the range of float16
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask is {mask.dtype}, expected a boolean tensor, True = real; convert with mask.bool()")
        kept = x.masked_fill(~mask.reshape(*mask.shape, *[1] * (x.dim() - 2)), 0)
        count = mask.sum(1).to(dtype)  # (b,)
        sums = torch.cat([kept.sum(1, dtype=dtype).reshape(len(x), -1), count[:, None]], 1)
    _check_shapes(sums, group, examples=[len(x), *x.shape[2:]])
    total = summed(sums, group)
    return (total[:, :-1] / total[:, -1:].clamp(min=1)).reshape(len(x), *x.shape[2:]).to(x.dtype)


def token_at(x: Tensor, position: int, group: Any) -> Tensor:
    """The token at this position of the whole sequence, on all ranks, with gradients: (b, n, ...) -> (b, ...).

    The first token, of which classifiers are made, is on the first rank that has tokens.
    """
    group = Group.of(group)
    lengths = _lengths(x, 1, group, position=position)
    if not 0 <= position < sum(lengths):
        raise ValueError(f"position={position} is not among the {sum(lengths)} tokens of all ranks")
    at = position - sum(lengths[: group.rank])
    here = slice(at, at + 1) if 0 <= at < x.shape[1] else slice(0)
    return summed(x[:, here].sum(1), group)  # of one token, or of none


def average_gradients(model: nn.Module, group: Any) -> None:
    """The mean over ranks of each parameter's gradient, in place: what DistributedDataParallel does while it computes.

    Where every rank has computed the one loss of the whole sequence, that is the gradient that one process has. A
    parameter that no rank has a gradient for has none afterwards. A small exchange makes sure that parameters agree.
    """
    group = Group.of(group)
    named = {name: x for name, x in model.named_parameters() if x.requires_grad}
    facts = {f"parameter {name}": f"{x.dtype} {tuple(x.shape)}" for name, x in named.items()}
    agree(group, facts, step=SHAPES, hint="Gradients are averaged of one model, with one set of trainable parameters")
    parameters = list(named.values())
    if not parameters:
        return
    dtype = torch.promote_types(torch.float32, max((x.dtype for x in parameters), key=lambda d: torch.finfo(d).bits))
    had = torch.tensor([x.grad is not None for x in parameters], dtype=dtype, device=parameters[0].device)
    given = [torch.zeros_like(x) if x.grad is None else x.grad for x in parameters]
    had, *sums = sum_over(group, "gradients", had, *(x.to(dtype) for x in given))
    for x, any_rank, total in zip(parameters, had.tolist(), sums, strict=True):
        if any_rank:
            x.grad = (total / group.size).to(x.dtype)
