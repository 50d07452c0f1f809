"""The one setting of torch's number of threads."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from skeinformer.checks import check_count


def use_threads(number: int | None) -> None:
    """Tell torch how many threads to use; None leaves it its own choice."""
    if number is not None:
        check_count("threads", number)
        torch.set_num_threads(number)


@contextmanager
def with_threads(number: int | None) -> Iterator[None]:
    """The same within, and as before afterwards."""
    before = torch.get_num_threads()
    use_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
