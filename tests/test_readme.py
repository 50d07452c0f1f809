"""The documentation tells the truth: its Python examples run as written, and the make targets it names exist.

A block that opens with ```python is run; ```python no-run is only shown. The blocks of one file share a namespace, so
that a later example may use what an earlier one made.
"""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?P<indent> *)```python *\n(?P<code>.*?)^(?P=indent)``` *$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^ *```.*?^ *``` *$|^    [^\n]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)


def blocks(text: str) -> list[tuple[int, str]]:
    """The Python blocks of a page, each with the number of the lines before it."""
    found = []
    for match in BLOCK.finditer(text):
        lines = match["code"].splitlines(keepends=True)
        code = "".join(line.removeprefix(match["indent"]) for line in lines)
        found.append((text.count("\n", 0, match.start("code")), code))
    return found


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for lines_before, code in blocks(page.read_text()):
        exec(compile("\n" * lines_before + code, str(page), "exec"), namespace)


def test_the_readme_has_examples() -> None:
    assert blocks((ROOT / "README.md").read_text())


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(CODE.findall(page.read_text()))
    assert set(re.findall(r"\bmake ([a-z][\w-]*)", code)) <= targets


def test_blocks_are_found_with_their_lines() -> None:
    text = "a\n```python\nx = 1\n```\n```python no-run\nx = 2\n```\n- item\n  ```python\n  if x:\n      y = 3\n  ```\n"
    assert blocks(text) == [(2, "x = 1\n"), (9, "if x:\n    y = 3\n")]
