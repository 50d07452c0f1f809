"""The campaign: parts are chosen and taken up again, one table comes out, and a defect is counted."""

import io
import itertools
import os
import random
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from skeinformer.lab.files import seal, unseal
from skeinformer.lab.records import read
from studies import soak, soak_kills, soak_outcome
from studies.command import start
from studies.soak import PARTS, Part, Soak, run_soak, with_table
from studies.soak_damage import WAYS, damage, mutated
from studies.soak_files import KINDS, damaged_files, judged
from studies.soak_kills import killed, kills
from studies.soak_outcome import Ended, OnCase, Outcome, in_process
from tests.cases import cases


def silent(tried: int, failed: int) -> None:
    pass


def told(options: Soak) -> str:
    console = Console(file=io.StringIO(), width=160, highlight=False)
    run_soak(options, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Two parts that do nothing but say that they were called."""
    called: list[tuple[str, int]] = []

    def part(name: str, failed: int) -> Part:
        def run(size: int, seed: int, folder: Path, on_case: OnCase) -> Outcome:
            assert folder.is_dir()
            called.append((name, size))
            on_case(size, failed)
            return Outcome(size, failed, ("a note",) * failed)

        return Part(f"{name} things", 100, run)

    monkeypatch.setattr(soak, "PARTS", {"good": part("good", 0), "bad": part("bad", 2)})
    return called


def test_parts_are_recorded_and_not_run_again(tmp_path: Path, parts: list[tuple[str, int]]) -> None:
    text = told(Soak(parts=("good",), out=tmp_path))
    assert "good: 100 good things" in text
    assert parts == [("good", 100)]
    (record,) = read(tmp_path / "records.jsonl")
    assert (record["kind"], record["part"], record["tried"], record["failed"]) == ("soak", "good", 100, 0)
    assert "good: done before" in told(Soak(parts=("good",), out=tmp_path))
    assert len(parts) == 1
    told(Soak(parts=("good",), out=tmp_path, share=0.1))
    told(Soak(parts=("good",), out=tmp_path, share=0.1, again=True))
    assert parts[1:] == [("good", 10), ("good", 10)]


def test_a_part_that_keeps_records_goes_on_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The study of coverage takes the better part of an hour: a stop lost all of it."""

    def run(size: int, seed: int, folder: Path, on_case: OnCase) -> Outcome:
        with (folder / "kept.jsonl").open("a") as file:
            file.write('{"a": 1}\n')
        if len(read(folder / "kept.jsonl")) < 2:
            raise KeyboardInterrupt
        return Outcome(2, 0)

    monkeypatch.setattr(soak, "PARTS", {"slow": Part("slow things", 100, run, keeps=True)})
    with pytest.raises(KeyboardInterrupt):
        told(Soak(out=tmp_path))
    told(Soak(out=tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.jsonl", "records.jsonl"]
    assert len(read(tmp_path / "kept.jsonl")) == 2


def test_a_failure_is_told_and_ends_with_status_1(tmp_path: Path, parts: list[tuple[str, int]]) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{soak.MARKS[0]}\nold\n{soak.MARKS[1]}\nafter\n")
    console = Console(file=io.StringIO(), width=160, highlight=False)
    with pytest.raises(SystemExit, match="1"):
        run_soak(Soak(out=tmp_path / "out", page=page), console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "bad: a note" in text
    rows = [line for line in text.splitlines() if line.strip()]
    assert [row.split()[0] for row in rows[-2:]] == ["good", "bad"]
    rows = [line for line in page.read_text().splitlines() if line.startswith(("| good", "| bad"))]
    assert [row.split("|")[3:5] for row in rows] == [[" 100 ", " 0 "], [" 100 ", " 2 "]]
    assert page.read_text().startswith("before\n")
    assert page.read_text().endswith("after\n")
    assert "old" not in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "kill"], "unknown part 'kill'; did you mean 'kills'"),
        (["--share", "0"], "share must be above 0 and at most 1"),
        (["--page", "nowhere.md"], "there is no nowhere.md"),
    ],
)
def test_wrong_options_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(Soak, run_soak, arguments) == 2
    assert message in capsys.readouterr().err


