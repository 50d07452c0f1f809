"""Checkpoints: a folder per step, whole or not there, of safetensors and JSON. No pickle is ever loaded.

What a run needs to go on to the same numbers: weights, the best weights so far, the optimizer's moments, the random
states of every process and the step. The step decides the learning rate and the next batch (`recipes.learning_rate`,
`lra.batches.Order`), so neither a scheduler nor a sampler has a state of its own.

`state.json` is written last and holds the sha256 of every other file and of itself: a bit that was flipped anywhere is
found when the checkpoint is read.
"""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as from_bytes
from safetensors.torch import save as to_bytes
from torch import Tensor

from skeinformer.lab.files import open_plain, remove_any, seal, sha256_of, sync_folder, synced, unseal

Tensors = dict[str, Tensor]
NAME = re.compile(r"checkpoint-(\d+)")
GENERATOR = re.compile(r"cpu|cuda-\d+")
STATE = "state.json"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # of AdamW, for each parameter that had a gradient


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
    barrier: Callable[[], None] = lambda: None,
) -> None:
    """Write the checkpoint of `step` beside the last one, then remove that one. Every process calls this."""
    part = run / f".checkpoint-{step}.part"
    if process == 0:
        run.mkdir(parents=True, exist_ok=True)
        remove_any(part)
        part.mkdir()  # fails where somebody has put a link
    barrier()
    _write_tensors(part / f"random-{process}.safetensors", random_state())
    if process == 0:
        _write_tensors(part / "weights.safetensors", weights)
        _write_tensors(part / "best.safetensors", best)
        _write_tensors(part / "optimizer.safetensors", optimizer_tensors(optimizer))
    barrier()
    if process == 0:
        checksums = {path.name: sha256_of(path) for path in sorted(part.iterdir())}
        with synced(part / STATE) as file:
            file.write(seal({"progress": state, "checksums": checksums}))
        sync_folder(part)
        whole = run / f"checkpoint-{step}"
        remove_any(whole)
        part.rename(whole)
        sync_folder(run)
        remove(run, but=step)


def newest_whole(run: Path) -> Path | None:
    """The newest whole checkpoint in `run`, or None."""
    found = {int(match[1]): path for path in run.glob("checkpoint-*") if (match := NAME.fullmatch(path.name))}
    return found[max(found)] if found else None


def load(path: Path, process: int = 0) -> Checkpoint:
    """Read a checkpoint. A file that is damaged, altered or missing is a ValueError that names it and what to do."""
    state = load_state(path)
    checksums = state["checksums"]
    found = []
    for name in ("weights", "best", "optimizer", f"random-{process}"):
        file = path / f"{name}.safetensors"
        content = _read(file)
        if hashlib.sha256(content).hexdigest() != checksums.get(file.name):
            raise ValueError(anew(file, "was altered: its checksum differs"))
        try:
            found.append(from_bytes(content))
        except SafetensorError as error:
            raise ValueError(anew(file, f"cannot be read ({error})")) from error
    weights, best, optimizer, random = found
    return Checkpoint(weights, best, optimizer, random, state["progress"])


def load_state(path: Path) -> dict[str, Any]:
    """The fields `progress` and `checksums` of a checkpoint's state, which was written after all other files."""
    file = path / STATE
    content = _read(file)
    try:
        state = unseal(content, file)
    except ValueError as error:
        raise ValueError(anew(file, str(error).removeprefix(f"{file} "))) from error
    for name in ("progress", "checksums"):
        if not isinstance(state.get(name), dict):
            raise ValueError(anew(file, f"has no object {name!r}"))
    return state


def _read(file: Path) -> bytes:
    try:
        with open_plain(file) as opened:
            return opened.read()
    except OSError as error:
        raise ValueError(anew(file, f"cannot be read ({error.strerror})")) from error
    except ValueError as error:  # no plain file
        raise ValueError(anew(file, str(error).removeprefix(f"{file} "))) from error


def anew(file: Path, what: str) -> str:
    """What is wrong with a file of a checkpoint, and how to begin anew."""
    return f"{file} {what}; remove the folder {file.parent} to start this run anew"


def check_like(file: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """A ValueError that names the file and a tensor in it that has another name, shape or dtype than expected."""
    for name in sorted(found.keys() ^ expected.keys()):
        what = f"has no tensor {name!r}" if name in expected else f"has a tensor {name[:80]!r}, which is not expected"
        raise ValueError(anew(file, what))
    for name, tensor in found.items():
        own = expected[name]
        if tensor.shape != own.shape or tensor.dtype != own.dtype:
            shown = f"{tensor.dtype} {tuple(tensor.shape)}, expected {own.dtype} {tuple(own.shape)}"
            raise ValueError(anew(file, f"has the tensor {name!r} of {shown}"))


def remove(run: Path, but: int | None = None) -> None:
    """Remove all checkpoints of a run but that of one step, and what a kill left of one."""
    for path in [*run.glob("checkpoint-*"), *run.glob(".checkpoint-*.part")]:
        if path.name != f"checkpoint-{but}":
            remove_any(path)


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


def moments_like(optimizer: torch.optim.Optimizer, found: Mapping[str, Tensor]) -> Tensors:
    """What `optimizer_tensors` gives after a step in which the parameters that are named in `found` had a gradient."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    named = {name.partition(".")[0] for name in found}
    expected: Tensors = {}
    for index, parameter in enumerate(parameters):
        if str(index) in named:
            shapes = {"step": torch.zeros(()), "exp_avg": parameter, "exp_avg_sq": parameter}
            expected |= {f"{index}.{name}": shapes[name].detach() for name in MOMENTS}
    return expected


def set_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        index, _, part = name.partition(".")
        state.setdefault(int(index), {})[part] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def restore_run(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, process: int = 0) -> Tensors:
    """Set model, optimizer and random states to a checkpoint, and return its best weights.

    Everything is checked before anything is set.
    """
    found = load(path, process)
    like = {name: value.detach() for name, value in model.state_dict().items()}
    check_like(path / "weights.safetensors", found.weights, like)
    check_like(path / "best.safetensors", found.best, like)
    check_like(path / "optimizer.safetensors", found.optimizer, moments_like(optimizer, found.optimizer))
    _set_checked_random_state(path / f"random-{process}.safetensors", found.random)
    model.load_state_dict(found.weights)
    set_optimizer_tensors(optimizer, found.optimizer)
    return found.best


def _set_checked_random_state(file: Path, found: Mapping[str, Tensor]) -> None:
    """The CPU's state must be there; those of GPUs may be more or fewer, where a run has moved."""
    own = random_state()
    shared = {name: found[name] for name in found if name in own or not GENERATOR.fullmatch(name)}
    check_like(file, shared, {name: own[name] for name in own if name == "cpu" or name in found})
    try:
        set_random_state(found)
    except RuntimeError as error:
        set_random_state(own)
        raise ValueError(anew(file, f"holds no state of a generator ({error})")) from error


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    plain = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    with synced(path) as file:
        file.write(to_bytes(plain))
