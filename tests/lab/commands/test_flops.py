"""`skein flops`: what it prints, and that the page about it prints the same."""

import json
import re
from pathlib import Path

import pytest

from skeinformer.attention import METHODS
from skeinformer.lab import cli
from skeinformer.lab.measure.flops import PAPER, count_multiply_adds

PAGE = Path(__file__).parents[3] / "docs" / "flops.md"
SMALL = ["--lengths", "64", "--budget", "16", "--head-dim", "8"]


def rows(output: str) -> list[list[str]]:
    """The cells of the rows that begin with a number of tokens; cells are at least two spaces apart."""
    return [re.split(r" {2,}", line.strip()) for line in output.splitlines() if re.match(r" *[\d,]+ ", line)]


def test_the_table_is_whole_in_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert cli.main(["flops", *SMALL, "--backward"]) == 0
    output = capsys.readouterr().out
    assert [row[1] for row in rows(output)] == list(METHODS)
    assert "…" not in output


def test_the_table_holds_millions_of_multiply_adds_and_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--lengths", "2048", "4096", "--budget", "128", "--head-dim", "16"]
    assert cli.main(["flops", *arguments, "--methods", "softmax", "skeinformer_uniform", "--backward"]) == 0
    output = capsys.readouterr().out
    assert "d = 128, p = 16" in output
    table = rows(output)
    assert [row[:2] for row in table] == [
        [n, name] for n in ("2,048", "4,096") for name in ("softmax", "skeinformer_uniform")
    ]
    product = 2048 * 2048 * 16 / 1e6
    assert table[0][2:] == [f"{2 * product:,.1f}", f"{7 * product:,.1f}", "2 n^2 p", f"{2 * product:,.1f}", "1.000"]
    assert len(table[1]) == 4  # an ablation: the paper's table does not have it


def test_json_is_one_record_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flops", *SMALL, "--methods", "skeinformer", "vmean", "--json"]) == 0
    skeinformer, vmean = map(json.loads, capsys.readouterr().out.splitlines())
    counts = count_multiply_adds("skeinformer", 64, budget=16, head_dim=8)
    assert skeinformer["multiply_adds"] == sum(counts.values())
    assert skeinformer["paper"] == PAPER["skeinformer"].multiply_adds(64, 16, 8)
    assert (vmean["method"], vmean["multiply_adds"], vmean["paper"]) == ("vmean", 0, None)


def test_methods_have_options_as_in_every_other_verb(capsys: pytest.CaptureFixture[str]) -> None:
    methods = ["--methods", "skeinformer", "skeinformer:num_pilots=3", "cluster:budget=4,num_pilots=3"]
    assert cli.main(["flops", *SMALL, *methods]) == 0
    assert [row[1] for row in rows(capsys.readouterr().out)] == methods[1:]
    assert cli.main(["flops", *SMALL, *methods, "--json"]) == 0
    plain, few, own = map(json.loads, capsys.readouterr().out.splitlines())
    assert few["multiply_adds"] == sum(
        count_multiply_adds("skeinformer", 64, budget=16, head_dim=8, num_pilots=3).values()
    )
    assert few["multiply_adds"] < plain["multiply_adds"]
    assert few["paper"] is None  # the paper's term is that of the method without options
    assert (own["method"], own["options"], own["budget"]) == ("cluster", "budget=4,num_pilots=3", 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "linfromer"], "unknown attention 'linfromer'"),
        (["--methods", "cluster:pilots=3"], "did you mean 'num_pilots'?"),
        (["--lengths", "0"], "length must be at least 1, got 0"),
        (["--lengths"], "lengths is empty"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["flops", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skein: ")
    assert message in line


@pytest.mark.slow
def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    shown = rows(PAGE.read_text())
    assert {row[1] for row in shown} >= set(PAPER)
    commands = re.findall(r"^    skein (flops .*)$", PAGE.read_text(), re.MULTILINE)
    printed = []
    for command in commands:
        assert cli.main(command.split()) == 0
        printed += rows(capsys.readouterr().out)
    assert shown == [row for row in printed if row[1] in {row[1] for row in shown}]
