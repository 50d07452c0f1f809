"""World: the processes that share the tokens of one sequence, and everything that they exchange.

Methods are written against a `World`. One process alone is `ALONE`, whose sums and gathers are identities; with a group
it is `Ranks`. Two collectives are enough, a sum over ranks and a gather from all, and several tensors go as one buffer.
Gradients are those of the *sum* of all ranks' losses.
"""

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from skeinformer.distributed.group import Group

P = ParamSpec("P")
R = TypeVar("R")
REASON = "attention over a group exchanges with other ranks, and is no part of a graph: compile without fullgraph=True"
# the name in torch 2.13, and the one before
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

_watchers: "list[list[Exchange]]" = []


class RankError(RuntimeError):
    """Another rank died, raised an error of its own, or did not come to the same exchange in time."""


class Exchange(NamedTuple):
    """One collective, as this rank took part in it."""

    step: str
    kind: Literal["sum", "gather"]
    size: int  # bytes that the rank sent
    ranks: int

    @property
    def received(self) -> int:
        """Return the bytes that a rank receives: (R - 1) times the size, for a sum in a ring 2 (R - 1) / R times."""
        others = self.ranks - 1
        return others * self.size if self.kind == "gather" else math.ceil(2 * others / self.ranks * self.size)


def outside_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that a compiler must not trace, without loading the compiler as torch's decorator does."""

    @functools.wraps(function)
    def untraced(*args: P.args, **options: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        return cast(R, torch.compiler.disable(function)(*args, **options))  # type: ignore[no-untyped-call]

    untraced._torchdynamo_disable = True  # type: ignore[attr-defined]
    untraced._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    return untraced


class World:
    """The processes that share the tokens of a sequence. This class is one process alone: exchanges are identities."""

    size, rank, query_start, key_start = 1, 0, 0, 0

    def num_queries(self, here: int) -> int:
        """Return the number of queries of all ranks, from the number of this rank."""
        return here

    def num_keys(self, here: int) -> int:
        return here

    def keys_here(self, size: int) -> int:
        """Return the number of keys that this rank holds; an empty rank has one of padding in its tensors."""
        return size

    def sum(self, step: str, *tensors: Tensor) -> list[Tensor]:
        """Return the sums over ranks of tensors of one dtype, without gradients."""
        return list(tensors)

    def gather(self, step: str, *tensors: Tensor) -> list[Tensor]:
        """Return the tensors of every rank, (R, *shape) each, without gradients."""
        return [x[None] for x in tensors]

    def sum_with_gradients(self, x: Tensor) -> Tensor:
        """Return the sum of x over ranks, through which gradients flow."""
        return x


ALONE = World()


class Ranks(World):
    """The ranks of a group, and how many tokens each of them holds."""

    def __init__(self, group: Group, queries: Sequence[int] = (), keys: Sequence[int] = ()) -> None:
        self.group, self.queries, self.keys = group, tuple(queries), tuple(keys)
        self.size, self.rank = group.size, group.rank
        self.query_start, self.key_start = sum(queries[: group.rank]), sum(keys[: group.rank])

    def num_queries(self, here: int) -> int:
        return sum(self.queries)

    def num_keys(self, here: int) -> int:
        return sum(self.keys)

    def keys_here(self, size: int) -> int:
        return self.keys[self.rank]

    def sum(self, step: str, *tensors: Tensor) -> list[Tensor]:
        buffer = torch.cat([x.detach().reshape(-1) for x in tensors])
        with self._exchange(step, Exchange(step, "sum", buffer.nbytes, self.size)):
            dist.all_reduce(buffer, group=self.group.process_group)
        parts = torch.split(buffer, [x.numel() for x in tensors])
        return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]

    def gather(self, step: str, *tensors: Tensor) -> list[Tensor]:
        buffer = torch.cat(parts := [x.detach().contiguous().view(-1).view(torch.uint8) for x in tensors])
        all_buffers = buffer.new_empty(self.size * buffer.numel())
        with self._exchange(step, Exchange(step, "gather", buffer.nbytes, self.size)):
            assert _all_gather is not None
            _all_gather(all_buffers, buffer, group=self.group.process_group)
        columns = torch.split(all_buffers.view(self.size, -1), [part.numel() for part in parts], 1)
        rows = (column.clone(memory_format=torch.contiguous_format).view(-1) for column in columns)
        return [row.view(x.dtype).view(self.size, *x.shape) for row, x in zip(rows, tensors, strict=True)]

    @outside_of_graphs
    def sum_with_gradients(self, x: Tensor) -> Tensor:
        return cast(Tensor, _AllSum.apply(x, self))  # type: ignore[no-untyped-call]

    @outside_of_graphs
    def gather_with_gradients(self, x: Tensor, dim: int, lengths: Sequence[int]) -> Tensor:
        """Return the shares of all ranks, whose lengths are known, one after the other along `dim`, with gradients."""
        return cast(Tensor, _Gather.apply(x, dim, lengths, self))  # type: ignore[no-untyped-call]

    def gather_objects(self, step: str, value: Any) -> list[Any]:
        """Return the objects of all ranks, pickled on the way: for errors, where another exchange does not matter."""
        values: list[Any] = [None] * self.size
        with self._exchange(step):
            dist.all_gather_object(values, value, group=self.group.process_group)
        return values

    @contextmanager
    def _exchange(self, step: str, *record: Exchange) -> Iterator[None]:
        """Name the exchange in errors of the backend, and record it for `watch`."""
        for exchanges in _watchers:
            exchanges.extend(record)
        try:
            yield
        except RuntimeError as error:  # the backend raises it where a connection is lost, or a rank does not come
            raise RankError(
                f"rank {self.rank} of {self.size} waited in vain in the exchange {step!r}: another rank has died, "
                f"raised an error (see its output), or did not come here within the group's timeout. Backend: {error}"
            ) from error


@contextmanager
def watch() -> Iterator[list[Exchange]]:
    """Record the exchanges that this rank takes part in, forward and backward, in their order.

    Yields:
        A list that grows while the context is open.

    Example:
        >>> with watch() as exchanges:
        ...     output = cluster_attention(q, k, v, group=group)
        >>> sum(exchange.size for exchange in exchanges)
    """
    exchanges: list[Exchange] = []
    _watchers.append(exchanges)
    try:
        yield exchanges
    finally:
        _watchers[:] = [other for other in _watchers if other is not exchanges]


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return ranks.sum("all_sum", x)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllSum.apply(gradient, ctx.ranks), None  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, lengths: Sequence[int], ranks: Ranks) -> Tensor:
        ctx.dim, ctx.lengths, ctx.ranks = dim, lengths, ranks
        shape = list(x.shape)
        shape[dim] = max(lengths) - x.shape[dim]
        (shares,) = ranks.gather("gather", torch.cat([x, x.new_zeros(shape)], dim))
        return torch.cat([share.narrow(dim, 0, length) for share, length in zip(shares, lengths, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        start = sum(ctx.lengths[: ctx.ranks.rank])
        total = _AllSum.apply(gradient, ctx.ranks)  # type: ignore[no-untyped-call]
        return total.narrow(ctx.dim, start, ctx.lengths[ctx.ranks.rank]), None, None, None
