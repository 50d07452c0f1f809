"""Sketched attention in models of torch: a layer that stands in for torch's, and models converted and restored."""

from skeinformer.nn.attention import MultiheadAttention
from skeinformer.nn.convert import Conversion, convert, restore

__all__ = ["Conversion", "MultiheadAttention", "convert", "restore"]
