"""What `--help` says of an option begins with a verb or a noun, and says all by itself."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAB = ROOT / "skeinformer" / "lab"
# those of `skein` and `skein data`, of training, and of the studies
FILES = [
    *sorted((LAB / "commands").glob("*.py")),
    LAB / "training" / "options.py",
    LAB / "lra" / "prepare.py",
    LAB / "lra" / "listops.py",
    LAB / "lra" / "snakes.py",
    *sorted((ROOT / "studies").glob("*.py")),
]
# with these a text only goes on from the name of its option: "Of the model."
BEGINNINGS = {"among", "around", "as", "at", "between", "by", "d", "each", "for", "from", "how", "in", "n", "of"}
BEGINNINGS |= {"only", "or", "that", "what", "when", "where", "which", "with", "without"}


def helps(source: str) -> Iterator[tuple[str, str]]:
    """The options of the dataclasses in a module, with the texts below them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and any("dataclass" in ast.unparse(mark) for mark in node.decorator_list):
            for option, below in zip(node.body, node.body[1:], strict=False):
                if isinstance(option, ast.AnnAssign) and isinstance(below, ast.Expr):
                    yield f"{node.name}.{ast.unparse(option.target)}", str(ast.literal_eval(below.value))


def lacking(source: str) -> list[str]:
    """The options whose texts begin as none should."""
    return [name for name, text in helps(source) if text.split()[0].rstrip(",.:;").lower() in BEGINNINGS]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_help_begins_with_a_verb_or_a_noun(path: Path) -> None:
    # what `skein lra` prints of a cell is no option
    assert [name for name in lacking(path.read_text()) if name != "Cell.detail"] == []


def test_a_text_that_goes_on_from_the_name_is_found() -> None:
    options = ('layers: int\n    """Of the model."""', 'seed: int\n    """Seed of all draws."""')
    source = "\n    ".join(("@dataclass\nclass Run:", *options))
    assert lacking(source) == ["Run.layers"]
