"""What the certificate has to know of a call over shares."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from skeinformer.distributed.selection import Chosen


class SharedTrace(NamedTuple):
    """What was chosen, and how `describe` gets it: by the places of the chosen rows among the tokens of all ranks."""

    chosen: tuple[Chosen, ...]
    """The pilots, if any, are the first."""
    starts: tuple[int, ...]
    """Where this rank's share begins, for each of them."""
    finish: Callable[..., Any]
    """From a Selection for each of them, and where there is a `log_probability` its sum's log, what `found` is."""
    log_probability: Tensor | None = None  # (b, h, n_k), of this rank's keys
