"""Sketched self-attention: softmax attention over long sequences in linear time, with a measured error."""

from skeinformer.attention import (
    METHODS,
    Attention,
    SkeinInfo,
    SkeinNoise,
    build,
    choose_num_samples,
    skein_attention,
)
from skeinformer.sketch import SKETCHES, Sketch, draw

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "SKETCHES",
    "Attention",
    "SkeinInfo",
    "SkeinNoise",
    "Sketch",
    "build",
    "choose_num_samples",
    "draw",
    "skein_attention",
]
