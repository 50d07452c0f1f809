"""The one choice of the device that is measured."""

from typing import Literal

import torch

from skeinformer.lab.records import Record

Device = Literal["cpu", "cuda"]


def check_device(name: Device) -> None:
    """Raise a ValueError where torch has no such device here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            f"--device cuda: torch {torch.__version__} finds no GPU; call it where there is one, with a build of torch "
            "for it, or leave out --device to measure on the CPU"
        )


def device_field(name: str) -> Record:
    """How records name the device: a CPU not at all, as in records that are older than the choice."""
    return {} if name == "cpu" else {"device": name}
