"""A group of ranks that share a sequence: what `group=` takes, and what a module keeps of it."""

from typing import Any, NoReturn

import torch
import torch.distributed as dist

NO_RANK = "this process is no rank of the group; call only on the ranks that share the sequence"


class Group:
    """The ranks among which the tokens of one sequence are divided, in the order of the tokens.

    A copy of a module shares it. A pickled module has none, and raises an error when it is called.
    """

    def __init__(self, process_group: Any) -> None:
        self.process_group = process_group
        self.rank: int = dist.get_rank(process_group)
        self.size: int = dist.get_world_size(process_group)
        if self.rank < 0:
            raise ValueError(NO_RANK)

    @property
    def device(self) -> torch.device:
        """The device of the small tensors of an exchange: a CPU unless the backend knows GPUs only."""
        only_gpus = dist.get_backend(self.process_group) == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if only_gpus else torch.device("cpu")

    @staticmethod
    def of(group: Any) -> "Group":
        """Return the Group of a ProcessGroup or a one-dimensional DeviceMesh, or raise an error that names these."""
        if isinstance(group, Group):
            return group
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(f"{group=}, but torch.distributed is not initialized; call init_process_group first")
        if isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives to others
            raise ValueError(NO_RANK)
        if isinstance(group, dist.ProcessGroup):
            return Group(group)
        if not hasattr(group, "get_group") or not hasattr(group, "ndim"):
            expected = "a torch.distributed.ProcessGroup or a one-dimensional DeviceMesh"
            raise TypeError(f"group must be {expected}, got {type(group).__name__}")
        if group.ndim != 1:
            names = tuple(getattr(group, "mesh_dim_names", None) or range(group.ndim))
            which = "give the one along which the sequence is divided, such as mesh['sequence']"
            raise ValueError(f"group is a DeviceMesh of {group.ndim} dimensions {names}; {which}")
        return Group(group.get_group())

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"

    def __deepcopy__(self, memo: Any) -> "Group":
        return self

    def __reduce__(self) -> tuple[type["NoGroup"], tuple[()]]:
        return NoGroup, ()


class NoGroup(Group):
    """The group of a pickled module: any use of it raises an error."""

    def __init__(self) -> None:
        pass

    def __repr__(self) -> str:
        return "NoGroup()"

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(
            "this module was pickled, and a process group cannot be: set module.group = "
            "skeinformer.distributed.Group.of(group), build it again, or save a state_dict"
        )
