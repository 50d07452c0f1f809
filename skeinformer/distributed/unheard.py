"""Which ranks are not heard of after an exchange has failed.

A backend says that a connection is lost, not whose. So every rank whose exchange fails leaves a note in the store in
which the processes met, and looks for the notes of the others. A rank without one has died, is somewhere else, or still
waits for the group's timeout. Where the store is gone too, with the process that held it, nothing can be known.
"""

import threading
import time
from typing import Any

import torch.distributed as dist

from skeinformer.distributed.group import Group

PATIENCE = 2.0  # seconds in which ranks that see the same failure leave their notes
PAUSE = 0.05


def who_is_unheard(group: Group, step: str) -> str:
    """In a sentence; empty where it cannot be known."""
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    name = getattr(group.process_group, "group_name", "")
    answered: set[int] = set()

    def look() -> None:
        try:
            store: Any = find() if find is not None else None
            store.set(f"skeinformer/{name}/{step}/{group.rank}", "failed")
            answered.add(group.rank)
            end = time.monotonic() + PATIENCE
            while len(answered) < group.size and time.monotonic() < end:
                missing = [rank for rank in range(group.size) if rank not in answered]
                answered.update(rank for rank in missing if store.check([f"skeinformer/{name}/{step}/{rank}"]))
                time.sleep(PAUSE)
        except Exception:  # of any store, and where there is none
            answered.clear()

    # a store on a machine that is gone may not answer at all
    looking = threading.Thread(target=look, name="who is unheard", daemon=True)
    looking.start()
    looking.join(2 * PATIENCE)
    heard = set(answered)
    silent = [rank for rank in range(group.size) if rank not in heard]
    if not heard or not silent:
        return ""
    others = sorted(heard - {group.rank})
    also = f"; {_ranks(others)} report{'s' * (len(others) == 1)} the same failure" if others else ""
    return f"Nothing is heard of {_ranks(silent)}{also}. "


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
