"""Fixtures that open a page in a browser. A file that uses them has a fixture `address` of its own."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.lab.report.browsing import CHROMIUM, FLAGS


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Any]:
    """A function that opens the page; the test fails if the page says or asks for anything meanwhile."""
    messages: list[str] = []
    pages: list[Any] = []

    def open_page(fragment: str = "", **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.on("request", lambda request: messages.append(request.url) if not local(request.url) else None)
        page.set_default_timeout(10_000)
        page.goto(address + fragment)
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert messages == []


def local(url: str) -> bool:
    return url.startswith(("file:", "data:"))
