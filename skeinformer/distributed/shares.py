"""Shares of a sequence: contiguous, in the order of ranks, of any lengths. `shard` divides, `gather` joins.

In all functions `group` is a ProcessGroup or a one-dimensional DeviceMesh, and every rank of it has to call. If what
they must agree on differs, all ranks raise a ValueError that names the difference.
"""

import functools
from collections.abc import Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from skeinformer.distributed.group import Group
from skeinformer.distributed.handshake import broadcast_errors, fingerprint, handshake
from skeinformer.distributed.world import Ranks, outside_of_graphs
from skeinformer.kernels.choice import statistics_dtype

SAME_BATCH = "Every rank passes shard the same whole tensors: load the same batch on all ranks of the group"
SAME_SHAPES = "What is summed or joined has one dtype and shape on all ranks, but for the lengths of shares"
SAME_MODEL = "Gradients are averaged of one model, with one set of trainable parameters"


def share_lengths(n: int, ranks: int) -> tuple[int, ...]:
    """Divide n tokens among so many ranks as evenly as possible: the first have one more.

    Example:
        >>> share_lengths(10, 4)
        (3, 3, 2, 2)
    """
    return tuple(n // ranks + (rank < n % ranks) for rank in range(ranks))


@overload
def shard(tensor: Tensor, /, *, group: Any, dim: int = 1, lengths: Sequence[int] | None = None) -> Tensor: ...


@overload
def shard(
    tensor: Tensor | None, /, *more: Tensor | None, group: Any, dim: int = 1, lengths: Sequence[int] | None = None
) -> tuple[Tensor | None, ...]: ...


@outside_of_graphs
def shard(*tensors: Tensor | None, group: Any, dim: int = 1, lengths: Sequence[int] | None = None) -> Any:
    """Return this rank's share of each tensor along its tokens: token ids, masks, labels, position ids.

    Args:
        tensors: The whole tensors, the same on every rank; None stays None.
        group: The ranks.
        dim: The dimension of the tokens.
        lengths: The lengths of the shares in the order of ranks; as equal as possible by default. 0 is possible.

    Returns:
        The share of a single tensor, or a tuple of shares.

    Raises:
        ValueError: The tensors differ between ranks, or lengths do not sum to the tokens.
        TypeError: An argument is no tensor.

    Example:
        >>> ids, mask = shard(ids, mask, group=group)
    """
    group, lengths = Group.of(group), None if lengths is None else tuple(lengths)
    with broadcast_errors(group, "shard"):
        shares = [None if x is None else _share(x, group, dim, lengths) for x in tensors]
        facts = {f"tensor {i}": None if x is None else _describe(x) for i, x in enumerate(tensors)}
    handshake(group, {**facts, "dim": dim, "lengths": lengths}, step="shard", hint=SAME_BATCH)
    return shares[0] if len(shares) == 1 else tuple(shares)


def _share(x: Tensor, group: Group, dim: int, lengths: tuple[int, ...] | None) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"shard divides tensors, got {type(x).__name__}; make one with torch.as_tensor")
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"a tensor of shape {tuple(x.shape)} has no dim={dim} along which its tokens could be divided")
    n = x.shape[dim]
    lengths = share_lengths(n, group.size) if lengths is None else lengths
    if len(lengths) != group.size or any(type(x) is not int for x in lengths) or sum(lengths) != n or min(lengths) < 0:
        expected = f"one whole number for each of {group.size} ranks and sum to the {n} tokens along dim={dim}"
        raise ValueError(f"{lengths=} must be {expected} of {tuple(x.shape)}")
    # a view would keep all of x in memory
    return x.narrow(dim, sum(lengths[: group.rank]), lengths[group.rank]).clone()


def _describe(x: Tensor) -> str:
    data = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    return f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} with checksum {fingerprint(data):x}"


def gather(x: Tensor, group: Any, *, dim: int = 1) -> Tensor:
    """Return the whole tensor of which every rank holds the share x along `dim`, on all ranks, with gradients.

    Raises:
        ValueError: The shares differ in another dimension, or in dtype.

    Example:
        >>> hidden = gather(hidden, group)
    """
    group = Group.of(group)
    return Ranks(group).gather_with_gradients(x, dim, _compare(x, group, dim))


