"""The benchmarks need their extra; METHODS is restored after each test."""

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from skeinformer.attention import METHODS

if TYPE_CHECKING:
    from rich.console import Console


@pytest.fixture(autouse=True)
def _methods() -> Iterator[None]:
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


@pytest.fixture
def console() -> "Console":
    from rich.console import Console

    return Console(file=io.StringIO(), width=120)
