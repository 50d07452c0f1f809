"""The page about all methods is what METHODS and the docstrings say."""

import inspect
import re
from pathlib import Path

import pytest

from skeinformer.attention import METHODS
from skeinformer.attention.table import Entry
from skeinformer.lab.methods_page import COMMAND, escape, exact, main, masks, page, split_docstring, table

FILE = Path(__file__).parents[2] / "docs" / "methods.md"
PAGE = page()
SECTIONS = {part.partition("\n")[0]: part for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]}


def test_the_file_is_in_step() -> None:
    assert FILE.read_text(encoding="utf-8") == PAGE, f"METHODS or a docstring has changed: run {COMMAND}"


def test_the_first_line_says_how_it_is_made() -> None:
    assert COMMAND in PAGE.partition("\n")[0]


def test_every_method_has_a_section_and_a_line() -> None:
    assert list(SECTIONS) == list(METHODS)
    lines = re.findall(r"^\| \[`(\w+)`\]\(#(\w+)\) \|", PAGE, re.MULTILINE)
    assert lines == [(name, name) for name in METHODS]


@pytest.mark.parametrize("name", METHODS)
def test_a_section_says_what_the_registry_says(name: str) -> None:
    method, section = METHODS[name], SECTIONS[name]
    for text in (method.paper, method.cost, exact(method), masks(method)):
        assert escape(text) in section
    assert ("self- and cross-attention" in section) is method.cross_attention
    assert ("- Random, " in section) is method.random
    assert ("- Deterministic, " in section) is not method.random
    if not section.count("\nAs ["):  # the first row of its class
        first_line = (inspect.getdoc(method.method) or "").partition("\n")[0]
        assert first_line
        assert escape(first_line) in section
        own = {name for name in method.option_names() if name != "budget" or method.has_budget}
        assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == own
    for option, value in method.options.items():
        assert f"`{option}={value!r}`" in section or re.search(
            rf"^\| `{option}` .*`{re.escape(repr(value))}` \|", section, re.M
        )


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        if target.startswith("#"):
            assert target[1:] in SECTIONS
        else:
            assert (FILE.parent / target).is_file()


def test_rows_of_a_table_have_as_many_cells() -> None:
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_a_later_row_of_a_class_says_what_differs() -> None:
    first = METHODS["skeinformer_uniform"]
    second = Entry(
        first.method, "Two", "another", "Nobody 2000", "O(n)", options={"reuse_pilots": False, "num_pilots": 3}
    )
    text = page({"one": first, "two": second})
    assert "As [`one`](#one), with `num_pilots=3`, `columns='importance'`, `reuse_pilots=False`." in text


def test_arguments_of_a_docstring_are_a_column_of_the_table() -> None:
    text = "What.\n\nMore.\n\nArgs:\n    a: One\n        line.\n    b: Two.\n\nRaises:\n    ValueError: Never."
    assert split_docstring(text) == ("What.\n\nMore.", {"a": "One line.", "b": "Two."})
    assert split_docstring("What.\n\nMore.") == ("What.\n\nMore.", {})
    assert "| `first_order` | bool | `True` | Whether to add the linear term" in SECTIONS["cluster"]


def test_markdown_does_not_swallow_text() -> None:
    assert escape("a * b < c~, `x * y`\n\n    code * code") == r"a \* b \< c\~, `x * y`" + "\n\n    code * code"
    assert table(("a",), [("|v|",)]).splitlines()[-1] == r"| \|v\| |"


def test_it_is_written_to_the_file_given(tmp_path: Path) -> None:
    main([str(tmp_path / "page.md")])
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == PAGE
    with pytest.raises(SystemExit, match="expected one file"):
        main([])
