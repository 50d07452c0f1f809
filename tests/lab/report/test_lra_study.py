"""The study of batch size and learning rate as a picture, in the page and as files."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.commands.report import write_pictures
from skeinformer.lab.report.intervals import share_error
from skeinformer.lab.report.lra_study import study_html, study_panels
from tests.lab.report.parsed import Page
from tests.lab.report.synthetic_lra import lra_records, run_record, study_records


def test_a_line_for_each_batch_with_the_recipes_own_run() -> None:
    accuracy, loss = study_panels([*lra_records(seeds=(0,)), *study_records()])
    assert (accuracy.y_label, loss.y_label) == ("test accuracy, %", "validation loss")
    assert list(accuracy.x_ticks) == [1e-5, 1e-4, 1e-3]
    assert [line.label for line in accuracy.series] == ["batch 64", "batch 128"]
    ours = accuracy.series[1]
    assert list(ours.x) == [1e-5, 1e-4, 1e-3]
    assert ours.y[1] == pytest.approx(51.4)  # at 1e-4 the recipe itself
    assert ours.error[1] == pytest.approx(100 * share_error(0.514, 2000))


def test_bars_of_several_seeds_are_over_the_seeds() -> None:
    runs = [
        run_record("skeinformer", "text", seed, overrides="batch=64", batch=64, test_accuracy=0.5 + 0.1 * seed)
        for seed in range(3)
    ]
    (line,) = study_panels(runs)[0].series
    assert (line.y[0], line.error[0]) == (pytest.approx(60), pytest.approx(100 * 0.1 / 3**0.5))


def test_the_picture_stands_in_the_page_and_in_files(tmp_path: Path) -> None:
    records = study_records()
    html = study_html(study_panels(records))
    assert Page(html).count("figure") == 2
    assert Page(html).values("data-label") == {"Skeinformer"}  # of the panels: their lines are no methods
    assert len(re.findall(r"<text[^>]*>batch 64<", html)) == 2
    paths = write_pictures(records, tmp_path)
    assert {path.name for path in paths} == {"lra-study.svg", "lra-study.png"}
    assert ElementTree.parse(tmp_path / "lra-study.svg").getroot().tag.endswith("svg")
    assert study_panels(lra_records(seeds=(0,))) == []
