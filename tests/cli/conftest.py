"""Fixtures of the tests of the command: a console that is a pipe, and a method in a file of the user's."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from skeinformer.attention import METHODS

if TYPE_CHECKING:
    from rich.console import Console

MINE = '''
from skeinformer.attention import Method
from skeinformer.attention.base import Trace


class MyMethod(Method):
    """The mean of the first values."""

    budget: int = 8
    power: float = 1.0

    def attend(self, inputs, noise):
        mean = inputs.value[:, :, : self.budget].mean(-2, keepdim=True)
        return self.power * mean.expand_as(inputs.query), Trace()
'''


@pytest.fixture
def console() -> "Console":
    from rich.console import Console

    return Console(file=io.StringIO(), width=100, highlight=False, _environ={})


def printed(console: "Console") -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def my_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module with a method of the user's, in the current folder; METHODS is restored afterwards."""
    (tmp_path / "mine_of_tests.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(METHODS)
    yield "mine_of_tests"
    METHODS.clear()
    METHODS.update(before)
