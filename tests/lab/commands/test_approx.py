"""`skein approx` end to end: the table, a run that is killed and continued, and errors of the user."""

import io
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")
pytest.importorskip("rich", reason="needs the extra `lab`")

from rich.console import Console

from skeinformer.attention import METHODS
from skeinformer.lab import cli
from skeinformer.lab.commands.approx import Approx, as_experiment, default_methods, result_blocks, run_approx, show
from skeinformer.lab.console import column_groups
from skeinformer.lab.contender import parse
from skeinformer.lab.measure.approx import KEYS, cases
from skeinformer.lab.measure.pretrained import minilm_folder
from skeinformer.lab.progress import progress
from skeinformer.lab.records import Record, key_of, read
from skeinformer.sketch import SKETCHES

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")

TINY: dict[str, Any] = {
    "lengths": (32, 64),
    "budgets": (4, 8),
    "methods": ("vmean", "skeinformer:num_pilots=4", "reformer"),
    "trials": 2,
    "gradient_trials": 1,
    "time_rounds": 1,
}


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, highlight=False, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_records_table_and_summary(tmp_path: Path, terminal: bool) -> None:
    file, summary = tmp_path / "new" / "records.jsonl", tmp_path / "small" / "summary.jsonl"
    screen = console(terminal)
    assert run_approx(Approx(**TINY, records=file, summary=summary), screen) == summary
    records = read(file)
    # trials x lengths x weights x (V-mean, Skeinformer at two d); Reformer is skipped once for each but the trial
    assert Counter(r["kind"] for r in records) == {"approx": 24, "approx_skipped": 8, "approx_time": 10}
    assert Counter(r["kind"] for r in read(summary)) == {"approx_summary": 12, "approx_skipped": 8, "approx_time": 10}
    assert sorted(path.name for path in summary.parent.iterdir()) == ["summary.jsonl"]
    text = written(screen)
    for word in ("V-mean", "Skeinformer, 4 pilots", "initialized", "spectral error", "time / SDPA"):
        assert word in text
    assert "Not measured, errors of Reformer: Reformer shares queries and keys" in " ".join(text.split())
    assert ("\x1b[" in text) == terminal
    if not terminal:
        assert re.search(r"^1 of 2: errors +\d+% trial 2 of 2, n = 64, initialized, layer 0$", text, re.MULTILINE)
        assert re.search(r"^2 of 2: times +\d+% time at n = 64, d = 8$", text, re.MULTILINE)


def test_a_narrow_terminal_shows_the_part_the_bar_and_the_detail() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=60, highlight=False, _environ={})
    with progress(screen) as begin:
        begin("1 of 2: errors")("trial 1 of 3, n = 1,024, pretrained, layer 0: Skeinformer, no row normalization", 0.25)
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", written(screen)).split("\n")
    bar = "".join(line for line in lines)
    assert "1 of 2: errors" in bar
    assert "━" in bar
    assert "25%" in bar
    assert any(line.startswith("trial 1 of 3, n = 1,024, pretrained") and len(line.strip()) <= 60 for line in lines)


