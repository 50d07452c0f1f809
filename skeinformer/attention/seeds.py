"""The seed of each layer of a model: one rule, wherever layers are made."""

from typing import TypeVar

LAYERS = 1009  # above the number of layers: seeds of one model are not those of another

S = TypeVar("S")


def layer_seed(seed: S, layer: int) -> S | int:
    """`seed * 1009 + layer` for a whole number; anything else as it is: None draws anew, what is wrong is told later."""
    return seed * LAYERS + layer if type(seed) is int else seed
