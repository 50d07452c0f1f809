"""The checkpoint of a run: one file, written completely or not at all, and read without running any of it.

It has what a run needs to continue to the same bits: weights, the best weights so far, the optimizer's state, the
random state of every process, and the progress. The step alone decides the learning rate and the next batch.
"""

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lra.records import Record

FILE = "checkpoint.pt"
Checkpoint = dict[str, Any]


@dataclass
class State:
    """Where a run stands; with the weights, the optimizer and random states, all that a checkpoint has."""

    step: int = 0
    best_step: int = 0
    best_accuracy: float = -1.0
    best_loss: float = math.inf
    checks_since_best: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    compile_seconds: float = 0.0
    check_seconds: float = 0.0
    examples: int = 0
    micro_batch: int = 0
    started: str = ""
    records: list[Record] = field(default_factory=list)


def save(folder: Path, checkpoint: Checkpoint) -> None:
    """Replace the checkpoint of the run in `folder`."""
    temporary = folder / f".{FILE}.part"
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / FILE)


def load(folder: Path) -> Checkpoint | None:
    """Read the checkpoint of the run in `folder`, None where there is none; a ValueError names a damaged file."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        checkpoint: Checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        if not isinstance(checkpoint, dict) or "progress" not in checkpoint:
            raise ValueError("it has no progress")
    except Exception as error:  # damage has many forms
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"{path} cannot be read ({reason}); remove it to start this run from step 0") from None
    return checkpoint


def remove(folder: Path) -> None:
    """Remove the checkpoint, and what a kill left of one."""
    for name in (FILE, f".{FILE}.part"):
        (folder / name).unlink(missing_ok=True)


def random_state() -> dict[str, Any]:
    """Return the states of torch's generators in this process: the CPU's and each GPU's."""
    gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"cpu": torch.get_rng_state(), "cuda": gpus}


def set_random_state(state: dict[str, Any]) -> None:
    """Set what `random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
