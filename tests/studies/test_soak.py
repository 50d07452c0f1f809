"""The campaign: parts are chosen and taken up again, one table comes out, and a defect is counted."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from skeinformer.lab.records import read
from studies import soak
from studies.command import start
from studies.soak import PARTS, Part, Soak, run_soak, with_table
from studies.soak_outcome import OnCase, Outcome
from tests.cases import cases


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
        (["--parts", "propertis"], "unknown part 'propertis'; did you mean 'properties'"),
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
    assert list(PARTS) == ["properties", "coverage"]


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


def test_cases_are_shared_among_the_runs_of_a_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SKEINFORMER_CASES", raising=False)
    assert cases(12, 50) == 12
    monkeypatch.setenv("SKEINFORMER_CASES", "10000")
    assert (cases(12), cases(12, 50), cases(12, 3), cases(12, 10_000)) == (10_000, 200, 3334, 12)
