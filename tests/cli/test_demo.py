"""`skein demo` end to end at small lengths, and its page in a browser."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from skeinformer.cli.demo import Demo, headline, spread_passages
from skeinformer.cli.pretrained import load_model, minilm_folder
from skeinformer.cli.records import Record, read
from tests.cli.conftest import printed

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")

# where the browser is, and what it needs to run as any user on any machine
CHROMIUM = os.environ.get("SKEINFORMER_CHROMIUM") or next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"]
TINY: dict[str, Any] = {"lengths": (128, 64), "rounds": 1}
WHOLE: dict[str, Any] = {**TINY, "passages": 2, "passage_length": 160, "compare_length": 160}
METHODS = ["sdpa", "cluster", "cluster", "skeinformer", "vmean"]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a demo, and what it printed."""
    out = tmp_path_factory.mktemp("demo")
    with (out / "printed.txt").open("w") as file:
        Demo(**WHOLE, out=out).run(Console(file=file, width=100, highlight=False, _environ={}))
    return out, (out / "printed.txt").read_text()


def test_records_page_and_figure(demo: tuple[Path, str]) -> None:
    out, text = demo
    rows = read(out / "records.jsonl")
    attention = [r for r in rows if r["kind"] == "bench"]
    assert [(r["n"], r["method"]) for r in attention] == [(n, method) for n in (64, 128) for method in METHODS]
    counts = {"bench": 10, "embeddings": 3, "compare_layer": 6 * 13, "compare_model": 1}
    assert Counter(r["kind"] for r in rows) == counts
    html = (out / "report.html").read_text()
    assert "<script" not in html
    assert "http" not in html.replace("http://www.w3.org", "").replace("https://matplotlib.org", "").replace(
        "http://purl.org", ""
    ).replace("http://creativecommons.org", "")
    for name in {str(row["label"]) for row in attention}:
        assert name in text
        assert name in html
    assert "V-mean (baseline)" in html
    assert "recall" not in html  # no ranking from a few passages
    assert (out / "figure.svg").read_text().startswith("<svg")
    assert f"The page: {out / 'report.html'}" in text


def test_numbers_are_what_they_should_be(demo: tuple[Path, str]) -> None:
    for row in read(demo[0] / "records.jsonl"):
        if row["kind"] == "bench":
            assert row["seconds"] > 0  # type: ignore[operator]
            if row["method"] == "sdpa":
                assert row["ratio"] == 1.0
            elif row["budget"] in (16, None):  # the others are exact at these lengths
                assert 0.01 < row["error"] < 1.5  # type: ignore[operator]
        elif row["kind"] == "embeddings":
            assert row["cosine"] == pytest.approx(1) if row["method"] == "softmax" else 0.5 < row["cosine"] < 1  # type: ignore[operator]
    assert load_model(None).model.config._attn_implementation == "sdpa"


def test_parts_can_be_left_out_and_a_second_run_replaces_the_first(tmp_path: Path, console: Console) -> None:
    options = Demo(**{**TINY, "lengths": (64,)}, passages=0, compare_length=0, out=tmp_path)
    for _ in range(2):
        options.run(console)
    assert len(read(tmp_path / "records.jsonl")) == 5
    assert "whole model" not in printed(console)


def test_the_headline_has_the_numbers_of_the_records() -> None:
    common: Record = {"kind": "bench", "method": "cluster", "label": "C", "n": 64, "error": 0.125, "estimate": 0.1}
    (sentence,) = headline([{**common, "ratio": 4.0}, {**common, "n": 32, "ratio": 9.0}])
    assert "64 tokens" in sentence
    assert "12.5 %" in sentence
    assert "4.00 times as fast" in sentence


def test_passages_are_spread_over_the_text() -> None:
    tokenizer = load_model(None).tokenizer
    text = " ".join(map(str, range(1000)))
    rows = spread_passages(text, tokenizer, 3, 52)
    tokens = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    assert torch.equal(rows[0, 1:-1], tokens[:50])
    assert torch.equal(rows[-1, 1:-1], tokens[-50:])
    assert set(rows[:, 0].tolist()) == {tokenizer.cls_token_id}
    with pytest.raises(ValueError, match="100 passages of 52 need 5,000; give a longer text"):
        spread_passages(text, tokenizer, 100, 52)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with pytest.importorskip("playwright.sync_api").sync_playwright() as player:
        browser = player.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.mark.slow
@pytest.mark.xdist_group("browser")
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium on the path, or its place in SKEINFORMER_CHROMIUM")
@pytest.mark.parametrize("width", [400, 800, 1280])
def test_the_first_columns_are_seen_at_each_width(demo: tuple[Path, str], browser: Any, width: int) -> None:
    """Method, n, error and time stand inside the window without scrolling, and nothing is wider than the window."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    messages: list[str] = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.goto((demo[0] / "report.html").as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    headings = page.locator("table").first.locator("th")
    assert [headings.nth(i).inner_text() for i in range(4)] == ["method", "n", "error", "time"]
    for i in range(4):
        box = headings.nth(i).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    figure = page.locator("figure svg").first.bounding_box()
    assert figure["x"] + figure["width"] <= width
    assert messages == []
    page.close()
