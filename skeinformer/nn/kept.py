"""What is made once and found by a name: a compiler takes the name as a constant, and not a module, nor its making."""

from collections.abc import Callable, Hashable
from itertools import count
from types import SimpleNamespace
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

MOST = 1024  # that are kept: every seed of a call makes a module for each layer
KEPT = SimpleNamespace()
NAMES: dict[Hashable, str] = {}  # of what is kept, the oldest first
_numbers = count()  # never the same again: a compiled graph may still look for an old name


def keep(arguments: Hashable, make: Callable[[], object]) -> str:
    """The name in KEPT of what `make` makes, once for the same arguments. To these True is 1, and 8 is 8.0."""
    if arguments not in NAMES:
        made = make()
        while len(NAMES) >= MOST:
            delattr(KEPT, NAMES.pop(next(iter(NAMES))))
        NAMES[arguments] = f"kept_{next(_numbers)}"
        setattr(KEPT, NAMES[arguments], made)
    return NAMES[arguments]


def constant_of_a_graph(function: Callable[P, R]) -> Callable[P, R]:
    """`torch.compiler.assume_constant_result`, which would load the compiler already when a file is imported."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
