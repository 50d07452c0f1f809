"""Sketched self-attention: softmax attention over long sequences in linear time, with a measured error."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from skeinformer import distributed
from skeinformer.attention import (
    METHODS,
    Attention,
    adaptive_attention,
    build,
    choose_budget,
    cluster_attention,
    skein_attention,
)
from skeinformer.sketch import SKETCHES, Sketch, draw

__version__ = "0.3.0.dev0"

__all__ = [
    "METHODS",
    "SKETCHES",
    "Attention",
    "Comparison",
    "MultiheadAttention",
    "Sketch",
    "adaptive_attention",
    "build",
    "choose_budget",
    "cluster_attention",
    "compare",
    "convert",
    "distributed",
    "draw",
    "restore",
    "scaled_dot_product_attention",
    "skein_attention",
    "sketched",
]

if TYPE_CHECKING:
    from skeinformer import huggingface as huggingface
    from skeinformer.comparison import Comparison, compare
    from skeinformer.models import MultiheadAttention, convert, restore, scaled_dot_product_attention, sketched
else:
    _MODELS = ("MultiheadAttention", "convert", "restore", "scaled_dot_product_attention", "sketched")
    _MODULES = {**dict.fromkeys(_MODELS, "models"), **dict.fromkeys(("Comparison", "compare"), "comparison")}

    def __getattr__(name: str) -> Any:
        """Load what changes or compares models when it is used; without transformers `huggingface` names the extra."""
        if name == "huggingface":
            return import_module("skeinformer.huggingface")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"skeinformer.{_MODULES[name]}"), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
