"""The site: every page is in its navigation, every public name in its reference; built, it is looked at."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import skeinformer
from skeinformer import distributed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
SOURCES = ("docs", "theme", "skeinformer")


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


def test_every_public_name_is_in_the_reference() -> None:
    from skeinformer import huggingface

    shown = re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(), re.MULTILINE)
    last = {name.rpartition(".")[2] for name in shown}
    for module in (skeinformer, huggingface, distributed):
        assert {name for name in module.__all__ if not isinstance(getattr(module, name), ModuleType)} <= last, module


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
