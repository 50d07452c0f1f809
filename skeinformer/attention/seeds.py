"""The seed of each layer of a model: one rule, wherever layers are made."""

LAYERS = 1009  # above the number of layers: seeds of one model are not those of another


def layer_seed(seed: int | None, layer: int) -> int | None:
    """`seed * 1009 + layer`. None, which draws anew, stays None, and what is no whole number is left to be refused."""
    return seed * LAYERS + layer if type(seed) is int else seed
