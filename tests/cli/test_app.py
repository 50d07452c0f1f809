"""The command line: what it reads, its exit statuses, and errors in one line before anything is loaded."""

import subprocess
import sys

import pytest

import skeinformer
from skeinformer.cli.app import guard, main, parse
from skeinformer.cli.bench import Bench

WRONG = {
    "demo --passages -1": "passages must be at least 0, got -1",
    "demo --lengths": "lengths is empty",
    "compare --tolerance 0": "tolerance must be above 0",
    "compare --methods skienformer": "did you mean 'skeinformer'",
    "compare --text nowhere.txt": "there is no text nowhere.txt",
    "bench --budgets 0": "budget must be at least 1",
    "bench --rounds 0": "random inputs have no error",
    "bench --methods no_module:Method": "'no_module' is neither a method nor a module",
}
PROGRAM = """
import sys
from skeinformer.cli.app import main
for line in sys.argv[1:]:
    assert main(line.split()) == 2
print(sorted({'transformers', 'matplotlib', 'pyarrow'} & set(sys.modules)))
"""


def test_errors_of_the_user_are_one_line_each_before_anything_is_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *WRONG], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    lines = done.stderr.splitlines()
    assert len(lines) == len(WRONG)
    for line, message in zip(lines, WRONG.values(), strict=True):
        assert line.startswith("skein: ")
        assert message in line


def test_options_are_read() -> None:
    options = parse(["bench", "--lengths", "64", "128", "--methods", "cluster:num_pilots=3", "--busy"])
    assert options == Bench(lengths=(64, 128), methods=("cluster:num_pilots=3",), busy=True)


@pytest.mark.parametrize("arguments", [["bench", "--lenghts", "3"], ["nothing"], []])
def test_unknown_words_end_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["skeinformer", skeinformer.__version__]
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--help"])
    assert ended.value.code == 0
    assert "--lengths" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ModuleNotFoundError("no", name="tyro"), 2, "pip install 'skeinformer[cli]'"),
        (ModuleNotFoundError("no", name="pyarrow.parquet"), 2, "pip install 'skeinformer[benchmarks]'"),
        (ValueError("two\nlines \x1b[2J"), 2, "skein: two lines \\x1b[2J"),
        (FileNotFoundError(2, "No such file", "x.txt"), 2, "x.txt: No such file"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_errors_have_a_status_and_a_line(
    error: BaseException, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        raise error

    assert guard(work) == status
    text = capsys.readouterr().err
    assert message in text
    assert text.count("\n") == 1


def test_a_missing_module_that_no_extra_has_is_a_defect() -> None:
    def work() -> None:
        raise ModuleNotFoundError("no", name="skeinformer_of_tomorrow")

    with pytest.raises(ModuleNotFoundError):
        guard(work)