@outside_of_graphs
def _compare(x: Tensor, group: Group, dim: int | None = None, **facts: object) -> tuple[int, ...]:
    """Return the lengths of all ranks along `dim`, or raise where ranks differ in other ways, unseen by a backend."""
    step = "shapes" if dim is None else "lengths"
    n, shape = 0, list[object](x.shape)
    with broadcast_errors(group, step):
        if dim is not None:
            n, shape[dim] = x.shape[dim], "tokens"
    facts = {"shape": shape, "dtype": x.dtype, **facts}
    return handshake(group, facts, n, step=step, hint=SAME_SHAPES).ranks.queries


def all_sum(x: Tensor, group: Any) -> Tensor:
    """Return the sum of x over all ranks, on all ranks, with gradients.

    Raises:
        ValueError: Shapes or dtypes differ.

    Example:
        >>> loss = all_sum(loss_of_my_tokens, group)
    """
    group = Group.of(group)
    _compare(x, group)
    return Ranks(group).sum_with_gradients(x)


def mean_over_tokens(x: Tensor, mask: Tensor | None, group: Any) -> Tensor:
    """Return the mean over the real tokens of all ranks, on all ranks, with gradients: (b, n, ...) -> (b, ...).

    Args:
        x: The tokens of this rank.
        mask: (b, n), True where a token is real; None if all are.
        group: The ranks.

    Returns:
        The mean, summed in float32 at least; zeros where an example has no token.

    Raises:
        ValueError: The number of examples or the width differs between ranks.
        TypeError: The mask is not boolean.

    Example:
        >>> pooled = mean_over_tokens(hidden, mask, group)
    """
    group = Group.of(group)
    with broadcast_errors(group, "shapes"):
        dtype = statistics_dtype(x)  # a count of tokens, and their sum, would leave the range of float16
        if mask is None:
            mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        if mask.dtype != torch.bool:
            raise TypeError(f"mask is {mask.dtype}, expected a boolean tensor, True = real; convert with mask.bool()")
        real = x.masked_fill(~mask.reshape(*mask.shape, *[1] * (x.dim() - 2)), 0)
        count = mask.sum(1).to(dtype)  # (b,)
        sums = torch.cat([real.sum(1, dtype=dtype).reshape(len(x), -1), count[:, None]], 1)
    _compare(sums, group, examples=[len(x), *x.shape[2:]])
    total = Ranks(group).sum_with_gradients(sums)
    return (total[:, :-1] / total[:, -1:].clamp(min=1)).reshape(len(x), *x.shape[2:]).to(x.dtype)


def token_at(x: Tensor, position: int, group: Any) -> Tensor:
    """Return the token at a position of the whole sequence, on all ranks, with gradients: (b, n, ...) -> (b, ...).

    Args:
        x: The tokens of this rank.
        position: Counted over all ranks; the first token, which classifiers read, is 0.
        group: The ranks.

    Raises:
        ValueError: There is no such position.

    Example:
        >>> first = token_at(hidden, 0, group)
    """
    group = Group.of(group)
    lengths = _compare(x, group, 1, position=position)
    if not 0 <= position < sum(lengths):
        raise ValueError(f"position={position} is not among the {sum(lengths)} tokens of all ranks")
    at = position - sum(lengths[: group.rank])
    here = slice(at, at + 1) if 0 <= at < x.shape[1] else slice(0)
    return Ranks(group).sum_with_gradients(x[:, here].sum(1))  # of one token, or of none


def average_gradients(model: nn.Module, group: Any) -> None:
    """Average each parameter's gradient over ranks, in place: what DistributedDataParallel does while it computes.

    Where every rank has computed the one loss of the whole sequence, that is the gradient that one process has. A
    parameter that no rank has a gradient for has none afterwards.

    Raises:
        ValueError: The trainable parameters differ between ranks.

    Example:
        >>> loss.backward()
        >>> average_gradients(model, group)
    """
    group = Group.of(group)
    named = {name: x for name, x in model.named_parameters() if x.requires_grad}
    facts = {f"parameter {name}": f"{x.dtype} {tuple(x.shape)}" for name, x in named.items()}
    handshake(group, facts, step="shapes", hint=SAME_MODEL)
    if not (parameters := list(named.values())):
        return
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in parameters), torch.float32)
    has_gradient = torch.tensor([x.grad is not None for x in parameters], dtype=dtype, device=parameters[0].device)
    gradients = [torch.zeros_like(x) if x.grad is None else x.grad for x in parameters]
    has_gradient, *sums = Ranks(group).sum("gradients", has_gradient, *(x.to(dtype) for x in gradients))
    for x, any_rank, total in zip(parameters, has_gradient.tolist(), sums, strict=True):
        if any_rank:
            x.grad = (total / group.size).to(x.dtype)
