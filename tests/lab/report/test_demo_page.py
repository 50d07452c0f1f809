"""The demo's page is one self-contained file that shows every record, escapes every text, says what they say."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.records import Record
from skeinformer.lab.report import page as page_module
from skeinformer.lab.report.demo import COLUMNS, figure_svg, headline, write_figure
from skeinformer.lab.report.families import FAMILIES
from skeinformer.lab.report.figures import COLORS
from skeinformer.lab.report.format import number, plus_minus, seconds, size, with_error
from skeinformer.lab.report.sections import write_report
from skeinformer.lab.report.svg import INK
from tests.lab.report.parsed import Page


def record(
    method: str, label: str, n: int, time: float, error: float, estimate: float | None = None, budget: int | None = None
) -> Record:
    return {
        "budget": budget,
        "kind": "demo",
        "method": method,
        "label": label,
        "n": n,
        "seconds": time,
        "seconds_q25": time * 0.9,
        "seconds_q75": time * 1.2,
        "ratio": time / (n / 1000),
        "ratio_q25": time / (n / 1000) * 0.9,
        "ratio_q75": time / (n / 1000) * 1.1,
        "peak_bytes": n * 1000,
        "error": error,
        "error_se": error / 10,
        "estimate": estimate,
        "estimate_se": None if estimate is None else estimate / 5,
        "bound": None if estimate is None else 1.2 * estimate,
        "cpu": "A & B <processor>",
        "torch": "2.0",
        "commit": "abc123",
        "command": "skein demo --out 'x y'",
    }


RECORDS = [
    row
    for n in (1000, 4000)
    for row in (
        record("softmax", "exact attention", n, n / 1000, 2e-7),
        record("skeinformer", "Skeinformer", n, 0.1, 0.4, 0.42, 256),
        record("cluster", "Cluster sketch, fast", n, 0.2, 0.2, 0.21, 16),
        record("vmean", "V-mean, the floor", n, 0.001, 0.7),
    )
]


@pytest.fixture
def page(tmp_path: Path) -> Page:
    path = write_report(RECORDS, tmp_path / "new" / "report.html", "A title")
    assert [file.name for file in path.parent.iterdir()] == ["report.html"]
    return Page(path.read_text(encoding="utf-8"))


def test_the_page_has_one_figure_and_a_row_per_record(page: Page) -> None:
    assert page.count("svg") == 1
    assert page.count("table") == 1
    assert [row[:2] for row in page.rows] == [[r["label"], f"{r['n']:,}"] for r in RECORDS]
    assert all(len(row) == len(COLUMNS) for row in page.rows)
    assert page.rows[1][2:5] == ["256", "0.1000.0900 to 0.110", "0.400± 0.040"]
    assert page.rows[1][5:] == ["0.420± 0.084", "0.504", "100 ms90.0 ms to 120 ms", "977 KiB"]


def test_the_page_asks_for_nothing(page: Page) -> None:
    assert page.count("script") == 0
    for tag, attributes in page.elements:
        for name in ("src", "href", "xlink:href", "srcset", "action", "data"):
            value = attributes.get(name) or ""
            assert value == "" or value.startswith(("#", "data:,")), (tag, value)
        assert "url(http" not in (attributes.get("style") or "")


def test_styles_ask_for_nothing(tmp_path: Path) -> None:
    text = write_report(RECORDS, tmp_path / "report.html", "t").read_text(encoding="utf-8")
    for style in re.findall(r"<style.*?</style>", text, flags=re.DOTALL):
        assert "@import" not in style
        assert "url(" not in style
    # names of formats are no requests
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_the_page_suits_phones_and_dark_screens(tmp_path: Path) -> None:
    text = write_report(RECORDS, tmp_path / "report.html", "t").read_text(encoding="utf-8")
    assert '<meta name="viewport" content="width=device-width' in text
    assert "@media (prefers-color-scheme: dark)" in text
    assert INK not in text
    svg = text[text.index("<svg") : text.index("</svg>")]
    assert "currentColor" in svg
    assert "<text" in svg


def test_the_best_sketch_at_each_length_is_marked_and_never_the_floor(page: Page) -> None:
    # Skeinformer: ratio and (as all) memory; the cluster sketch: error and memory; never exact attention or V-mean
    assert page.bold[:4] == ["0.100", "977 KiB", "0.200", "977 KiB"]
    assert page.bold[4:] == ["0.0250", "3.81 MiB", "0.200", "3.81 MiB"]


def test_the_two_sketches_have_their_colours_in_figure_and_table(tmp_path: Path) -> None:
    text = write_report(RECORDS, tmp_path / "report.html", "t").read_text(encoding="utf-8")
    svg = text[text.index("<svg") : text.index("</svg>")]
    for name, color in FAMILIES.items():
        assert color in svg
        assert f"td.{name} {{ box-shadow: inset 4px 0 0 {color}" in text
        assert text.count(f"<td class='word {name}'>") == 2
    assert len(set(FAMILIES.values()) | set(COLORS)) == len(FAMILIES) + len(COLORS)


def test_commands_are_blocks(tmp_path: Path) -> None:
    text = write_report(RECORDS, tmp_path / "report.html", "t").read_text(encoding="utf-8")
    blocks = re.findall(r"<pre><code>(.*?)</code></pre>", text, flags=re.DOTALL)
    assert blocks[0].startswith("skein compare --model MODEL --text mine.txt")
    assert blocks[1] == "skein demo --out &#x27;x y&#x27;"


def test_every_text_is_escaped(tmp_path: Path) -> None:
    attack = "<script>alert('1')</script> & $x$ ${title}"
    rows = [{**r, "label": attack, "method": attack, "command": attack} for r in RECORDS]
    text = write_report(rows, tmp_path / "report.html", attack).read_text(encoding="utf-8")
    parsed = Page(text)
    assert parsed.count("script") == 0
    assert "<script" not in text
    assert parsed.rows[0][0] == attack


def test_the_footer_names_machine_versions_commit_and_command(tmp_path: Path) -> None:
    rows: list[Record] = [*RECORDS, {**RECORDS[0], "commit": "def456"}]
    text = write_report(rows, tmp_path / "report.html", "t").read_text(encoding="utf-8")
    footer = text[text.index("<footer") :]
    for expected in ("A &amp; B &lt;processor&gt;", "2.0", "abc123, def456", "skein demo --out"):
        assert expected in footer


def test_the_headline_names_the_cluster_sketch_and_follows_the_records() -> None:
    accurate = record("cluster", "Cluster sketch, accurate", 4000, 0.5, 0.1, 0.11, 128)
    assert headline([*RECORDS, accurate]) == [
        "Over 4,000 tokens, the cluster sketch is 20.0 times as fast as exact attention with an error of 20.0 % at "
        "d = 16 (its own estimate: 21.0 %), or 8.00 times as fast with an error of 10.0 % at d = 128 (its own "
        "estimate: 11.0 %). Skeinformer is 40.0 times as fast with an error of 40.0 % at d = 256 (its own "
        "estimate: 42.0 %)."
    ]
    slow = record("cluster", "Cluster sketch", 1000, 2.0, 0.5)
    assert headline([slow]) == [
        "Over 1,000 tokens, the cluster sketch takes 2.00 times as long as exact attention with an error of 50.0 %."
    ]
    assert headline([r for r in RECORDS if r["method"] != "cluster"]) == []
    assert headline([{"kind": "demo", "method": "cluster", "n": 3}]) == []


def test_the_headline_of_a_whole_model() -> None:
    common: Record = {
        "kind": "embeddings",
        "model": "MiniLM",
        "method": "cluster",
        "n": 4096,
        "passages": 8,
        "budget": 128,
    }
    rows: list[Record] = [
        {**common, "cosine": 0.95, "ratio": 0.4, "recall_1": 1.0},
        {**common, "cosine": 0.9876, "ratio": 0.5, "recall_1": 0.75},
    ]
    layers: list[Record] = [
        {"kind": "compare_layer", "method": "cluster", "layer": f"l.{i}", "index": i, "head": None, "safe": i > 0}
        | {"n": 2048, "tolerance": 0.3}
        for i in range(3)
    ]
    assert headline([*rows, *layers]) == [
        "With the cluster sketch at d = 128, MiniLM is 2.00 times as fast as with exact attention on passages of 4,096 "
        "tokens: the mean cosine with the exact embedding is 0.988, and the nearest passage stays the same for 6 of 8.",
        "At 2,048 tokens and a tolerance of 0.3, compare finds 2 of 3 layers safe: 1, 2. Better left exact: 0.",
    ]


def test_records_with_missing_fields_make_a_page(tmp_path: Path) -> None:
    rows: list[Record] = [
        {"kind": "demo", "method": "vmean", "n": 10},
        {"kind": "demo", "method": "other", "error": 0.1},
        {"kind": "demo"},
    ]
    parsed = Page(write_report(rows, tmp_path / "report.html", "t").read_text(encoding="utf-8"))
    assert len(parsed.rows) == 3
    with pytest.raises(ValueError, match="no records"):
        write_report([], tmp_path / "empty.html", "t")


def test_a_failed_report_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_report(RECORDS, tmp_path / "report.html", "old")
    monkeypatch.setattr(page_module, "footer_html", lambda records: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_report(RECORDS, path, "new")
    assert "<title>old</title>" in path.read_text(encoding="utf-8")


def test_the_figure_is_the_same_for_the_same_records() -> None:
    assert figure_svg(RECORDS) == figure_svg(RECORDS)
    for name in ("exact attention", "V-mean, the floor", "Skeinformer", "Cluster sketch, fast"):
        assert figure_svg(RECORDS).count(name) == 1


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (number(None), ""),
        (number(0), "0"),
        (number(0.12345), "0.123"),
        (number(2.5e-7), "2.5e-07"),
        (number(1234.5), "1234"),
        (seconds(0.0123), "12.3 ms"),
        (seconds(2.345), "2.35 s"),
        (seconds(None), ""),
        (size(3 * 2**20), "3.00 MiB"),
        (size(512), "0.500 KiB"),
        (with_error(0.5, 0.01), "0.500 ± 0.010"),
        (with_error(0.0146, 0.0002), "0.0146 ± 0.0002"),
        (with_error(0.5, None), "0.500"),
        (with_error(1e-7, 1e-8), "1.0e-07"),
        (with_error(None, None), ""),
        (plus_minus(0.0123), "± 0.012"),
        (plus_minus(4.2), "± 4.2"),
        (plus_minus(15.3), "± 15"),
        (plus_minus(0.0), "± 0"),
        (plus_minus(None), ""),
    ],
)
def test_numbers_read_well(shown: str, expected: str) -> None:
    assert shown == expected


def test_the_figure_alone_is_a_whole_svg_file(tmp_path: Path) -> None:
    path = write_figure(RECORDS, tmp_path / "deep" / "figure.svg")
    root = ElementTree.parse(path).getroot()
    assert root.tag.endswith("svg")
    assert "prefers-color-scheme: dark" in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["figure.svg"]
