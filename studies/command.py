"""What studies share that are started by `python -m studies.NAME`: arguments, and errors in one line."""

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from skeinformer.lab.cli import guard, read_options

Options = TypeVar("Options")


def start(kind: type[Options], run: Callable[[Options], object], arguments: Sequence[str] | None = None) -> int:
    """Read the options from the command line and run; the exit status and the errors are as those of `skein`."""
    name = module_name(kind)

    def work() -> int:
        run(read_options(kind, f"python -m {name}", sys.argv[1:] if arguments is None else arguments))
        return 0

    return guard(work, name)


def module_name(kind: type) -> str:
    """The module of a class, by its own name also where it is the one that `python -m` runs."""
    spec = getattr(sys.modules[kind.__module__], "__spec__", None)
    return kind.__module__ if spec is None else str(spec.name)
