"""`skein methods`: every method, in a pipe of 80 columns and as JSON."""

import json

import pytest

from skeinformer.attention import METHODS
from skeinformer.cli.methods import Methods


def test_json_has_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    Methods(json=True).run()
    table = json.loads(capsys.readouterr().out)
    assert list(table) == list(METHODS)
    assert table["softmax"]["exact"] == "always"
    assert table["cluster"]["label"] == METHODS["cluster"].label
