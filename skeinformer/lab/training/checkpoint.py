"""Checkpoints: a folder per step, whole or not there, of safetensors and JSON. No pickle is ever loaded.

What a run needs to go on to the same numbers: weights, the best weights so far, the optimizer's moments, the random
states of every process and the step. The step decides the learning rate and the next batch (`recipes.learning_rate`,
`lra.batches.Order`), so neither a scheduler nor a sampler has a state of its own.
"""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor

from skeinformer.lab.files import sync_folder, synced

Tensors = dict[str, Tensor]
NAME = re.compile(r"checkpoint-(\d+)")


class Checkpoint(NamedTuple):
    """What `load` gives back."""

    weights: Tensors
    best: Tensors
    optimizer: Tensors
    random: Tensors
    state: dict[str, Any]


def save(
    run: Path,
    step: int,
    *,
    weights: Mapping[str, Tensor],
    best: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, object],
    process: int = 0,
    barrier: Any = lambda: None,
) -> None:
    """Write the checkpoint of `step` beside the last one, then remove that one. Every process calls this."""
    part = run / f".checkpoint-{step}.part"
    if process == 0:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    barrier()
    _write_tensors(part / f"random-{process}.safetensors", random_state())
    if process == 0:
        _write_tensors(part / "weights.safetensors", weights)
        _write_tensors(part / "best.safetensors", best)
        _write_tensors(part / "optimizer.safetensors", optimizer_tensors(optimizer))
        with synced(part / "state.json") as file:
            file.write(json.dumps(state, allow_nan=False).encode())
    barrier()
    if process == 0:
        whole = run / f"checkpoint-{step}"
        shutil.rmtree(whole, ignore_errors=True)
        part.rename(whole)
        sync_folder(run)
        remove(run, but=step)


def latest(run: Path) -> Path | None:
    """The newest whole checkpoint in `run`, or None."""
    found = {int(match[1]): path for path in run.glob("checkpoint-*") if (match := NAME.fullmatch(path.name))}
    return found[max(found)] if found else None


def load(path: Path, process: int = 0) -> Checkpoint:
    """Read a checkpoint. A file that is damaged or missing is a ValueError that names it."""
    names = ["weights", "best", "optimizer", f"random-{process}"]
    tensors = []
    for name in names:
        file = path / f"{name}.safetensors"
        try:
            tensors.append(load_file(file))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read ({error}); remove {path.name} to start this run anew") from error
    try:
        state = json.loads((path / "state.json").read_bytes())
    except (ValueError, OSError) as error:
        raise ValueError(f"{path / 'state.json'} cannot be read; remove {path.name} to start this run anew") from error
    weights, best, optimizer, random = tensors
    return Checkpoint(weights, best, optimizer, random, state)


def remove(run: Path, but: int | None = None) -> None:
    """Remove all checkpoints of a run but that of one step, and what a kill left of one."""
    for path in [*run.glob("checkpoint-*"), *run.glob(".checkpoint-*.part")]:
        if path.name != f"checkpoint-{but}":
            shutil.rmtree(path, ignore_errors=True)


def random_state() -> Tensors:
    """The states of torch's generators in this process: the CPU's and each GPU's. Nothing else here draws."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda-{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def set_random_state(states: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    gpus = [states[name] for name in sorted(states) if name.startswith("cuda-")]
    if gpus and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(gpus)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> Tensors:
    """The optimizer's state, flat: "<parameter>.<name>"."""
    state: dict[int, dict[str, Tensor]] = optimizer.state_dict()["state"]
    return {f"{index}.{name}": value for index, values in state.items() for name, value in values.items()}


def set_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, part = name.partition(".")
        state.setdefault(int(index), {})[part] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with synced(path) as file:
        file.write(to_bytes(plain))
