"""A saved model from a stranger: config.json against the weights beside it, before anything is built.

Sizes that the weights do not have, fields that are not known or of another type, and tensors of another name or shape
are ValueErrors that name file and field. No config makes this process build more than the weights file holds.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from skeinformer.lab.fields import from_json
from skeinformer.lab.files import parse_json, read_at_most
from skeinformer.lab.training.config import ModelConfig, check_config

CONFIG, WEIGHTS = "config.json", "model.safetensors"
LONGEST_CONFIG = 1 << 20
LARGEST_OPTION = 1 << 20  # of a budget and of whole numbers among the options, which no weight bounds
Shape = tuple[int, ...]
# a field of the config -> the tensor that shows it, and its axis
IN_ENCODER = {
    "dim": ("positions", 1),
    "max_len": ("positions", 0),
    "vocab_size": ("tokens.weight", 0),
    "feedforward_dim": ("layers.0.feedforward.0.weight", 0),
}
IN_HEAD = {"classifier_dim": ("head.0.weight", 0), "num_classes": ("head.2.weight", 0)}


class Files(NamedTuple):
    """Of a saved model."""

    config: Path
    weights: Path


def saved_files(folder: Path) -> Files | None:
    """The files in a folder; None where there is no such folder."""
    if not folder.is_dir():
        return None
    for path in (found := Files(folder / CONFIG, folder / WEIGHTS)):
        if not path.is_file():
            raise FileNotFoundError(f"there is no {path}; a saved model has {CONFIG} and {WEIGHTS}")
    return found


def hub_files(name: str, **options: Any) -> Files:
    """The files of a repository, downloaded."""
    from huggingface_hub import hf_hub_download

    return Files(*(Path(str(hf_hub_download(repo_id=name, filename=file, **options))) for file in (CONFIG, WEIGHTS)))


def read_config(path: Path, weights: Path) -> ModelConfig:
    """The config in the file `path`, if its sizes are those of the weights in the other."""
    with path.open("rb") as file:
        data = parse_json(read_at_most(file, LONGEST_CONFIG, path), path)
    config = from_json(ModelConfig, data, path)
    try:
        check_config(config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    for name, value in {"budget": config.budget, **config.options}.items():
        if isinstance(value, int) and abs(value) > LARGEST_OPTION:
            raise ValueError(f"{path}, field {name!r} is {value}, more than {LARGEST_OPTION:,}")
    _check_sizes(config, path, shapes_in(weights), weights)
    return config


def shapes_in(weights: Path) -> dict[str, Shape]:
    """The shapes of the tensors in a safetensors file, by its header, which is checked against the size of the file."""
    try:
        with safe_open(weights, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{weights} cannot be read as safetensors: {error}") from None


def check_tensors(own: Mapping[str, Tensor], weights: Path) -> None:
    """A ValueError that names a tensor of the file that is missing, not known, or of another shape than the model's."""
    found = shapes_in(weights)
    for name in sorted(found.keys() ^ own.keys()):
        what = f"has no tensor {name!r}" if name in own else f"has a tensor {name[:80]!r}, which the model has not"
        raise ValueError(f"{weights} {what}")
    for name, shape in found.items():
        if shape != tuple(own[name].shape):
            raise ValueError(f"{weights}: tensor {name!r} has shape {shape}, expected {tuple(own[name].shape)}")


def load_weights(model: nn.Module, weights: Path) -> None:
    """Set all parameters and buffers of the model to those of a file that `check_tensors` has seen."""
    tensors: dict[str, Tensor] = load_file(weights)
    for name, own in model.state_dict().items():
        if tensors[name].dtype != own.dtype:
            raise ValueError(f"{weights}: tensor {name!r} is of {tensors[name].dtype}, expected {own.dtype}")
    model.load_state_dict(tensors)


def _check_sizes(config: ModelConfig, path: Path, shapes: Mapping[str, Shape], weights: Path) -> None:
    prefix = "" if "positions" in shapes else "encoder."
    shown = {field: (prefix + name, axis) for field, (name, axis) in IN_ENCODER.items()}
    for field, (name, axis) in {**shown, **(IN_HEAD if "head.0.weight" in shapes else {})}.items():
        shape = shapes.get(name, ())
        if len(shape) != 2:
            raise ValueError(f"{weights} has no tensor {name!r} with two axes, which a model has")
        if getattr(config, field) != shape[axis]:
            had = f"{name} in {weights.name} has {shape[axis]}"
            raise ValueError(f"{path}, field {field!r} is {getattr(config, field)}, but {had}")
    start = f"{prefix}layers."
    layers = len({name.removeprefix(start).partition(".")[0] for name in shapes if name.startswith(start)})
    if config.num_layers != layers:
        raise ValueError(f"{path}, field 'num_layers' is {config.num_layers}, but {weights.name} has {layers} layers")
