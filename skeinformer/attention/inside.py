"""Whether this thread is inside one of our attentions: what it asks of the fused kernel there is not the model's call.

`skeinformer.sketched` sees every call of `scaled_dot_product_attention`, those that a method makes over its virtual
keys included. By this it tells the two apart.
"""

import threading


class _Inside(threading.local):
    def __init__(self) -> None:  # in every thread; a compiler would not see a default of the class become an attribute
        self.now = False


_inside = _Inside()


def is_inside() -> bool:
    """Whether an attention of ours is being computed, by this thread."""
    return _inside.now


def set_inside(now: bool) -> bool:
    """Say whether it is; returns what was said before, to be set again afterwards."""
    before = _inside.now
    _inside.now = now
    return before
