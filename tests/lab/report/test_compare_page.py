"""The tables of a comparison on the page; its sentences are those of tests/comparison/test_text.py."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.report.heat import STEPS, color_of, ink_on, luminance, shared_name
from skeinformer.lab.report.sections import write_report
from tests.comparison.test_text import layer, whole
from tests.lab.report.parsed import Page


def test_every_call_of_a_layer_has_a_row(tmp_path: Path) -> None:
    calls = [layer(0, 0.2), layer(0, 0.5, call=2), layer(1, 0.1, call=1)]
    page = Page(write_report([*calls, whole()], tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    shown = ["layer.0", "layer.0 (call 2)", "layer.1"]
    assert [row[0] for row in page.rows[1:]] == ["0", "0 (call 2)", "1", *shown]  # the map, then the table


def test_tables(tmp_path: Path) -> None:
    records = [layer(0, 0.5), layer(0, 0.1, head=0), whole()]
    stray = {**layer(5, 0.1), "started": "of a run that was killed"}
    page = Page(write_report([*records, stray], tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    assert page.rows[0][:5] == ["Cluster sketch", "64", "4,096", "BertModel", "<a text>"]
    assert page.rows[0][5:] == [
        "0.9900least 0.9000",
        "0.100",
        "0.0500largest 0.500",
        "75.0 %",
        "0.2500.200 to 0.300",
        "1 of 2",
        "0.500",
        "0.200",
    ]
    assert page.rows[1] == ["layer.0", "0.50", "0.10"]
    assert [row[:2] for row in page.rows[2:]] == [["layer.0", "all"], ["layer.0", "0"]]
    assert [row[-2:] for row in page.rows[2:]] == [["0.2000.150 to 0.250", "no"], ["0.2000.150 to 0.250", "yes"]]
    assert "layer.5" not in {row[0] for row in page.rows}


def test_the_map_has_a_row_for_each_layer_and_a_colour_for_each_error(tmp_path: Path) -> None:
    errors = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]]
    heads = [layer(i, errors[i][h], head=h) for i in range(2) for h in range(3)]
    records = [layer(0, 0.2), layer(1, 0.5), *heads, whole()]
    text = write_report(records, tmp_path / "r.html", "t").read_text(encoding="utf-8")
    heat = text[text.index("<table class='heat'>") :]
    heat = heat[: heat.index("</table>")]
    assert Page(heat + "</table>").rows == [
        ["0", "0.20", "0.10", "0.20", "0.30"],
        ["1", "0.50", "0.40", "0.50", "0.60"],
    ]
    assert heat.count(f"background:{color_of(0.3, 0.3)}") == 1  # the tolerance itself is safe
    assert "Layers: layer.*." in text
    assert "the tolerance is 0.300" in text


@pytest.mark.parametrize("color", [color for _, color in STEPS])
def test_numbers_on_the_map_can_be_read(color: str) -> None:
    light, dark = sorted((luminance(color), luminance(ink_on(color))), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


def test_colours_go_with_the_error() -> None:
    errors = [0.0, 0.1, 0.2, 0.3, 0.31, 0.5, 0.8, 5.0]
    colors = [color_of(error, 0.3) for error in errors]
    assert colors == [color for _, color in STEPS if color in colors]
    assert len(set(colors)) == len(errors)


@pytest.mark.parametrize(
    ("names", "pattern", "short"),
    [
        (("a.0.b", "a.1.b"), "a.*.b", ["0", "1"]),
        (("a.0.b", "a.1.0.b"), "a.*.b", ["0", "1.0"]),
        (("a.0", "b.0"), "*.0", ["a", "b"]),
        (("a.a.a", "a.a"), "a.*", ["a.a", "a"]),
        (("a.0", "b.1"), "", ["a.0", "b.1"]),
        (("alone.0",), "", ["alone.0"]),
        (("call 0", "call 1"), "", ["call 0", "call 1"]),
    ],
)
def test_shared_names(names: tuple[str, ...], pattern: str, short: list[str]) -> None:
    assert shared_name(names) == (pattern, dict(zip(names, short, strict=True)))
