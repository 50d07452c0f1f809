"""How pages look in a real browser: nothing overflows, everything can be read, nothing is asked for, at any width."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")
pytest.importorskip("playwright", reason="needs playwright, of the extra `dev`")

from skeinformer.lab.records import Record
from skeinformer.lab.report.families import FAMILIES
from skeinformer.lab.report.sections import write_report
from tests.comparison.test_text import layer, whole
from tests.lab.report.browsing import IN_BROWSER, shown
from tests.lab.report.synthetic import approx_records, bench_records, embedding_records, finetune_records
from tests.lab.report.test_demo_page import RECORDS as DEMO

pytestmark = IN_BROWSER
METHODS = ("softmax", "vmean", "informer", "linformer", "skeinformer", "skeinformer:num_pilots=32", "cluster")
LAYERS = [
    layer(i, 0.1 + 0.1 * i, head=head, layer=f"encoder.layer.{i}.attention.self", index=i)
    for i in range(6)
    for head in (None, *range(12))
]
COMPARED: list[Record] = [*LAYERS, whole()]
PAGES: dict[str, list[Record]] = {
    "demo": [*DEMO, *embedding_records(("softmax", "cluster"), budgets=(16,)), *COMPARED],
    "approx": approx_records(METHODS, lengths=(64, 128), budgets=(8, 16), trials=2),
    "bench": bench_records(("vmean", "skeinformer", "cluster"), lengths=(64, 128, 256, 512, 1024, 2048, 4096)),
    "models": [*embedding_records(), *finetune_records(), *COMPARED],
}
# of every visible element with text of its own: how clear its letters are on what lies behind them
CONTRAST = """() => {
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const level = ([r, g, b]) => [r, g, b].map(x => (x /= 255) <= .04045 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((sum, x, i) => sum + x * [.2126, .7152, .0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = parts(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(x => x.nodeType === 3 && x.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("script, style, title, option, select, button")) continue;
    const style = getComputedStyle(element);
    const ink = level(parts(element.closest("svg") ? style.fill : style.color)), paper = level(behind(element));
    const ratio = (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
    if (ratio < 4.5) found.push([element.tagName, element.textContent.slice(0, 30), ratio]);
  }
  return found;
}"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    return {name: write_report(records, folder / f"{name}.html", "A title") for name, records in PAGES.items()}


@pytest.fixture
def address(pages: dict[str, Path]) -> str:
    return next(iter(pages.values())).parent.as_uri() + "/"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_letters_are_clear(opened: Any, name: str, scheme: str) -> None:
    page = opened(f"{name}.html", color_scheme=scheme)
    assert page.evaluate(CONTRAST) == []


def test_the_check_of_contrast_finds_faint_letters(opened: Any) -> None:
    page = opened("demo.html")
    page.evaluate("document.querySelector('.lede').style.color = '#999999'")
    assert [tag for tag, _, _ in page.evaluate(CONTRAST)] == ["P"]


@pytest.mark.parametrize("width", [320, 400, 800, 1400])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_screen(opened: Any, name: str, width: int) -> None:
    page = opened(f"{name}.html", viewport={"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('main *')].filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
    assert page.evaluate(f"{wide}.filter(e => !e.closest('.scroll') && !e.closest('svg')).map(e => e.outerHTML)") == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["demo", "models"])
def test_the_two_sketches_have_the_same_colours_on_light_and_dark(opened: Any, name: str, scheme: str) -> None:
    page = opened(f"{name}.html", color_scheme=scheme)
    for method, color in FAMILIES.items():
        rgb = ", ".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))
        bar = page.locator(f"td.{method}").first.evaluate("element => getComputedStyle(element).boxShadow")
        assert bar.startswith(f"rgb({rgb})")


def test_a_wide_table_scrolls_in_its_box_and_keeps_its_first_column(opened: Any) -> None:
    page = opened("demo.html", viewport={"width": 400, "height": 900})
    box = page.locator(".scroll").first
    assert box.evaluate("e => e.scrollWidth > e.clientWidth")
    first, last = box.locator("tbody td:first-child").first, box.locator("tbody tr:first-child td:last-child")
    before = first.bounding_box()["x"], last.bounding_box()["x"]
    box.evaluate("e => { e.scrollLeft = e.scrollWidth }")
    assert first.bounding_box()["x"] == pytest.approx(before[0], abs=1)
    assert last.bounding_box()["x"] < before[1]
    assert last.bounding_box()["x"] + last.bounding_box()["width"] <= 400


def test_an_edge_behind_which_a_table_goes_on_is_shaded(opened: Any) -> None:
    """The last column of pixels of the box is darker where there is more, and paper at the end."""
    page = opened("demo.html", viewport={"width": 400, "height": 900})
    box = page.locator(".scroll").first
    assert edge(page, box) < 235
    box.evaluate("e => { e.scrollLeft = e.scrollWidth }")
    assert edge(page, box) > 250


def edge(page: Any, box: Any) -> float:
    """The brightness of the head of the table at the right edge of its box: 0 to 255."""
    from io import BytesIO

    import numpy as np
    from matplotlib.image import imread

    place = box.bounding_box()
    clip = {"x": place["x"] + place["width"] - 3, "y": place["y"] + 2, "width": 2, "height": 6}
    box.scroll_into_view_if_needed()
    picture: Any = imread(BytesIO(page.screenshot(clip=clip, full_page=True)))
    return float(255 * np.asarray(picture)[..., :3].mean())


def test_the_map_is_whole_at_800_pixels(opened: Any) -> None:
    page = opened("demo.html", viewport={"width": 800, "height": 900})
    box = page.locator(".scroll:has(.heat)")
    assert box.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert page.locator(".heat tbody tr").count() == 6
    assert page.locator(".heat tbody td").count() == 6 * 14


def test_a_demo_has_neither_filters_nor_scripts(opened: Any) -> None:
    page = opened("demo.html")
    assert page.locator("aside, script").count() == 0
    assert shown(page, "pre code") == 2


@pytest.mark.parametrize("name", PAGES)
def test_in_print_nothing_is_dark_or_hidden_behind_an_edge(opened: Any, name: str) -> None:
    page = opened(f"{name}.html", color_scheme="dark", viewport={"width": 720, "height": 1000})
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("body").evaluate("e => getComputedStyle(e).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 720
    assert shown(page, "aside") == 0
    boxes = page.locator(".scroll:visible")
    assert boxes.evaluate_all("boxes => boxes.map(e => getComputedStyle(e).overflowX)") == ["visible"] * boxes.count()
