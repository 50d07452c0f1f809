"""`skein methods`: every method, in a pipe of 80 columns."""

import io

from rich.console import Console

from skeinformer.attention import METHODS
from skeinformer.cli.methods import Methods


def test_the_table_fits_a_pipe() -> None:
    file = io.StringIO()
    Methods().run(Console(file=file, highlight=False, _environ={}))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert set(METHODS) <= {line.split()[0] for line in lines if line.strip()}
    assert "…" not in file.getvalue()
