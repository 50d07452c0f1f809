"""The paper's figures are transcribed without a slip: they agree with each other, and with its text where it lies."""

import os
import re
from pathlib import Path
from statistics import fmean

import pytest

from skeinformer.attention import METHODS
from skeinformer.lab.report.published import PUBLISHED, TASKS, Published

PAPER = Path(os.environ.get("SKEINFORMER_PAPER") or Path(__file__).parents[4] / "shared" / "paper" / "skeinformer.tex")
BATCHES = {"text": 128, "listops": 256, "retrieval": 64, "pathfinder": 512, "image": 256}  # of the paper's section 5
WIDTHS = {"lra_acc_aaai": 6, "lra_timespace_aaai": 15, "total_time": 10, "batch_size": 10}  # numbers in a row


@pytest.mark.parametrize("method", PUBLISHED)
def test_the_tables_agree_with_each_other(method: str) -> None:
    row = PUBLISHED[method]
    assert method in METHODS
    assert list(row.tasks) == list(TASKS)
    assert row.average == pytest.approx(fmean(figures.accuracy for figures in row.tasks.values()), abs=0.0101)
    for task, figures in row.tasks.items():
        assert figures.steps == pytest.approx(figures.exact_steps, abs=0.501)
        assert figures.minutes_per_thousand == pytest.approx(figures.minutes / figures.exact_steps, abs=0.51)
        assert figures.micro_batch * figures.accumulation == BATCHES[task]


def numbers(row: Published, table: str) -> list[float]:
    """The row of one of the paper's tables, from left to right."""
    figures = row.tasks.values()
    return {
        "lra_acc_aaai": [*(float(f.accuracy) for f in figures), row.average],
        "lra_timespace_aaai": [x for f in figures for x in (f.steps, f.minutes_per_thousand, f.accumulation)],
        "total_time": [x for f in figures for x in (f.exact_steps, f.minutes)],
        "batch_size": [x for f in figures for x in (f.micro_batch, f.accumulation)],
    }[table]


@pytest.mark.skipif(not PAPER.exists(), reason="needs the paper's text, or its place in SKEINFORMER_PAPER")
@pytest.mark.parametrize("table", WIDTHS)
def test_the_text_of_the_paper_has_the_same_figures(table: str) -> None:
    text = PAPER.read_text(encoding="utf-8")
    end = text.index(rf"\label{{table:{table}}}")
    lines = text[text.rindex(r"\begin{tabular}", 0, end) : end].splitlines()
    rows = []
    for line in lines:
        cells = re.sub(r"\\textbf\{([^}]*)\}|\\\\", r"\1", line).split("&")[1:]
        found = [float(cell.replace(",", "")) for cell in cells if re.fullmatch(r"\s*[\d.,]+\s*", cell)]
        if found:
            rows.append(found)
    assert {len(row) for row in rows} == {WIDTHS[table]}
    assert rows == [numbers(row, table) for row in PUBLISHED.values()]
