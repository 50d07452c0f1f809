"""Shares of a sequence: contiguous, in the order of ranks, of any lengths. `shard` divides, `gather` puts together."""

import hashlib
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from skeinformer.distributed.agreement import fingerprint
from skeinformer.distributed.collectives import (
    all_sum,
    gather_objects,
    gather_over,
    gathered,
    outside_of_graphs,
    sum_over,
)
from skeinformer.distributed.group import Group, by_rank


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
    group = Group.of(group)
    _check_alike(group, tensors)
    shares: list[Tensor | None] = []
    for x in tensors:
        if x is None:
            shares.append(None)
            continue
        n = x.shape[dim]
        own = share_lengths(n, group.size) if lengths is None else tuple(lengths)
        if len(own) != group.size or sum(own) != n or min(own) < 0:
            raise ValueError(
                f"lengths={own} must be one for each of {group.size} ranks and sum to the {n} tokens of "
                f"{tuple(x.shape)} along dim={dim}"
            )
        shares.append(x.narrow(dim, sum(own[: group.rank]), own[group.rank]))
    return shares[0] if len(shares) == 1 else tuple(shares)


@outside_of_graphs
def _check_alike(group: Group, tensors: Sequence[Tensor | None]) -> None:
    """Raise on all ranks where the tensors differ between them, and say which and how."""
    said = [_described(x) for x in tensors]
    told = fingerprint(repr(said))
    (every,) = gather_over(group, "shard", torch.tensor(told, device=group.device))
    if (every == told).all():
        return
    of_all = gather_objects(group, "shard", said)
    if len({len(of_rank) for of_rank in of_all}) > 1:
        raise ValueError(f"ranks give shard different numbers of tensors: {by_rank(str(len(each)) for each in of_all)}")
    for i, of_ranks in enumerate(zip(*of_all, strict=True)):
        if len(set(of_ranks)) > 1:
            raise ValueError(
                f"tensor {i} of shard differs between ranks: {by_rank(of_ranks)}. Every rank gives the whole tensor, "
                "and the same one: load the same batch on all ranks of the group"
            )


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
def _lengths(x: Tensor, dim: int, group: Group) -> list[int]:
    """Of the shares of all ranks."""
    (every,) = gather_over(group, "lengths", torch.tensor(x.shape[dim], device=group.device))
    return every.tolist()


def mean_over_tokens(x: Tensor, mask: Tensor | None, group: Any) -> Tensor:
    """The mean over the real tokens of all ranks, on all ranks, with gradients: (b, n, ...), (b, n) -> (b, ...).

    Zeros where an example has none. One collective, which a mean over the tokens of one process has not.
    """
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
    kept = x.masked_fill(~mask.reshape(*mask.shape, *[1] * (x.dim() - 2)), 0)
    count = mask.sum(1).to(x.dtype)  # (b,)
    total = all_sum(torch.cat([kept.sum(1).reshape(len(x), -1), count[:, None]], 1), group)
    return (total[:, :-1] / total[:, -1:].clamp(min=1)).reshape(len(x), *x.shape[2:])


def token_at(x: Tensor, position: int, group: Any) -> Tensor:
    """The token at this position of the whole sequence, on all ranks, with gradients: (b, n, ...) -> (b, ...).

    The first token, of which classifiers are made, is on the first rank that has tokens.
    """
    group = Group.of(group)
    lengths = _lengths(x, 1, group)
    if not 0 <= position < sum(lengths):
        raise ValueError(f"position={position} is not among the {sum(lengths)} tokens of all ranks")
    at = position - sum(lengths[: group.rank])
    here = slice(at, at + 1) if 0 <= at < x.shape[1] else slice(0)
    return all_sum(x[:, here].sum(1), group)  # of one token, or of none


def average_gradients(model: nn.Module, group: Any) -> None:
    """The mean over ranks of each parameter's gradient, in place: what DistributedDataParallel does while it computes.

    Where every rank has computed the one loss of the whole sequence, that is the gradient that one process has. A
    parameter that no rank has a gradient for has none afterwards.
    """
    group = Group.of(group)
    parameters = [x for x in model.parameters() if x.requires_grad]
    if not parameters:
        return
    dtype = torch.promote_types(torch.float32, max((x.dtype for x in parameters), key=lambda d: torch.finfo(d).bits))
    had = torch.tensor([x.grad is not None for x in parameters], dtype=dtype, device=parameters[0].device)
    given = [torch.zeros_like(x) if x.grad is None else x.grad for x in parameters]
    had, *sums = sum_over(group, "gradients", had, *(x.to(dtype) for x in given))
    for x, any_rank, total in zip(parameters, had.tolist(), sums, strict=True):
        if any_rank:
            x.grad = (total / group.size).to(x.dtype)
