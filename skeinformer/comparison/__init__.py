"""Exact and sketched attention compared in the user's own model on the user's own inputs."""

from skeinformer.comparison.result import Comparison
from skeinformer.comparison.run import compare

__all__ = ["Comparison", "compare"]
