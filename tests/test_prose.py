"""Prose that a practitioner reads has short sentences: at most 30 words, but for those that are named here."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
PAGES = [*GUIDES, *sorted((ROOT / "docs").glob("*.md"))]
LONGEST = 30
# beginnings of sentences that need more words, by page
NEEDED = {
    "docs/cluster.md": ("The same command measures three", "Forward and backward together took"),
    "docs/lra.md": ("You can train every attention", "With d = 16 Skeinformer, uniform", "A longer run does not mend"),
    "docs/methods.md": ("Code is what keys and values get",),
    "docs/theory.md": ("B = D^-1 A =", "Three numbers are of the head"),  # letters, and what a table has
}
MACHINE = "Measured on "  # what a command writes about the machine below its table
# each line, or all lines together, are no prose: code, comments, tables, headings, directives
NOT_PROSE = re.compile(r"^ *```.*?^ *``` *$|<!--.*?-->|^(?: *(?:\||#|:::)| {4}).*?$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"\n\s*\n|\n(?= *(?:[-*]|\d+\.) )")
LINK = re.compile(r"!?\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\([^)]*\)")
END = re.compile(r"""(?<=[.?!:])[)*"]*\s+(?=[A-Z0-9*("])(?!\d+ ?[),])""")


def sentences(text: str) -> Iterator[str]:
    """Those of the paragraphs and list items of a page; a piece of code is one word, and a link its text."""
    for item in ITEM.split(NOT_PROSE.sub("\n", text)):
        plain = LINK.sub(r"\1", re.sub(r"^ *(?:[-*]|\d+\.) ", "", item))
        yield from END.split(" ".join(re.sub(r"`[^`]*`", "Code", plain).split()))


def words(sentence: str) -> int:
    """Signs, as in a = b, are no words."""
    return sum(any(map(str.isalnum, word)) for word in sentence.split())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_sentences_are_short(page: Path) -> None:
    needed = (MACHINE, *NEEDED.get(page.relative_to(ROOT).as_posix(), ()))
    found = [sentence for sentence in sentences(page.read_text()) if words(sentence) > LONGEST]
    assert [sentence for sentence in found if not sentence.startswith(needed)] == []


def test_sentences_are_found() -> None:
    text = (
        "# A title\n\nOne `a b c` is [a b](x.md#y). Two = 2\ngoes on: `f` too.\n- Three.\n\n| no | prose |\n\n    no\n"
    )
    assert [sentence for sentence in sentences(text) if sentence] == [
        "One Code is a b.",
        "Two = 2 goes on:",
        "Code too.",
        "Three.",
    ]
    assert words("Two = 2 goes on:") == 4
