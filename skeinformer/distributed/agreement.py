"""The first exchange of a call: who holds how many tokens, and whether all ranks ask for the same.

Five integers of each rank. They also say whether a rank has failed already, so that the others do not wait for it. Only
where something is wrong a second exchange follows, and tells all ranks what.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from skeinformer.distributed.collectives import RankError, gather_objects, gather_over
from skeinformer.distributed.group import Group, by_rank
from skeinformer.distributed.notes import described
from skeinformer.noise import Window

STEP = "shares"


@dataclass(frozen=True)
class Shares:
    """How the tokens of one call are divided."""

    group: Group
    queries: tuple[int, ...]
    """How many each rank holds."""
    keys: tuple[int, ...]
    state: int
    """A number made of rank 0's random state."""
    states_agree: bool
    """Whether all ranks have that state."""

    @property
    def n(self) -> int:
        """Queries of all ranks."""
        return sum(self.queries)

    @property
    def n_k(self) -> int:
        """Keys of all ranks."""
        return sum(self.keys)

    @property
    def of_queries(self) -> Window:
        """Where the queries of this rank are among all."""
        return Window(sum(self.queries[: self.group.rank]), self.n)

    @property
    def of_keys(self) -> Window:
        return Window(sum(self.keys[: self.group.rank]), self.n_k)


def agree(
    group: Group,
    facts: Mapping[str, object],
    queries: int = 0,
    keys: int = 0,
    state: int = 0,
    *,
    step: str = STEP,
    hint: str = "All must ask for the same",
) -> Shares:
    """The shares of all ranks, or on all ranks an error that names what a rank says otherwise, and ends with the hint.

    facts: what must be the same everywhere. state: a number made of this rank's random state.
    """
    said = {name: str(fact) for name, fact in facts.items()}
    every = _exchange(group, step, (0, fingerprint(repr(said)), queries, keys, state))
    failed = [rank for rank, (status, *_) in enumerate(every) if status]
    if failed:
        message = gather_objects(group, step, None)[failed[0]]
        raise RankError(f"rank {failed[0]} of {group.size} raised {message}. Rank {group.rank} waits no longer")
    if len({row[1] for row in every}) > 1:
        raise ValueError(f"the ranks of the group disagree: {_differences(gather_objects(group, step, said))}. {hint}")
    _, _, of_queries, of_keys, states = zip(*every, strict=True)
    return Shares(group, of_queries, of_keys, states[0], len(set(states)) == 1)


@contextmanager
def told(group: Group, step: str = STEP) -> Iterator[None]:
    """An error in here, before `agree`, is told to the other ranks, which wait there, and raised."""
    try:
        yield
    except Exception as error:
        _exchange(group, step, (1, 0, 0, 0, 0))
        gather_objects(group, step, described(error))
        raise


def fingerprint(said: str | bytes) -> int:
    """64 bits of a hash."""
    data = said.encode() if isinstance(said, str) else said
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _exchange(group: Group, step: str, mine: tuple[int, ...]) -> list[list[int]]:
    (every,) = gather_over(group, step, torch.tensor(mine, device=group.device))
    return every.tolist()


def _differences(said: list[dict[str, Any] | None]) -> str:
    """'budget is 16 on rank 0 and 32 on rank 1'."""
    names = dict.fromkeys(name for facts in said if facts for name in facts)
    of_ranks = {name: [(facts or {}).get(name, "not given") for facts in said] for name in names}
    parts = {name: f"{name} is {by_rank(each)}" for name, each in of_ranks.items() if len(set(each)) > 1}
    return parts.get("method") or "; ".join(parts.values())  # another method has other options
