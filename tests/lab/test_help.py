"""What `--help` says of an option begins with a verb or a noun, says all by itself, and fits a terminal."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import pytest

from skeinformer.lab import cli
from skeinformer.lab.helptext import parse

ROOT = Path(__file__).parents[2]
LAB = ROOT / "skeinformer" / "lab"
# those of `skein` and of the studies
FILES = [
    *sorted((LAB / "commands").glob("*.py")),
    *sorted((ROOT / "studies").glob("*.py")),
]
# with these a text only goes on from the name of its option: "Of the model."
BEGINNINGS = {"among", "around", "as", "at", "between", "by", "d", "each", "for", "from", "how", "in", "n", "of"}
BEGINNINGS |= {"only", "or", "that", "what", "when", "where", "which", "with", "without"}

VERBS = list(cli.COMMANDS)
# the studies that are commands, and the dataclass of their options
STUDIES = {
    f"studies.{path.stem}": match[1]
    for path in sorted((ROOT / "studies").glob("*.py"))
    if (match := re.search(r"\bstart\((\w+),", path.read_text()))
}
# a value of Python's, or nothing, in place of what a user would call it
FOREIGN = re.compile(r"default: (?:None|True|False|\))|\{None|None\}|Default:")


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


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
    assert lacking(path.read_text()) == []


def test_a_text_that_goes_on_from_the_name_is_found() -> None:
    options = ('layers: int\n    """Of the model."""', 'seed: int\n    """Seed of all draws."""')
    source = "\n    ".join(("@dataclass\nclass Run:", *options))
    assert lacking(source) == ["Run.layers"]


def shown(kind: type, program: str, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is printed for --help of a dataclass, without frames and breaks of lines; no line is over 80 columns."""
    with pytest.raises(SystemExit) as stop:
        parse(kind, program, [*arguments, "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    return " ".join(re.sub("[│╭╮╰╯─]", " ", printed).split())


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_true_defaults_and_fits(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    name, *task = verb.split()
    kind = getattr(import_module(cli.COMMANDS[name].module), name.capitalize())
    assert FOREIGN.findall(shown(kind, f"skein {name}", capsys, *task)) == []


@pytest.mark.parametrize(("study", "kind"), STUDIES.items(), ids=STUDIES)
def test_help_of_studies_does_so_too(study: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert FOREIGN.findall(shown(getattr(import_module(study), kind), f"python -m {study}", capsys)) == []


@dataclass(frozen=True)
class Example:
    """Show."""

    count: int | None = None
    """A number. Default: as many as
    there are."""
    names: tuple[str, ...] = ()
    """Names."""
    quick: bool | None = None
    """Be quick. Default: the recipe's."""
    checks: bool = True
    """Leave out the checks."""
    size: int = 3
    """A size."""


def test_defaults_are_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(Example, "show", capsys).partition("and exit ")[2].split(" --") == [
        "--count INT A number. (default: as many as there are)",
        "names [STR [STR ...]] Names. (default: none)",
        "quick {True,False} Be quick. (default: the recipe's)",
        "no-checks Leave out the checks.",
        "size INT A size. (default: 3)",
    ]
    read = parse(Example, "show", ["--quick", "False", "--no-checks", "--count", "2"])
    assert read == Example(count=2, quick=False, checks=False)
