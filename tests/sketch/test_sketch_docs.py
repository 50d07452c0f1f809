"""The page about sketches: its examples run, and its table is the registry."""

import re
from pathlib import Path

from skeinformer.sketch import SKETCHES

PAGE = (Path(__file__).parents[2] / "docs" / "sketches.md").read_text()


def test_examples_run() -> None:
    namespace: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(block, namespace)
    assert namespace["again"].shape == (1000, 32)


def test_the_table_is_the_registry() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    assert [row[0].strip("`") for row in rows] == list(SKETCHES)
    for (_, _, paper, _, options), family in zip(rows, SKETCHES.values(), strict=True):
        assert paper == family.paper
        assert re.findall(r"`(\w+)`", options) == list(family.defaults)
