"""Sketched self-attention: softmax attention over long sequences in linear time, with a measured error."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skeinformer import distributed, nn
from skeinformer.attention import (
    METHODS,
    Attention,
    ClusterInfo,
    ClusterNoise,
    SkeinInfo,
    SkeinNoise,
    build,
    choose_budget,
    cluster_attention,
    skein_attention,
)
from skeinformer.compare import apply, compare
from skeinformer.nn.convert import Conversion, convert, restore
from skeinformer.nn.functional import scaled_dot_product_attention
from skeinformer.nn.scope import sketched
from skeinformer.nn.verdict import Verdict
from skeinformer.sketch import SKETCHES, Sketch, draw

__version__ = "0.2.0"

__all__ = [
    "METHODS",
    "SKETCHES",
    "Attention",
    "ClusterInfo",
    "ClusterNoise",
    "Conversion",
    "SkeinInfo",
    "SkeinNoise",
    "Sketch",
    "Verdict",
    "apply",
    "build",
    "choose_budget",
    "cluster_attention",
    "compare",
    "convert",
    "distributed",
    "draw",
    "nn",
    "restore",
    "scaled_dot_product_attention",
    "skein_attention",
    "sketched",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """`skeinformer.huggingface` is loaded when it is asked for; without transformers its error names the extra."""
        if name == "huggingface":
            return import_module("skeinformer.huggingface")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
