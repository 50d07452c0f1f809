"""What each process of a run takes: a share of every batch, and with sequence parallelism a share of every sequence.

Processes form a mesh of data x sequence. Those of one row hold the same examples, whose tokens they divide; rows divide
the batch. Each process computes the loss of its row's examples, whole, so that the mean of all gradients, which
DistributedDataParallel takes, is the gradient of one process.
"""

from typing import NamedTuple

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from skeinformer.attention import Attention
from skeinformer.distributed import Group
from skeinformer.lab.training.model import Encoder


class Ranks(NamedTuple):
    """The place of a process in a run."""

    processes: int
    process: int
    degree: int = 1
    """Processes among which a sequence is divided."""
    group: Group | None = None
    """Those of this process's sequences; None where they are not divided."""

    @property
    def rows(self) -> int:
        """Parts of a batch."""
        return self.processes // self.degree

    @property
    def row(self) -> int:
        """The part that this process takes, with others of its group."""
        return self.process // self.degree


def form_ranks(processes: int, process: int, degree: int, device: str) -> Ranks:
    """The mesh, where sequences are divided; every process calls this."""
    if processes % degree:
        raise ValueError(
            f"--sequence-parallel {degree} needs a multiple of {degree} processes, and there "
            f"{'is 1' if processes == 1 else f'are {processes}'}: start them by torchrun --nproc-per-node {degree} "
            "-m skeinformer train ..."
        )
    if degree == 1:
        return Ranks(processes, process)
    mesh = init_device_mesh(device, (processes // degree, degree), mesh_dim_names=("data", "sequence"))
    return Ranks(processes, process, degree, Group.of(mesh["sequence"]))


def divide(model: nn.Module, group: Group | None) -> None:
    """From now on the model divides the tokens that it is given among the group; all ranks give it the same."""
    for module in model.modules():
        if isinstance(module, Attention | Encoder):
            if group is not None and isinstance(module, Attention):
                module.method.check_group()
            module.group = group
