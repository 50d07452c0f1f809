"""The tables of a comparison on the page; its sentences are those of tests/compare/test_text.py."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.report.sections import write_report
from tests.compare.test_text import layer, whole
from tests.lab.report.parsed import Page


def test_every_call_of_a_layer_has_a_row(tmp_path: Path) -> None:
    calls = [layer(0, 0.2, 32), layer(0, 0.5, 512, call=2), layer(1, 0.1, 16, call=1)]
    page = Page(write_report([*calls, whole()], tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    assert [row[3] for row in page.rows[1:]] == ["layer.0", "layer.0 (call 2)", "layer.1"]


def test_tables(tmp_path: Path) -> None:
    records = [layer(0, 0.5, 512), layer(0, 0.1, None, head=0), whole()]
    stray = {**layer(5, 0.1, 2), "started": "of a run that was killed"}
    page = Page(write_report([*records, stray], tmp_path / "r.html", "t").read_text(encoding="utf-8"))
    assert page.rows[0][:5] == ["BertModel", "<a text>", "Cluster sketch", "64", "4,096"]
    assert page.rows[0][5:] == [
        "0.9900least 0.9000",
        "",
        "0.100",
        "0.0500largest 0.500",
        "75.0 %",
        "0.2500.200 to 0.300",
        "1 of 2",
        "512",
        "256",
    ]
    assert [row[3:5] for row in page.rows[1:]] == [["layer.0", "all"], ["layer.0", "0"]]
    assert [row[-3:] for row in page.rows[1:]] == [["no", "512", "1,024"], ["yes", "", ""]]
    assert "layer.5" not in {row[3] for row in page.rows}
