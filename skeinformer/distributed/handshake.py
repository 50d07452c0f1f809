"""The first exchange of a call: how many tokens each rank holds, and whether all ranks ask for the same.

Each rank sends five integers. The first is 1 where the rank has raised an error, so that the others do not wait for it.
Only where something is wrong a second exchange sends the error, or the facts that differ, to all ranks.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from skeinformer.distributed.group import Group
from skeinformer.distributed.world import RankError, Ranks

STEP = "shares"  # the name of the exchange in errors and in `watch`


class Agreement(NamedTuple):
    """What all ranks know after the handshake."""

    ranks: Ranks
    state: int  # a number computed from rank 0's random state
    same_state: bool  # whether all ranks have that state


def handshake(
    group: Group,
    facts: Mapping[str, object],
    queries: int = 0,
    keys: int = 0,
    state: int = 0,
    *,
    step: str = STEP,
    hint: str = "All must ask for the same",
) -> Agreement:
    """Exchange numbers of tokens and random states; raise on all ranks if `facts` differ or a rank had an error."""
    texts = {name: str(fact) for name, fact in facts.items()}
    rows = _exchange(group, step, (0, fingerprint(repr(texts)), queries, keys, state))
    failed, fingerprints, all_queries, all_keys, states = zip(*rows, strict=True)
    if any(failed):
        message = Ranks(group).gather_objects(step, None)[rank := failed.index(1)]
        raise RankError(f"rank {rank} of {group.size} raised {message}. Rank {group.rank} waits no longer")
    if len(set(fingerprints)) > 1:
        differences = _differences(Ranks(group).gather_objects(step, texts))
        raise ValueError(f"the ranks of the group disagree: {differences}. {hint}")
    return Agreement(Ranks(group, all_queries, all_keys), states[0], len(set(states)) == 1)


@contextmanager
def broadcast_errors(group: Group, step: str = STEP) -> Iterator[None]:
    """Send an error of this block, before the handshake, to the other ranks, which wait there, and raise it."""
    try:
        yield
    except Exception as error:
        _exchange(group, step, (1, 0, 0, 0, 0))
        Ranks(group).gather_objects(step, f"{type(error).__name__}: {error}")
        raise


def fingerprint(data: str | bytes | memoryview) -> int:
    """Return 64 bits of a hash."""
    data = data.encode() if isinstance(data, str) else data
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little", signed=True)


def _exchange(group: Group, step: str, row: tuple[int, ...]) -> list[list[int]]:
    (rows,) = Ranks(group).gather(step, torch.tensor(row, device=group.device))
    return rows.tolist()


def _differences(texts: list[dict[str, Any] | None]) -> str:
    """Describe what differs: 'budget is 16 on ranks 0, 2 and 32 on rank 1'."""
    parts = {}
    for name in dict.fromkeys(name for facts in texts for name in facts or {}):
        ranks: dict[str, list[str]] = {}  # of each value
        for rank, facts in enumerate(texts):
            ranks.setdefault((facts or {}).get(name, "missing"), []).append(str(rank))
        if len(ranks) > 1:
            values = (f"{value} on rank{'s' * (len(on) > 1)} {', '.join(on)}" for value, on in ranks.items())
            parts[name] = f"{name} is {' and '.join(values)}"
    return parts.get("method") or "; ".join(parts.values())  # another method has other options
