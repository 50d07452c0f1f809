"""The site: every page is in its navigation, every public name in its reference; built, it is looked at."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import skeinformer
from skeinformer import distributed
from tests.browsing import CHROMIUM, FLAGS, IN_BROWSER

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = ("docs", "theme", "skeinformer")
# pages of prose; those in docs/results are written by commands
PROSE = [
    ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")
]
PROSE += sorted(DOCS.glob("*.md"))
WIDTH = 120
NOT_PROSE = re.compile(r" *(\||```|<!--)|    ")  # tables, fences, comments, code
LINKED = re.compile(r"\]\([^)]*\)")


def entries(nav: Any) -> Iterator[str]:
    """The pages of a navigation, in its order."""
    if isinstance(nav, str):
        yield nav
    else:
        for item in nav.values() if isinstance(nav, dict) else nav:
            yield from entries(item)


def settings() -> Any:
    return pytest.importorskip("yaml").safe_load((ROOT / "mkdocs.yml").read_text())


def test_every_page_is_in_the_navigation_once_and_every_entry_exists() -> None:
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    found = list(entries(settings()["nav"]))
    assert pages - set(found) == set()
    assert set(found) - pages == set()
    assert len(found) == len(pages)


def test_the_site_asks_no_other_host_for_fonts() -> None:
    assert settings()["theme"]["font"] is False


def test_every_public_name_is_in_the_reference() -> None:
    from skeinformer import huggingface

    shown = re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(), re.MULTILINE)
    last = {name.rpartition(".")[2] for name in shown}
    for module in (skeinformer, huggingface, distributed):
        assert {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)} <= last, module


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines of a page that are neither code nor tables, with their numbers; links without their targets."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        fenced ^= line.lstrip().startswith("```")
        if not fenced and not NOT_PROSE.match(line):
            yield number, LINKED.sub("]", line)


@pytest.mark.parametrize("page", PROSE, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_prose_is_wrapped(page: Path) -> None:
    text = page.read_text()
    assert [(number, line) for number, line in prose(text) if len(line) > WIDTH] == []
    # a line that a number with a dot begins reads as a list
    numbered = [(number, line) for number, line in prose(text) if re.match(r" *\d\d+\. ", line)]
    assert numbered == []


def test_prose_is_told_from_code_and_tables() -> None:
    text = "a [b](c)\n```\nx\n```\n| t |\n    code\n<!-- m -->\n- item\n"
    assert list(prose(text)) == [(1, "a [b]"), (8, "- item")]


needs_docs = pytest.mark.skipif(find_spec("zensical") is None, reason="needs the extra `docs`: make site installs it")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy, with every warning an error."""
    copy = tmp_path_factory.mktemp("site")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.jsonl"))
    for name in ("mkdocs.yml", "CONTRIBUTING.md", "SECURITY.md"):
        shutil.copy(ROOT / name, copy / name)
    for records in DOCS.rglob("*.jsonl"):  # links to them are checked, their contents are not needed
        (copy / records.relative_to(ROOT)).touch()
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with pytest.importorskip("playwright.sync_api").sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@needs_docs
@pytest.mark.slow
def test_every_page_is_built_and_names_no_other_host(site: Path) -> None:
    for name in entries(settings()["nav"]):
        built = (site / name).with_suffix(".html")
        html = built.read_text()
        for link in re.findall(r'href="([^":#]+)["#]', html):
            assert link.endswith(".py") or (built.parent / link).exists(), f"{name}: {link}"
        assert re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="https?://[^"]+', html) == [], name
        assert "```" not in html, name  # every fence was read as one
        assert '<div class="doc' in html or name != "api.md"
    assert not list(site.rglob("*.py"))


def in_browser(test: Callable[..., None]) -> Callable[..., None]:
    for mark in (needs_docs, pytest.mark.slow, *IN_BROWSER):
        test = mark(test)
    return test


@in_browser
@pytest.mark.parametrize(("width", "scheme"), [(400, "dark"), (1280, "light")])
def test_pages_fit_ask_for_nothing_and_search_finds_the_certificate(
    site: Path, browser: Any, width: int, scheme: str
) -> None:
    """Opened from the folder, without a server or a network."""
    said: list[str] = []
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: said.append(request.url) if request.url[:5] not in ("file:", "data:") else None)
    page.set_default_timeout(30_000)
    for name in ("choosing", "cluster", "cluster-rivals", "api", "index"):
        page.goto((site / f"{name}.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
    page.locator("label[for=__search]:visible, .md-search__button:visible").first.click()
    field = page.get_by_placeholder("Search").last
    field.press_sequentially("certificate", delay=30)
    page.get_by_role("option", name="certificate").first.wait_for()
    assert field.input_value() == "certificate"
    page.close()
    assert said == []
