"""The part of a run that each process takes: a share of every batch, and perhaps a share of every sequence.

Processes form a mesh of data x sequence. Those of one sequence group hold the same examples and divide their tokens;
the groups divide the batch. Each process computes the loss of its group's examples, so that the mean of all gradients,
which DistributedDataParallel takes, is the gradient of one process.
"""

from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lra.model import Encoder
from skeinformer.attention import METHODS, Attention
from skeinformer.attention.table import no_group
from skeinformer.checks import check_count
from skeinformer.distributed import Group


class Ranks(NamedTuple):
    """The place of a process in a run."""

    processes: int
    process: int
    sequence_parallel: int = 1
    """Processes among which a sequence is divided."""
    group: Group | None = None
    """The processes of this one's sequences; None where they are not divided."""

    @property
    def data_parallel(self) -> int:
        """Parts of a batch."""
        return self.processes // self.sequence_parallel

    @property
    def data_rank(self) -> int:
        """The part of a batch that this process takes, with the others of its group."""
        return self.process // self.sequence_parallel


def check_sequence_parallel(method: str, degree: int) -> None:
    """Raise a ValueError where a method cannot have its sequences divided among so many processes."""
    check_count("sequence_parallel", degree)
    if degree > 1 and (method not in METHODS or not METHODS[method].sequence_parallel):
        raise ValueError(f"--sequence-parallel {degree}: {no_group(method)}")


def form_ranks(processes: int, process: int, degree: int, device: str) -> Ranks:
    """Form the mesh, where sequences are divided; every process calls this."""
    if processes % degree:
        raise ValueError(
            f"--sequence-parallel {degree} needs a multiple of {degree} processes, and there "
            f"{'is 1' if processes == 1 else f'are {processes}'}: start them by torchrun --nproc-per-node {degree} "
            "-m lra train ..."
        )
    if degree == 1:
        return Ranks(processes, process)
    mesh = init_device_mesh(device, (processes // degree, degree), mesh_dim_names=("data", "sequence"))
    return Ranks(processes, process, degree, Group.of(mesh["sequence"]))


def set_sequence_group(model: nn.Module, group: Group | None) -> None:
    """Let the model divide its tokens among the group from now on; all ranks give it the same tokens."""
    for module in model.modules():
        if isinstance(module, Attention | Encoder):
            if group is not None and isinstance(module, Attention):
                module.method.check_group()
            module.group = group
