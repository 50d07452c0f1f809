"""What the study of multiply-adds prints is what the page says."""

from pathlib import Path

import pytest

from studies.frontier_by_multiply_adds import Frontier, run

ROOT = Path(__file__).parents[2]


def test_the_documentation_counts_by_multiply_adds_what_the_records_have(capsys: pytest.CaptureFixture[str]) -> None:
    run(Frontier(ROOT / "docs" / "results" / "rivals.jsonl"))
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 120 beaten"
    page = " ".join((ROOT / "docs" / "cluster-rivals.md").read_text().split())
    assert "other methods beat 2 of our 120 points" in page
