"""`skein`: what it prints, and how it fails."""

import io
import json
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from skeinformer.attention import METHODS
from skeinformer.lab import cli

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Options:
    """Of the stand-in for the demo."""

    path: str = "report.html"


def install_demo(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    """Put a stand-in for skeinformer.lab.commands.demo in place: its run_demo raises `error`, or returns the path it was given."""

    def run_demo(options: Options) -> Path:
        print("working")
        if error is not None:
            raise error
        return Path(options.path)

    module = ModuleType("skeinformer.lab.commands.demo")
    module.__dict__.update(Demo=Options, run_demo=run_demo)
    monkeypatch.setitem(sys.modules, "skeinformer.lab.commands.demo", module)


@pytest.mark.parametrize("columns", [60, 80, 120, 300])
def test_methods_fit_a_terminal_and_name_every_method(columns: int) -> None:
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), force_terminal=True, no_color=True, width=columns, highlight=False, _environ={}
    )
    cli.print_methods(cli.Methods(), console)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    assert {line.split()[0] for line in lines if line[:1].strip()} >= set(METHODS)
    assert not any("…" in line for line in lines)
    for name, method in METHODS.items():
        start = next(i for i, line in enumerate(lines) if line.split()[:1] == [name])
        assert method.summary.split()[0] in lines[start]
    assert ("skein methods --json" in lines[-1]) == (columns < 300)


def test_methods_in_a_pipe_has_one_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["methods"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1].strip()}
    for name, method in METHODS.items():
        flags = ["yes" if flag else "no" for flag in (method.random, method.cross_attention)]
        cells = [name, method.summary, method.cost, method.exact, *flags, method.masks, method.paper]
        assert rows[name].split() == " ".join(cells).split()


def test_methods_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert list(table) == list(METHODS)
    for name, method in METHODS.items():
        assert set(table[name]) == {
            "paper",
            "cost",
            "masks",
            "cross_attention",
            "random",
            "exact",
            "summary",
            "options",
        }
        assert table[name]["paper"] == method.paper
        assert table[name]["random"] is method.random
        assert table[name]["cross_attention"] is method.cross_attention


def test_demo_prints_the_path_last(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install_demo(monkeypatch)
    assert cli.main(["demo", "--path", "elsewhere.html"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "elsewhere.html"


def test_the_real_demo_takes_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["demo", "--help"])
    assert stop.value.code == 0
    assert "usage: skein demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("num_samples must be at least 1, got 0"), 2, "skein: num_samples must be at least 1, got 0"),
        (ValueError("two\nlines"), 2, "skein: two lines"),
        (FileNotFoundError("no weights in model/"), 2, "skein: no weights in model/"),
        (FileNotFoundError(2, "No such file or directory", "book.txt"), 2, "skein: there is no book.txt"),
        (ModuleNotFoundError("No module", name="transformers.models"), 2, "pip install 'skeinformer[lab]'"),
        (KeyboardInterrupt(), 130, "skein: interrupted"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_errors_of_the_user_are_one_line(
    error: BaseException,
    status: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    install_demo(monkeypatch, error)
    assert cli.main(["demo"]) == status
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.parametrize("error", [RuntimeError("a defect"), ModuleNotFoundError("No module", name="skeinformer.zoo")])
def test_defects_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    install_demo(monkeypatch, error)
    with pytest.raises(type(error)):
        cli.main(["demo"])


@pytest.mark.parametrize("arguments", [[], ["methds"], ["methods", "--jsn"]], ids=" ".join)
def test_unknown_commands_and_options_fail(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "skein" in capsys.readouterr().err


def test_python_dash_m_is_skein() -> None:
    command = [sys.executable, "-m", "skeinformer", "methods", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) == set(METHODS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert capsys.readouterr().out.split() == ["skeinformer", declared]
