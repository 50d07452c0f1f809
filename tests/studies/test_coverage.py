"""The study of coverage: records are made once, and the tables hold all of them."""

from pathlib import Path

import pytest
import torch

from skeinformer.attention.budget import NUM_DRAWS
from skeinformer.lab.records import read
from studies import coverage
from studies.coverage import Case, Coverage, changed, main, run, shifted


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two inputs of few rows: one of them with a budget to be chosen."""
    monkeypatch.setattr(coverage, "ROWS", 64)
    monkeypatch.setattr(coverage, "HEADS", 2)
    monkeypatch.setattr(coverage, "REFERENCE", 8)
    made = [
        Case("ten odd rows", "shifted", 64, lambda: changed(shifted, 0)),
        Case("rows no guess can find", "ten, a key each", 64, lambda: changed(coverage.hidden, 0)),
    ]
    monkeypatch.setattr(coverage, "inputs_of", lambda options: iter(made))


@pytest.mark.usefixtures("small")
def test_records_are_made_once_and_shown(tmp_path: Path) -> None:
    options = Coverage(sketches=2, draws=2, trials=4, threads=1, records=tmp_path / "coverage.jsonl")
    text = run(options)
    records = read(options.records)
    assert [r["kind"] for r in records] == ["coverage"] * 3 + ["coverage_budget"] * 2 + ["coverage"] * 3
    assert run(options) == text
    assert len(read(options.records)) == len(records)
    assert "| ten odd rows, shifted | 64 |" in text
    assert "| 80.0 |" in next(line for line in text.splitlines() if line.startswith("| ten odd rows | "))
    assert "of 4 |" in text
    for record in records[:3]:
        assert record["intervals"] == 2 * 2 * 2
        assert 0 <= float(record["two"] or 0) <= 1
    assert {r.get("num_draws") for r in records} == {None, NUM_DRAWS}
    more = Coverage(sketches=2, draws=3, trials=0, threads=1, records=options.records)
    run(more)
    assert len(read(options.records)) == len(records) + 6


@pytest.mark.usefixtures("small")
def test_one_group_is_measured_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "coverage.jsonl"
    common = ["--sketches", "1", "--draws", "1", "--trials", "0", "--records", str(records)]
    assert main([*common, "--groups", "rows no guess can find"]) == 0
    assert {r["group"] for r in read(records)} == {"rows no guess can find"}
    assert main([*common, "--groups", "odd rows"]) == 2
    assert "group='odd rows' is not known; did you mean 'ten odd rows'?" in capsys.readouterr().err


def test_budgets_that_were_chosen_by_another_rule_are_not_shown() -> None:
    record = {"kind": "coverage_budget", "group": "g", "input": "i", "method": "m", "above": 11, "trials": 200}
    record |= {"median_budget": 1, "all_keys": 0}
    assert "11 of 200" not in coverage.table([record])
    assert "11 of 200" in coverage.table([{**record, "num_draws": NUM_DRAWS}])


def test_inputs_are_what_they_say() -> None:
    odd = {each.name: each for each in coverage.inputs_of(Coverage(lengths=(), trials=0))}
    plain, k, _ = changed(lambda q, k, v: (q, k, v), 0)
    q, _, _ = odd["30 times"].make()
    assert (q != plain).any(-1).sum(-1).unique().item() == 1  # the last of that name: one odd row
    q, _, _ = odd["ten, a key each"].make()
    rows = (q != plain).any(-1)[0, 0].nonzero()[:, 0]
    assert len(rows) == 10
    assert torch.equal((q[0, 0, rows] @ k[0, 0].mT).argmax(-1), rows)
    assert [each.n for each in coverage.inputs_of(Coverage(lengths=(256,)))][:12] == [256] * 6 + [512] * 6


def test_wrong_numbers_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--draws", "0"]) == 2
    assert "draws" in capsys.readouterr().err
