"""`skein`: what it prints, and how it fails."""

import io
import json
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import ModuleType

import pytest

import skeinformer
from skeinformer.attention import METHODS
from skeinformer.distributed import RankError
from skeinformer.lab import cli
from skeinformer.lab.commands import methods
from skeinformer.lab.methods_page import exact, masks

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Options:
    """Of the stand-in for the demo."""

    path: str = "report.html"


def install_demo(monkeypatch: pytest.MonkeyPatch, error: BaseException | None = None) -> None:
    """Put a stand-in for the demo's module in place: its command raises `error`, or prints the path it was given."""

    def command(options: Options) -> None:
        print("working")
        if error is not None:
            raise error
        print(Path(options.path))

    module = ModuleType("skeinformer.lab.commands.demo")
    module.__dict__.update(Demo=Options, command=command)
    monkeypatch.setitem(sys.modules, "skeinformer.lab.commands.demo", module)


@pytest.mark.parametrize("columns", [60, 80, 120, 300])
def test_methods_fit_a_terminal_and_name_every_method(columns: int) -> None:
    console = pytest.importorskip("rich.console").Console(
        file=io.StringIO(), force_terminal=True, no_color=True, width=columns, highlight=False, _environ={}
    )
    methods.command(methods.Methods(), console)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", console.file.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    assert {line.split()[0] for line in lines if line[:1].strip()} >= set(METHODS)
    assert not any("…" in line for line in lines)
    for name, method in METHODS.items():
        start = next(i for i, line in enumerate(lines) if line.split()[:1] == [name])
        assert method.summary.split()[0] in lines[start]
    assert ("skein methods --json" in lines[-1]) == (columns < 300)


def test_a_pipe_that_is_closed_early_is_no_error() -> None:
    command = f"{sys.executable} -m skeinformer bench --help | {sys.executable} -c 'import sys; sys.stdin.close()'"
    result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert result.stderr == ""


def test_methods_in_a_pipe_has_one_line_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["methods"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line[:1].strip()}
    for name, method in METHODS.items():
        flags = ["yes" if flag else "no" for flag in (method.random, method.cross_attention)]
        cells = [name, method.summary, method.cost, exact(method), *flags, masks(method), method.paper]
        assert rows[name].split() == " ".join(cells).split()


def test_methods_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methods", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert list(table) == list(METHODS)
    for name, method in METHODS.items():
        names = {field.name for field in fields(method)} - {"method"}
        assert set(table[name]) == {*names, "exact", "masks"}
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
        (ValueError("budget must be at least 1, got 0"), 2, "skein: budget must be at least 1, got 0"),
        (ValueError("two\nlines"), 2, "skein: two lines"),
        (ValueError("member \x1b[2J\x07: a link"), 2, "skein: member \\x1b[2J\\x07: a link"),
        (FileNotFoundError("no weights in model/"), 2, "skein: no weights in model/"),
        (FileNotFoundError(2, "No such file or directory", "book.txt"), 2, "skein: there is no book.txt"),
        (ModuleNotFoundError("No module", name="transformers.models"), 2, "pip install 'skeinformer[lab]'"),
        (RankError("rank 0 of 2 waited in vain"), 2, "skein: rank 0 of 2 waited in vain"),
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["methods", "--jsn"], "skein methods has no option --jsn; did you mean --json?"),
        (["flops", "--samples", "4"], "skein flops has no option --samples; did you mean --budget?"),
        (["flops", "--num-samples=4"], "skein flops has no option --num-samples; did you mean --budget?"),
        (["approx", "--samples", "4"], "skein approx has no option --samples; did you mean --budgets?"),
        (["flops", "--num_samples", "4"], "skein flops has no option --num-samples; did you mean --budget?"),
        (["methods", "--zzz"], "skein methods has no option --zzz. `skein methods --help` prints them all."),
    ],
)
def test_unknown_options_fail_and_the_nearest_is_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"skein: {message}")


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_option_in_the_help_is_known(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([verb, "--help"])
    shown = set(re.findall(r"^\W {,2}(?:-h, )?--(\w[\w-]*)", capsys.readouterr().out, re.MULTILINE)) - {"help"}
    kind = getattr(sys.modules[cli.COMMANDS[verb].module], verb.capitalize())
    known = {name.replace("_", "-") for name in cli.option_words(kind)}
    assert shown == known


def test_unknown_commands_fail_and_the_nearest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["methds"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skein: unknown command 'methds'; did you mean 'methods'?")


@pytest.mark.parametrize(("arguments", "status"), [([], 2), (["--help"], 0), (["-h"], 0)])
def test_help_names_every_command(arguments: list[str], status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments) == status
    captured = capsys.readouterr()
    shown, other = (captured.out, captured.err) if status == 0 else (captured.err, captured.out)
    assert other == ""
    rows = dict(line.strip().split(maxsplit=1) for line in shown.splitlines() if line.startswith("  "))
    assert {verb: text.strip() for verb, text in rows.items()} == {
        verb: command.help for verb, command in cli.COMMANDS.items()
    }


@pytest.mark.parametrize("verb", cli.COMMANDS)
def test_every_command_has_a_file_of_its_name_and_says_its_options(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = cli.COMMANDS[verb]
    assert command.module == f"skeinformer.lab.commands.{verb}"
    with pytest.raises(SystemExit) as stop:
        cli.main([verb, "--help"])
    assert stop.value.code == 0
    assert f"usage: skein {verb}" in capsys.readouterr().out


COMPILER = {"torch._dynamo", "torch._inductor"}
HEAVY = {"matplotlib", "transformers", "pyarrow", "accelerate", "huggingface_hub", "skeinformer.lab.report.sections"}


USES: dict[str, str | None] = {  # arguments, and the verb whose module they load
    "--help": None,
    "methods": "methods",
    "flops --lengths 64 --methods vmean": "flops",
    "bench --help": "bench",
}


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """The modules that `skein` has loaded at its end: one process for each use, forked with what all of them need."""
    program = """
import os, sys, rich.console, torch, tyro
for use in sys.argv[1:]:
    sys.stdout.flush()
    if not os.fork():
        from skeinformer.lab.cli import main
        try:
            main(use.split())
        except SystemExit:
            pass
        print("loaded:", *sys.modules, file=sys.stderr, flush=True)
        os._exit(0)
    os.wait()
"""
    result = subprocess.run([sys.executable, "-c", program, *USES], cwd=ROOT, capture_output=True, text=True)
    names = [set(line.split()[1:]) for line in result.stderr.splitlines() if line.startswith("loaded: ")]
    return dict(zip(USES, names, strict=True))


@pytest.mark.xdist_group("what skein loads")
@pytest.mark.parametrize("use", USES)
def test_a_command_loads_its_own_verb_and_nothing_heavy(use: str, loaded: dict[str, set[str]]) -> None:
    modules, verb = loaded[use], USES[use]
    verbs = {name for name in modules if name.startswith("skeinformer.lab.commands.")}
    assert verbs == ({f"skeinformer.lab.commands.{verb}"} if verb else set())
    assert not modules & HEAVY
    assert not any(name.partition(".")[0] == "studies" for name in modules)
    if verb in (None, "methods"):
        assert not modules & COMPILER
        assert not any(name.startswith(("skeinformer.lab.report", "skeinformer.lab.measure")) for name in modules)


def test_python_dash_m_is_skein() -> None:
    command = [sys.executable, "-m", "skeinformer", "methods", "--json"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert set(json.loads(result.stdout)) == set(METHODS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.split() == ["skeinformer", skeinformer.__version__]
