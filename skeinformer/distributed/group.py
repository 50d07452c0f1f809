"""A group of ranks that share a sequence: what `group=` takes, and what a module keeps of it."""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
import torch.distributed as dist

GROUPS = "a torch.distributed.ProcessGroup or a one-dimensional DeviceMesh"
NO_RANK = "this process is no rank of the group; call only on the ranks that share the sequence"


class Group:
    """The ranks among which the tokens of one sequence are divided, in the order of the tokens.

    A copy of a module shares it; a pickled module forgets it, and says so when it is called.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group)
        self.size: int = dist.get_world_size(process_group)
        self.name: str = getattr(process_group, "group_name", "")
        if self.rank < 0:
            raise ValueError(NO_RANK)

    @property
    def device(self) -> torch.device:
        """Where small tensors of the group's own are: a CPU unless the backend knows GPUs only."""
        only_gpus = dist.get_backend(self.process_group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if only_gpus else torch.device("cpu")

    @staticmethod
    def of(group: Any) -> "Group":
        """The group that a user gives, or an error that says what it may be."""
        if isinstance(group, Group):
            return group
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                f"group={group!r}, but torch.distributed is not initialized; call init_process_group first, under "
                "torchrun or with a rank and a world size"
            )
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to others
            raise ValueError(NO_RANK)
        if isinstance(group, dist.ProcessGroup):
            return Group(group)
        if hasattr(group, "get_group") and hasattr(group, "ndim"):
            if group.ndim != 1:
                names = getattr(group, "mesh_dim_names", None) or tuple(range(group.ndim))
                raise ValueError(
                    f"group is a DeviceMesh of {group.ndim} dimensions {tuple(names)}; give the one along which the "
                    "sequence is divided, such as mesh['sequence']"
                )
            return Group(group.get_group())
        raise TypeError(f"group must be {GROUPS}, got {type(group).__name__}")

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: Any) -> "Group":
        return self

    def __reduce__(self) -> tuple[type["Forgotten"], tuple[()]]:
        return Forgotten, ()


class Forgotten(Group):
    """What a pickled module has in place of its group."""

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return "Forgotten()"

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            "this module was pickled, and a process group cannot be: set module.group = Group.of(group) of "
            "skeinformer.distributed, or build it again; a state_dict has no such trouble"
        )


def by_rank(said: Iterable[str]) -> str:
    """What each rank says, in their order: 'a on ranks 0, 2 and b on rank 1'."""
    ranks: dict[str, list[str]] = {}
    for rank, what in enumerate(said):
        ranks.setdefault(what, []).append(str(rank))
    return " and ".join(f"{what} on rank{'s' * (len(on) > 1)} {', '.join(on)}" for what, on in ranks.items())
