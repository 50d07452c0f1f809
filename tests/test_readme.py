"""The documentation tells the truth: its examples run and print what it shows, and what it names exists.

A block that opens with ```python is run; ```python no-run is only shown, but it parses, and what it imports exists. The
blocks of one file share a namespace, so that a later example may use what an earlier one made. A ```text block that
follows a Python block is what that block prints.
"""

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import nullcontext, redirect_stdout, suppress
from importlib import import_module
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lra.__main__ import read_options as read_lra_options
from skeinformer.cli.app import commands as verbs
from skeinformer.cli.app import parse, read_options
from skeinformer.cli.pretrained import minilm_folder

ROOT = Path(__file__).parent.parent
MINILM = "sentence-transformers/all-MiniLM-L6-v2"  # in examples; the installed files take the place of a download
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]  # pages of the site include them
BLOCK = re.compile(
    r"^(?P<indent> *)```python *(?P<kind>no-run)? *\n(?P<code>.*?)^(?P=indent)``` *$"
    r"(?:\n\n(?P=indent)```text *\n(?P<printed>.*?)^(?P=indent)``` *$)?",
    re.MULTILINE | re.DOTALL,
)
CODE = re.compile(r"^ *```.*?^ *``` *$|^    [^\n]*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\]\((?P<target>[^()\s]+)\)")
HEADING = re.compile(r"^#+ +(?P<title>.+?) *$", re.MULTILINE)
COMMAND = re.compile(
    r"^(?:    |`)(?P<words>(?:skein [a-z]+ |python -m (?:benchmarks\.|lra )|python examples/)[^`\n]*)", re.MULTILINE
)


class Block(NamedTuple):
    """A Python block of a page."""

    line: int  # how many lines are before it
    code: str
    run: bool
    printed: str | None  # what the page says that it prints


def blocks(text: str) -> list[Block]:
    found = []
    for match in BLOCK.finditer(text):
        printed = match["printed"] and without(match["indent"], match["printed"])
        line = text.count("\n", 0, match.start("code"))
        found.append(Block(line, without(match["indent"], match["code"]), match["kind"] is None, printed))
    return found


def without(indent: str, text: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def slug(title: str) -> str:
    """The anchor of a heading, as Git hosts make it; the site makes the same (tests/test_site.py)."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^ *```.*?^ *``` *$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return {slug(match["title"]) for match in HEADING.finditer(text)}


def links(page: Path) -> Iterator[str]:
    """Where the page's links go, other hosts left out."""
    text = CODE.sub(
        lambda match: match[0] if match[0].startswith("`") and "\n" not in match[0] else "", page.read_text()
    )
    return (match["target"] for match in LINK.finditer(text) if "://" not in match["target"])


def commands(text: str) -> list[list[str]]:
    """The command lines of a page, split into words; those with a part left out ("...") are not for copying."""
    text = re.sub(r" *\\\n +", " ", text)
    found = (shlex.split(match["words"], comments=True) for match in COMMAND.finditer(text))
    return [words for words in found if not any("..." in word for word in words)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page.read_text())
    if any(block.run and MINILM in block.code for block in found):
        Path(MINILM).parent.mkdir()
        Path(MINILM).symlink_to(minilm_folder())
    torch.manual_seed(0)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for block in found:
        if block.run:
            with redirect_stdout(StringIO()) as printed:
                exec(compile("\n" * block.line + block.code, str(page), "exec"), namespace)
            if block.printed is not None:
                assert printed.getvalue() == block.printed, f"{name_of(page)}, line {block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_examples_that_are_only_shown_parse_and_import_what_exists(page: Path) -> None:
    for block in blocks(page.read_text()):
        tree = ast.parse(block.code)
        for node in ast.walk(tree) if not block.run else ():
            if isinstance(node, ast.Import):
                assert all(find_spec(name.name) for name in node.names)
            elif isinstance(node, ast.ImportFrom):
                module = import_module(str(node.module))
                for name in node.names:
                    assert hasattr(module, name.name) or find_spec(f"{node.module}.{name.name}"), name.name


@pytest.mark.parametrize("page", [*PAGES, *GUIDES], ids=name_of)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    code = "\n".join(CODE.findall(page.read_text()))
    assert set(re.findall(r"(?:^ *|`)make ([a-z][\w-]*)", code, re.MULTILINE)) <= targets


@pytest.mark.parametrize("page", [*PAGES, *GUIDES, ROOT / "CHANGELOG.md"], ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link
        if ROOT / "docs" in page.parents:  # the site has no other files; it shows the names of code as text
            assert target.suffix == ".py" or target in GUIDES or ROOT / "docs" in target.parents, link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_command_lines_are_understood(page: Path) -> None:
    for words in commands(page.read_text()):
        with suppress(SystemExit) if "--help" in words else nullcontext():
            if words[0] == "skein":
                assert words[1] in verbs()
                parse(words[1:])
            elif words[1:3] == ["-m", "lra"]:
                read_lra_options(words[3:])
            elif words[1] == "-m":
                module = import_module(words[2])
                for kind in [x for x in vars(module).values() if isinstance(x, type) and x.__module__ == words[2]]:
                    if hasattr(kind, "run"):
                        read_options(kind, words[2], words[3:])
            else:
                assert (ROOT / words[1]).is_file(), words
