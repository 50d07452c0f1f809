"""Studies say their options and their errors as `skein` does."""

import runpy
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from studies.command import start

ROOT = Path(__file__).parents[2]
STUDIES = sorted(path.stem for path in (ROOT / "studies").glob("*.py") if "__main__" in path.read_text())


@dataclass(frozen=True)
class Options:
    """Of a stand-in for a study."""

    budgets: int = 1


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_has_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    loaded = sys.modules.pop(f"studies.{name}", None)  # runpy warns of a module that is there already
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(f"studies.{name}", run_name="__main__", alter_sys=True)
    finally:
        if loaded is not None:
            sys.modules[f"studies.{name}"] = loaded
    assert ended.value.code == 0
    assert f"usage: python -m studies.{name}" in capsys.readouterr().out


def test_a_missing_argument_is_no_traceback() -> None:
    command = [sys.executable, "-m", "studies.cluster_study"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error", "status", "message"),
    [
        (["--samples", "4"], None, 2, "has no option --samples; did you mean --budgets?"),
        ([], FileNotFoundError(2, "No such file or directory", "book.txt"), 2, "there is no book.txt"),
        ([], ModuleNotFoundError("No module", name="pyarrow"), 2, "pip install 'skeinformer[lab]'"),
        ([], KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["option", "file", "module", "interrupted"],
)
def test_errors_are_one_line(
    arguments: list[str],
    error: BaseException | None,
    status: int,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(options: Options) -> None:
        if error is not None:
            raise error

    assert start(Options, run, arguments) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tests.studies.test_command: ")
    assert message in line
