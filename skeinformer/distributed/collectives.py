"""The collectives: all that crosses ranks goes through this file, is counted in it, and fails in it with a name.

Two are enough, a sum over ranks and a gathering from all. Several tensors go as one buffer, so that the number of
collectives is that of the steps of a method. `summed` and `gathered` carry gradients. The loss that they are gradients
of is the *sum* of all ranks' losses.
"""

import functools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from skeinformer.distributed.group import Group
from skeinformer.distributed.notes import all_raised, described, leave_note, what_is_known

P = ParamSpec("P")
R = TypeVar("R")
Kind = Literal["sum", "gather"]
REASON = "attention over a group exchanges with other ranks, and is no part of a graph: compile without fullgraph=True"
# the name of torch 2.13, and the one before
_all_gather = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)

_watching: "list[list[Exchange]]" = []
_begun: Counter[str] = Counter()  # exchanges, by the name of the group: ranks that are in step have the same number
_raised: dict[str, str] = {}  # what this rank has raised in the middle of its last call, by the name of the group


class RankError(RuntimeError):
    """Another rank died, raised an error of its own, or did not come to the same exchange."""


class Exchange(NamedTuple):
    """One collective, as this rank took part in it."""

    step: str
    kind: Kind
    size: int
    """Bytes that the rank put in."""
    ranks: int

    @property
    def received(self) -> int:
        """Bytes that a rank receives: (R - 1) times the size, or for a sum, as rings do it, 2 (R - 1) / R times."""
        others = self.ranks - 1
        return others * self.size if self.kind == "gather" else math.ceil(2 * others / self.ranks * self.size)


@contextmanager
def watch() -> Iterator[list[Exchange]]:
    """The exchanges that this rank takes part in meanwhile, forward and backward, in their order."""
    seen: list[Exchange] = []
    _watching.append(seen)
    try:
        yield seen
    finally:
        _watching[:] = [other for other in _watching if other is not seen]


def sum_over(group: Group, step: str, *tensors: Tensor) -> list[Tensor]:
    """The sums over all ranks, in the dtype of the tensors, which is one; no gradient."""
    buffer = torch.cat([x.detach().reshape(-1) for x in tensors])
    with _taking_part(group, step, "sum", buffer):
        dist.all_reduce(buffer, group=group.process_group)
    parts = torch.split(buffer, [x.numel() for x in tensors])
    return [part.view(x.shape) for part, x in zip(parts, tensors, strict=True)]


def gather_over(group: Group, step: str, *tensors: Tensor) -> list[Tensor]:
    """What every rank holds, (R, *shape), in the order of ranks, of any dtypes; no gradient. Shapes agree on ranks."""
    parts = [x.detach().contiguous().view(-1).view(torch.uint8) for x in tensors]
    buffer = torch.cat(parts)
    every = buffer.new_empty(group.size * buffer.numel())
    with _taking_part(group, step, "gather", buffer):
        assert _all_gather is not None
        _all_gather(every, buffer, group=group.process_group)
    columns = torch.split(every.view(group.size, -1), [part.numel() for part in parts], 1)
    return [
        column.clone(memory_format=torch.contiguous_format).view(-1).view(x.dtype).view(group.size, *x.shape)
        for column, x in zip(columns, tensors, strict=True)
    ]


def gather_objects(group: Group, step: str, mine: Any) -> list[Any]:
    """What every rank says, pickled: for errors, where another exchange does not matter."""
    said: list[Any] = [None] * group.size
    with _named(group, step):
        dist.all_gather_object(said, mine, group=group.process_group)
    return said


@contextmanager
def _taking_part(group: Group, step: str, kind: Kind, buffer: Tensor) -> Iterator[None]:
    for seen in _watching:
        seen.append(Exchange(step, kind, buffer.numel() * buffer.element_size(), group.size))
    with _named(group, step):
        yield


@contextmanager
def _named(group: Group, step: str) -> Iterator[None]:
    _check_in_step(group)
    _begun[group.name] += 1
    try:
        yield
    except RuntimeError as error:  # what a backend raises where a connection is lost, or nobody comes in time
        cause, heard = what_is_known(group, _begun[group.name], step)
        raise RankError(
            f"rank {group.rank} of {group.size} waited in vain in the exchange {step!r}: {cause}; all ranks end. "
            f"{heard}The backend says: {error}"
        ) from error


@contextmanager
def noted(group: Group) -> Iterator[None]:
    """An error in here, between two exchanges, is raised, and left as a note for the ranks that wait for this one."""
    try:
        yield
    except RankError:
        raise
    except BaseException as error:
        _raised[group.name] = described(error)
        leave_note(group, _begun[group.name], f"raised {described(error)}")
        raise


def _check_in_step(group: Group) -> None:
    """Raise where this rank left a call in its middle and another did not: their exchanges would be mixed up."""
    if group.name not in _raised:
        return
    if not all_raised(group, _begun[group.name]):
        raise RankError(
            f"rank {group.rank} of {group.size} raised {_raised[group.name]} in the middle of an earlier call, where "
            "others may still wait for it: the group is of no use any more; end all ranks, or make another group"
        )
    del _raised[group.name]


def outside_of_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that a compiler leaves alone: a graph ends before it, and another begins after it.

    As `torch.compiler.disable` does, which would load the compiler, for seconds, already when this is imported.
    """

    @functools.wraps(function)
    def left_alone(*args: P.args, **options: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        return cast(R, torch.compiler.disable(function)(*args, **options))  # type: ignore[no-untyped-call]

    left_alone._torchdynamo_disable = True  # type: ignore[attr-defined]
    left_alone._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]
    return left_alone


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return sum_over(group, "all_sum", x)[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _AllSum.apply(gradient, ctx.group), None  # type: ignore[no-untyped-call]


@outside_of_graphs
def summed(x: Tensor, group: Group) -> Tensor:
    """The sum of x, whose shape is known to be that of all ranks, on all ranks, with gradients."""
    total: Tensor = _AllSum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Tensor:
        ctx.dim, ctx.lengths, ctx.group = dim, lengths, group
        missing = max(lengths) - x.shape[dim]
        shape = list(x.shape)
        shape[dim] = missing
        (every,) = gather_over(group, "gather", torch.cat([x, x.new_zeros(shape)], dim))
        return torch.cat([part.narrow(dim, 0, length) for part, length in zip(every, lengths, strict=True)], dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        start = sum(ctx.lengths[: ctx.group.rank])
        whole = _AllSum.apply(gradient, ctx.group)  # type: ignore[no-untyped-call]
        return whole.narrow(ctx.dim, start, ctx.lengths[ctx.group.rank]), None, None, None


@outside_of_graphs
def gathered(x: Tensor, dim: int, lengths: Sequence[int], group: Group) -> Tensor:
    """The shares of all ranks, whose lengths are known, one after the other along `dim`, with gradients."""
    whole: Tensor = _Gathered.apply(x, dim, tuple(lengths), group)  # type: ignore[no-untyped-call]
    return whole
