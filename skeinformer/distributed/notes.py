"""Notes that ranks leave for each other where something fails: who has failed, of what, and who is not heard of.

A backend says that a connection is lost, not whose, nor why. So a rank that raises an error in the middle of a call
leaves a note in the store in which the processes met. So does every rank whose exchange fails, and it looks for the
notes of the others. A rank without one has died, is somewhere else, or still waits for the group's timeout. Where the
store is gone too, with the process that held it, nothing can be known.
"""

import threading
import time
from collections.abc import Callable
from itertools import product
from typing import Any

import torch.distributed as dist

from skeinformer.distributed.group import Group

PATIENCE = 2.0  # seconds in which ranks that see the same failure leave their notes
PAUSE = 0.05
WAITED = "waited in vain in "  # and then the name of the exchange


def leave_note(group: Group, exchange: int, said: str) -> None:
    """Say this of the exchange of that number, or of what came after it."""
    _in_time(lambda store: store.set(_place(group, group.rank, exchange), said))


def read_notes(group: Group, *exchanges: int) -> dict[int, str]:
    """What each rank says of one of these exchanges, as far as it says anything in time; empty without a store."""
    said: dict[int, str] = {}

    def look(store: Any) -> None:
        end = time.monotonic() + PATIENCE
        while True:
            for rank, number in product(range(group.size), exchanges):
                if rank not in said and store.check([place := _place(group, rank, number)]):
                    said[rank] = store.get(place).decode()
            if len(said) == group.size or time.monotonic() > end:
                return
            time.sleep(PAUSE)

    return said if _in_time(look) else {}


def all_raised(group: Group, exchange: int) -> bool:
    """Whether all ranks have raised an error after this exchange: none then waits for another."""
    said = read_notes(group, exchange)
    return len(said) == group.size and not any(_waited_in(each) for each in said.values())


def what_is_known(group: Group, exchange: int, step: str) -> tuple[str, str]:
    """Why the exchange `step` failed, and in a sentence who is heard of, empty where there is no more to say."""
    leave_note(group, exchange, WAITED + step)
    said = read_notes(group, exchange - 1, exchange)
    raised = [f"rank {rank} {said[rank]}" for rank in sorted(said) if not _waited_in(said[rank])]
    if raised:
        return "; ".join(raised), ""
    waited = {rank: _waited_in(said[rank]) for rank in sorted(said) if rank != group.rank}
    elsewhere = [f"rank {rank} waited in {there!r}" for rank, there in waited.items() if there != step]
    cause = (
        "another rank of the group has died, has raised an error of its own (see its output), or did not come here "
        "within the group's timeout"
    )
    if elsewhere:
        cause = (
            f"{'; '.join(elsewhere)}: the ranks took different ways, such as a call or a backward pass that only some "
            "of them make"
        )
    silent = [rank for rank in range(group.size) if rank not in said]
    if not said or not silent:
        return cause, ""
    others = [] if elsewhere else list(waited)
    also = f"; {_ranks(others)} report{'s' * (len(others) == 1)} the same failure" if others else ""
    return cause, f"Nothing is heard of {_ranks(silent)}{also}. "


def _waited_in(note: str) -> str:
    """The exchange in which a rank waited in vain, "" for another note."""
    return note.removeprefix(WAITED) if note.startswith(WAITED) else ""


def described(error: BaseException) -> str:
    """'ValueError: ...'."""
    return f"{type(error).__name__}: {error}"


def _in_time(act: Callable[[Any], object]) -> bool:
    """Whether it could be done to the store; a store on a machine that is gone may not answer at all."""
    done: list[bool] = []

    def attempt() -> None:
        try:
            act(dist.distributed_c10d._get_default_store())
            done.append(True)
        except Exception:  # of any store, and where there is none
            done.clear()

    attempting = threading.Thread(target=attempt, name="notes", daemon=True)
    attempting.start()
    attempting.join(2 * PATIENCE)
    return bool(done)


def _place(group: Group, rank: int, exchange: int) -> str:
    return f"skeinformer/{group.name}/{exchange}/{rank}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