def test_a_second_run_adds_only_what_is_new(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    options: dict[str, Any] = {**TINY, "lengths": (32,), "records": file}
    run_approx(Approx(**options, only="errors"), console())
    first = file.read_bytes()
    assert {r["kind"] for r in read(file)} == {"approx", "approx_skipped"}
    run_approx(Approx(**options, only="errors"), console())
    assert file.read_bytes() == first
    run_approx(Approx(**{**options, "methods": ("vmean",)}, only="time"), console())
    assert file.read_bytes().startswith(first)
    (time,) = [r for r in read(file) if r["kind"] == "approx_time"]
    assert time["method"] == "vmean"


def test_a_killed_run_is_continued_without_loss_or_repetition(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    options = Approx(**{**TINY, "trials": 16, "gradient_trials": 0, "time_rounds": 0, "lengths": (64,)}, records=file)
    arguments = ["--lengths", "64", "--budgets", "4", "8", "--methods", *options.methods, "--records", str(file)]
    arguments += ["--trials", "16", "--gradient-trials", "0", "--time-rounds", "0"]
    command = [sys.executable, "-u", "-m", "skeinformer", "approx", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "trial 3 of 16" in line:
                process.send_signal(signal.SIGKILL)
                break
    before = file.read_bytes()
    kept = read(file)
    assert 0 < len(kept) < 16 * 2 * 3
    with file.open("ab") as torn:
        torn.write(b'{"kind": "approx", "n": 6')  # what a write that was cut off leaves
    run_approx(options, console())
    assert file.read_bytes().startswith(before)
    records = [r for r in read(file) if r["kind"] == "approx"]
    found = Counter(key_of(r, (*KEYS, "trial")) for r in records)
    assert max(found.values()) == 1
    assert len(found) == 16 * 2 * 3  # trials x weights x (V-mean, Skeinformer at two d)
    # what is measured after the break is what an unbroken run measures
    again = tmp_path / "again.jsonl"
    run_approx(
        Approx(**{**TINY, "trials": 3, "gradient_trials": 0, "lengths": (64,)}, only="errors", records=again), console()
    )
    whole = {key_of(r, (*KEYS, "trial")): r["spectral"] for r in records}
    for record in read(again):
        if record["kind"] == "approx":
            assert whole[key_of(record, (*KEYS, "trial"))] == pytest.approx(record["spectral"], rel=1e-5)


def test_times_of_the_first_layer_serve_all(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    options = Approx(**{**TINY, "lengths": (32,), "methods": ("vmean",), "trials": 1}, layers=(0, 2), records=file)
    run_approx(options, console())
    blocks = result_blocks(as_experiment(options), read(file))
    kinds = [block.title.partition(":")[0] for block in blocks]
    assert kinds == ["Relative spectral error"] * 4 + ["Forward time / SDPA's"]
    assert [block.title.split(", ")[2] for block in blocks[:4]] == ["layer 0", "layer 2"] * 2
    assert blocks[-1].headings == ("method", "any d")
    assert float(blocks[-1].rows[0][1]) > 0


BUDGETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


@pytest.mark.parametrize("budgets", [BUDGETS[:6], BUDGETS], ids=len)
def test_every_d_is_shown_in_80_columns_and_no_word_is_broken(budgets: tuple[int, ...]) -> None:
    options = Approx(lengths=(1024, 4096), budgets=budgets, methods=default_methods())
    experiment = as_experiment(options)
    common = {**experiment.common, "weights": "pretrained", "layer": 0, "batch": 1, "threads": torch.get_num_threads()}
    records: list[Record] = []
    for n in options.lengths:
        for i, case in enumerate(cases(experiment)):
            error: Record = {"spectral_relative": 1.2e-7 if i % 7 == 0 else 0.0123 + 1e-4 * i, "trial": 0}
            records.append({"kind": "approx", **common, **case.fields, "n": n, **error})
            records.append({"kind": "approx_time", **common, **case.fields, "n": n, "forward_ratio": 0.0456})
    screen = Console(file=io.StringIO(), width=80, force_terminal=True, highlight=False, _environ={})
    show(experiment, records, screen)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written(screen))
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text
    for d in budgets:
        assert len(re.findall(rf"d = {d}\b", text)) == 4  # errors and times of two lengths
    words = set(text.split())
    for case in cases(experiment):
        assert set(case.contender.label.split()) <= words
    assert text.count("1.2e-07") == sum(r.get("spectral_relative") == 1.2e-7 for r in records)
    assert text.count("0.0456") == len(records) // 2


def test_threads_and_text_are_taken(tmp_path: Path) -> None:
    text, file = tmp_path / "words.txt", tmp_path / "records.jsonl"
    text.write_text("one two three four five six seven eight " * 10)
    options = Approx(lengths=(32,), budgets=(4,), methods=("vmean",), trials=2, text=text, records=file, threads=1)
    run_approx(options, console())
    assert torch.get_num_threads() == 1
    assert {r["text"] for r in read(file)} == {"words.txt"}
    assert {r["threads"] for r in read(file)} == {1}


def test_the_default_is_every_method_and_every_sketch() -> None:
    contenders = [parse(spec) for spec in default_methods()]
    assert {contender.method for contender in contenders} == set(METHODS)
    sketches = {dict(contender.options).get("sketch") for contender in contenders if contender.method == "sketched"}
    assert sketches == set(SKETCHES)
    assert len({case.contender for case in cases(as_experiment(Approx()))}) == len(METHODS) + len(SKETCHES)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "skienformer"], "unknown attention 'skienformer'; did you mean 'skeinformer'?"),
        (["--methods", "skeinformer:num_pilot=3"], "did you mean 'num_pilots'?"),
        (["--text", "nowhere.txt"], "there is no nowhere.txt"),
        (["--model", "nowhere/model"], "cannot load the model 'nowhere/model'"),
        (["--trials", "1000"], "enough for"),
        (["--layers", "7"], "layer=7 does not exist"),
        (["--weights", "trained"], "did you mean 'pretrained'?"),
        (["--text-filter", "split=test"], "a filter such as split=test chooses rows of a .parquet file"),
        (["--text-filter", "split"], "'split' is not a filter; expected column=value"),
        (["--threads", "0"], "threads must be at least 1"),
        (["--methods"], "methods is empty"),
        (["--only", "time", "--time-rounds", "0"], "give more time_rounds"),
    ],
)
def test_errors_of_the_user_are_one_line_and_write_nothing(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["approx", "--lengths", "512", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("skein: ")
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_holds_no_records_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text("not a record\nnor this\n")
    assert cli.main(["approx", "--records", str(file)]) == 2
    assert "line 1: not a record" in capsys.readouterr().err


def test_columns_are_divided_among_tables() -> None:
    wide = [20, 5, 5, 5, 5, 5, 5, 5]
    assert column_groups(wide, 30) == [[1, 2, 3, 4, 5, 6], [7]]
    assert column_groups(wide, 30, most=4) == [[1, 2, 3, 4], [5, 6, 7]]
    assert column_groups(wide, 3) == [[i] for i in range(1, 8)]  # one that does not fit has a table of its own
