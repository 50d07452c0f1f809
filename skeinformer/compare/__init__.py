"""Exact and sketched attention side by side, in the user's own model on the user's own inputs; the verdict applied."""

from skeinformer.compare.apply import apply
from skeinformer.compare.result import Comparison
from skeinformer.compare.run import compare

__all__ = ["Comparison", "apply", "compare"]