def test_the_page_in_the_documentation_has_its_marks() -> None:
    with_table((Path(soak.ROOT) / "docs" / "reliability.md").read_text(), "")
    with pytest.raises(ValueError, match="the page has no <!-- soak -->"):
        with_table("no marks", "")
    assert list(PARTS)[:4] == ["properties", "kills", "files", "batches"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ""),
        ({"two": 0.89}, "MiniLM, layer 0, n = 1024, cluster: two 0.890 < 0.9"),
        ({"upper": 0.92}, "MiniLM, layer 0, n = 1024, cluster: upper 0.920 < 0.93"),
        ({"group": "ten odd rows", "two": 0.81, "upper": 0.91}, ""),
        ({"group": "one odd row", "two": 0.1, "upper": 0.1}, None),
        ({"kind": "coverage_budget", "above": 10, "trials": 200}, ""),
        ({"kind": "coverage_budget", "group": "one odd row", "above": 11, "trials": 200}, "one odd row, layer 0, n = "),
        ({"kind": "coverage_budget", "above": 11, "trials": 200}, "MiniLM, layer 0, n = 1024, cluster: above the "),
    ],
)
def test_what_is_promised_of_the_certificate(changes: dict[str, float | str], expected: str | None) -> None:
    row = {"kind": "coverage", "group": "MiniLM", "input": "layer 0", "n": 1024, "method": "cluster"}
    found = soak.broken_promise({**row, "two": 0.95, "upper": 0.95, **changes})
    assert found == expected if not expected else str(found).startswith(expected)


def test_a_process_that_crashes_or_hangs_is_told_apart(tmp_path: Path) -> None:
    def crash() -> int:
        os.kill(os.getpid(), signal.SIGSEGV)
        return 0

    def hang() -> int:
        signal.pause()
        return 0

    def fail() -> int:
        raise TypeError("not a user's error")

    assert in_process(lambda: 0, tmp_path / "log").status == 0
    assert in_process(crash, tmp_path / "log").status == -signal.SIGSEGV
    assert in_process(hang, tmp_path / "log", seconds=0.1).status == -signal.SIGKILL
    failed = in_process(fail, tmp_path / "log")
    assert failed.status == 1
    assert "not a user's error" in failed.output


def test_a_campaign_that_was_suspended_kills_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGSTOP and SIGCONT an hour later: the clock went on, the command did not."""
    clock = itertools.count(step=3600)
    monkeypatch.setattr(soak_outcome.time, "monotonic", lambda: next(clock))
    assert in_process(lambda: time.sleep(0.02) or 0, tmp_path / "log", seconds=1).status == 0  # type: ignore[func-returns-value]


def test_a_run_that_ends_before_its_kill_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it was counted as a kill."""
    ends = [0, -signal.SIGKILL]
    started = []

    def training(data: Path, run: Path) -> SimpleNamespace:
        assert not run.exists()
        run.mkdir()
        started.append(run)
        return SimpleNamespace(poll=lambda: 0, send_signal=lambda number: None, wait=lambda: ends.pop(0))

    monkeypatch.setattr(soak_kills, "training", training)
    killed(tmp_path, tmp_path / "run", 0.001, random.Random(0))
    assert len(started) == 2
    assert not ends


def test_cases_are_shared_among_the_runs_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKEINFORMER_CASES", raising=False)
    assert cases(12, 50) == 12
    monkeypatch.setenv("SKEINFORMER_CASES", "10000")
    assert (cases(12), cases(12, 50), cases(12, 3), cases(12, 10_000)) == (10_000, 200, 3334, 12)


def test_how_a_command_may_take_a_damaged_file() -> None:
    line = "skein: a.tar.gz is damaged\n"
    assert judged(Ended(2, line, 0), True, False) == ""
    assert judged(Ended(0, "", 0), True, True) == ""
    assert judged(Ended(0, "", 0), False, False) == ""
    assert "gave something else" in judged(Ended(0, "", 0), True, False)
    assert "status -11" in judged(Ended(-11, "", 0), False, False)
    assert "status 1" in judged(Ended(1, "Traceback", 0), False, False)
    assert "it says 2 lines" in judged(Ended(2, 2 * line, 0), False, False)
    assert "it took 4096 MiB" in judged(Ended(2, line, 4 << 30), False, False)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_changes_the_file(tmp_path: Path, way: str) -> None:
    for seed in range(20):
        path = tmp_path / f"{seed}.json"
        path.write_bytes(seal({"a": 1, "b": {"c": [1, 2]}}))
        before = path.read_bytes()
        WAYS[way](path, random.Random(seed))
        assert path.is_symlink() or not path.is_file() or path.read_bytes() != before or way == "bytes"
        if way == "fields":
            unseal(path.read_bytes(), path)  # it is another file, and whole


def test_damage_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(100))
    assert damage(tmp_path, random.Random(0)).what.startswith("a.bin by ")
    assert len({mutated(b"some content", random.Random(seed)) for seed in range(50)}) > 20


@pytest.mark.slow
def test_damaged_files_are_refused_or_read_rightly(tmp_path: Path) -> None:
    assert damaged_files(2 * len(KINDS), 1, tmp_path, silent) == (2 * len(KINDS), 0, ())


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bits(tmp_path: Path) -> None:
    assert kills(2, 0, tmp_path, silent) == (2, 0, ())
