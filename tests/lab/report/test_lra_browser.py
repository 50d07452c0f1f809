"""A browser opens the page of the Long Range Arena: wide tables scroll, filters choose recipes, tasks and methods."""

from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")
pytest.importorskip("playwright", reason="needs playwright, of the extra `dev`")

from skeinformer.lab.report.sections import write_report
from tests.lab.report.browsing import IN_BROWSER, shown
from tests.lab.report.synthetic_lra import failure_record, lra_records, study_records

pytestmark = IN_BROWSER
METHODS = ("softmax", "vmean", "skeinformer")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    records = [
        *lra_records(METHODS, seeds=(0, 1)),
        *lra_records(METHODS, tasks=("text", "image"), seeds=(0,), recipe="paper"),
        *study_records(),
        failure_record("reformer", "image"),
    ]
    return write_report(records, tmp_path_factory.mktemp("page") / "report.html", "A title").as_uri()


@pytest.mark.parametrize("width", [1280, 390])
def test_only_the_tables_scroll_sideways(opened: Any, width: int) -> None:
    page = opened(viewport={"width": width, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator(".scroll").first
    assert box.evaluate("box => box.scrollWidth > box.clientWidth")
    assert box.evaluate("box => { box.scrollLeft = 300; return box.scrollLeft > 0; }")
    assert len(page.locator("figure svg").first.screenshot()) > 3000  # a blank one compresses to far less


def test_filters_choose_recipes_tasks_and_methods(opened: Any) -> None:
    page = opened()
    assert shown(page, "figure") == 9  # loss in seven panels, the study in two
    page.get_by_label("paper", exact=True).uncheck()
    assert shown(page, "figure") == 7
    assert shown(page, "[data-recipe='paper']") == 0
    assert shown(page, "h3:has-text('recipe cpu')") == 11  # ten tables and the study
    page.get_by_label("Image", exact=True).uncheck()
    assert shown(page, "figure") == 6
    assert shown(page, ":is(th, td, li)[data-task='image']") == 0
    assert shown(page, "td[data-task='text']") > 0
    page.get_by_label("Skeinformer", exact=True).uncheck()
    assert shown(page, "tr[data-label='Skeinformer']") == 0
    assert shown(page, "figure [data-label='Skeinformer']") == 0
    assert shown(page, "tr:has-text('Bag of tokens')") == 1  # a trivial model stays


def test_the_bold_one_is_the_best_of_the_methods_shown(opened: Any) -> None:
    page = opened()
    table = page.locator("table.sortable:has-text('Bag of tokens')").last  # of recipe cpu
    best = table.locator("tbody tr:has(td:nth-child(2).best)")
    assert best.evaluate_all("rows => rows.map(row => row.dataset.label)") == ["Skeinformer"]
    page.get_by_label("Skeinformer", exact=True).uncheck()
    assert best.evaluate_all("rows => rows.map(row => row.dataset.label)") == ["Standard"]
    page.get_by_label("Standard", exact=True).uncheck()
    assert best.evaluate_all("rows => rows.map(row => row.dataset.label)") == ["V-mean"]


def test_a_column_of_published_figures_sorts(opened: Any) -> None:
    page = opened()
    table = page.locator("table.sortable:has-text('Bag of tokens')").last
    table.get_by_role("button", name="Text, published, %").click()
    rows = table.locator("tbody tr").evaluate_all("rows => rows.map(row => row.cells[0].textContent)")
    assert rows == ["Standard", "Skeinformer", "Reformer", "V-mean", "Bag of tokens", "Majority"]
