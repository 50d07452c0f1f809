"""The tables of docs/distributed.md and docs/scaling.md are those of the records, and the model is what it says."""

from pathlib import Path

import pytest

from skeinformer.lab.records import read
from studies import scaling
from studies.pages import filled
from studies.scaling import MeasuredLayer, Scaling, computing, efficient, exchanging, fastest, measured, parts, run
from studies.traffic import cluster_bytes

DOCS = Path(__file__).parents[2] / "docs"
LAYER = MeasuredLayer(seconds_per_token=1e-6, heads=1, width=64, budget=16, pilots=16, n=1000)


def test_the_pages_show_what_the_records_have() -> None:
    for name, texts in parts(read(DOCS / "results" / "processes.jsonl")).items():
        page = (DOCS / name).read_text()
        assert filled(page, texts) == page, f"python -m studies.scaling --write docs writes {name}"


def test_computing_is_divided_and_exchanging_does_not_depend_on_n() -> None:
    assert computing(LAYER, 10**6, 8, 1) == pytest.approx(1 / 8)
    assert computing(LAYER, 10**6, 8, 1000) == pytest.approx(1e-3 / 8)
    assert exchanging(LAYER, 1, 25) == 0
    # 4 gatherings of R - 1 steps and 4 sums of 2 (R - 1), and the bytes of the table in docs/distributed.md
    expected = 7 * (4 + 8) * scaling.LATENCY + cluster_bytes(8) * 8 / 25e9
    assert exchanging(LAYER, 8, 25) == pytest.approx(expected)


def test_where_it_stops() -> None:
    ranks, time = fastest(LAYER, 10**8, 100, 1)
    for other in (ranks // 2, ranks * 2):
        assert time <= computing(LAYER, 10**8, other, 1) + exchanging(LAYER, other, 100)
    half = efficient(LAYER, 10**8, 100, 1)
    assert computing(LAYER, 10**8, half, 1) >= exchanging(LAYER, half, 100)
    assert computing(LAYER, 10**8, 2 * half, 1) < exchanging(LAYER, 2 * half, 100)


def test_it_writes_between_the_marks(tmp_path: Path) -> None:
    for name in ("distributed.md", "scaling.md"):
        (tmp_path / name).write_text((DOCS / name).read_text())
    run(Scaling(DOCS / "results" / "processes.jsonl", tmp_path))
    assert (tmp_path / "scaling.md").read_text() == (DOCS / "scaling.md").read_text()
    with pytest.raises(ValueError, match="the page has no <!-- x -->"):
        filled("no marks", {"x": "text"})
    with pytest.raises(ValueError, match="measure --processes 1"):
        measured([])
