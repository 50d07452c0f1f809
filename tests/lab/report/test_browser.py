"""A browser opens the page from a file, without a network: no errors, nothing asked for, and the filters work."""

import re
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")
pytest.importorskip("playwright", reason="needs playwright, of the extra `dev`")

from skeinformer.lab.report.sections import write_report
from tests.lab.report.browsing import IN_BROWSER, shown
from tests.lab.report.synthetic import approx_records, bench_records

pytestmark = IN_BROWSER
METHODS = ("softmax", "vmean", "informer", "linformer", "skeinformer", "skeinformer:num_pilots=32")


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    records = [
        *approx_records(METHODS, lengths=(64, 128), budgets=(8, 16), trials=2),
        *bench_records(("vmean", "skeinformer"), lengths=(64, 128)),
    ]
    return write_report(records, tmp_path_factory.mktemp("page") / "report.html", "A title").as_uri()


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page_fits_and_its_ink_is_seen(opened: Any, scheme: str, width: int) -> None:
    page = opened(color_scheme=scheme, viewport={"width": width, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") <= width  # only tables scroll sideways
    box = page.locator("figure svg").first.bounding_box()
    assert 200 < box["width"] <= width
    ink = page.locator("figure svg text").first.evaluate("element => getComputedStyle(element).fill")
    paper = page.locator("body").evaluate("element => getComputedStyle(element).backgroundColor")
    brightness = [sum(map(int, re.findall(r"\d+", color)[:3])) / 3 for color in (ink, paper)]
    assert abs(brightness[0] - brightness[1]) > 128
    picture = page.locator("figure svg").first.screenshot()
    assert len(picture) > 3000  # a blank one compresses to far less


def test_at_first_one_measure_and_the_largest_size_are_shown(opened: Any) -> None:
    page = opened()
    assert shown(page, "figure[data-measure]") == 4  # weights x lengths
    assert shown(page, "figure[data-pass]") == 4
    assert shown(page, "tr[data-budget='8']") == 0
    assert shown(page, "tr[data-budget='16']") > 0


def test_filters_change_what_is_shown(opened: Any) -> None:
    page = opened()
    page.get_by_label("64", exact=True).uncheck()
    assert shown(page, "figure[data-n='64']") == 0
    assert shown(page, "figure[data-measure]") == 2
    assert shown(page, "td[data-n='64']") == 0
    page.get_by_label("initialized", exact=True).uncheck()
    assert shown(page, "figure[data-measure]") == 1
    series = "figure [data-label='Informer']"
    assert shown(page, series) > 0
    page.get_by_label("Informer", exact=True).uncheck()
    assert shown(page, series) == 0
    assert shown(page, "tr[data-label='Informer']") == 0
    assert shown(page, "figure [data-label='Skeinformer']") > 0
    page.get_by_label("error", exact=True).select_option("gradient")
    assert page.locator("figure[data-measure]:visible").get_attribute("data-measure") == "gradient"
    page.get_by_label("sample size d", exact=True).select_option("8")
    assert shown(page, "tr[data-budget='16']") == 0
    assert shown(page, "tr[data-budget='8']") > 0


def test_the_address_keeps_the_choice(opened: Any) -> None:
    page = opened()
    page.get_by_label("pretrained", exact=True).uncheck()
    page.get_by_label("time of", exact=True).select_option("forward")
    fragment = page.evaluate("location.hash")
    again = opened(fragment)
    assert not again.get_by_label("pretrained", exact=True).is_checked()
    assert shown(again, "figure[data-pass='forward']") == 2
    assert shown(again, "figure[data-pass='both']") == 0
    again.get_by_label("pretrained", exact=True).check()
    assert shown(again, "figure[data-pass='forward']") == 4


def test_presets_and_the_keyboard(opened: Any) -> None:
    page = opened()
    page.get_by_role("button", name="none").click()
    assert shown(page, "figure [data-label]") == 0
    page.get_by_role("button", name="Figure 1's").press("Enter")
    assert shown(page, "figure [data-label='Linformer']") > 0
    assert shown(page, "figure [data-label='Skeinformer, 32 pilots']") == 0
    box = page.get_by_label("Skeinformer, 32 pilots", exact=True)
    box.press("Space")
    assert box.is_checked()
    assert shown(page, "figure [data-label='Skeinformer, 32 pilots']") > 0


def test_bold_is_the_best_of_what_is_shown(opened: Any) -> None:
    page = opened()
    table = page.locator("table.sortable").first
    best = table.locator("tbody tr:has(td:nth-child(3).best)")
    assert best.evaluate_all("rows => rows.map(row => row.dataset.label)") == ["Skeinformer"]
    page.get_by_label("Skeinformer", exact=True).uncheck()
    assert best.evaluate_all("rows => rows.map(row => row.dataset.label)") == ["Informer"]


def test_a_click_on_a_heading_sorts(opened: Any) -> None:
    page = opened()
    table = page.locator("table.sortable").first

    def values() -> list[float]:
        cells = table.locator("tbody tr:visible td:nth-child(3)").evaluate_all("x => x.map(y => +y.dataset.value)")
        return [float(value) for value in cells]

    table.get_by_role("button", name="spectral error").click()
    assert values() == sorted(values())
    assert table.locator("th[aria-sort=ascending]").count() == 1
    table.get_by_role("button", name="spectral error").click()
    assert values() == sorted(values(), reverse=True)


def test_without_scripts_everything_is_there(opened: Any) -> None:
    page = opened(java_script_enabled=False)
    assert shown(page, "figure") == page.locator("figure").count() > 20
    assert shown(page, "tbody tr") == page.locator("tbody tr").count()
    assert shown(page, "select") == shown(page, "input") == 0
    assert shown(page, "fieldset.methods svg") == len(METHODS) + 1
