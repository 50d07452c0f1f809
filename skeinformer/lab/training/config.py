"""Sizes of the model that is trained on the Long Range Arena."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skeinformer.attention import DEFAULT
from skeinformer.checks import check_count, check_number


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model and the attention in it; the defaults are the paper's."""

    vocab_size: int
    num_classes: int
    max_len: int
    """The longest sequence: there is a learned position for each token."""
    method: str = DEFAULT
    """A name in METHODS."""
    budget: int | None = 256
    """The sketch size d; None where an option sets the size."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the method, beside its budget."""
    num_layers: int = 2
    dim: int = 64
    num_heads: int = 2
    feedforward_dim: int = 128
    classifier_dim: int = 128
    """The width of the classifier's hidden layer."""
    dropout: float = 0.1
    seed: int | None = 0
    """Of the attention's draws in evaluation, each layer with its own; None draws anew at every call."""


def check_config(config: ModelConfig) -> None:
    """Raise where a size is not possible."""
    for name in (
        "vocab_size",
        "num_classes",
        "max_len",
        "num_layers",
        "dim",
        "num_heads",
        "feedforward_dim",
        "classifier_dim",
    ):
        check_count(name, getattr(config, name))
    if config.dim % config.num_heads:
        raise ValueError(
            f"dim={config.dim} is not a multiple of num_heads={config.num_heads}; each head has the same width"
        )
    if not 0 <= check_number("dropout", config.dropout, "at least 0 and below 1") < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {config.dropout}")
