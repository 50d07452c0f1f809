"""Processes that a test started."""

import multiprocessing
from multiprocessing.process import BaseProcess

OF_THE_POOL = "rank "  # how the names begin of the ranks that all tests of one session share


def children() -> list[BaseProcess]:
    """Those that live, without the ranks of the tests' own pool."""
    return [child for child in multiprocessing.active_children() if not child.name.startswith(OF_THE_POOL)]
