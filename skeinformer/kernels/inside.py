"""Whether this thread is inside one of our attentions: what it asks of the fused kernel there is not the model's call.

`skeinformer.sketched` sees every call of `scaled_dot_product_attention`, those that a method makes over its virtual
keys included. By this it tells the two apart.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Inside(threading.local):
    def __init__(self) -> None:  # in every thread; a compiler would not see a default of the class become an attribute
        self.now = False


_inside = _Inside()


def is_inside() -> bool:
    """Whether an attention of ours is being computed, by this thread."""
    return _inside.now


@contextmanager
def inside() -> Iterator[None]:
    """Within, an attention of ours is being computed."""
    before, _inside.now = _inside.now, True
    try:
        yield
    finally:
        _inside.now = before
