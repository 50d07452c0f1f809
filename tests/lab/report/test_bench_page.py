"""What the page shows of `skein bench`: time and memory against n, ratios, crossover, growth; peers and steps."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.records import Record
from skeinformer.lab.report.bench import speed_panels
from skeinformer.lab.report.sections import write_report
from tests.lab.report.parsed import Page
from tests.lab.report.synthetic import bench_records


def test_time_and_memory_are_per_example_for_each_mode() -> None:
    records = bench_records()
    panels = speed_panels(records)
    assert [panel.title for panel in panels] == [
        "time, forward",
        "peak memory, forward",
        "time, forward and backward",
        "peak memory, forward and backward",
    ]
    series = {line.label: line for line in panels[0].series}
    assert set(series) == {"SDPA", "V-mean", "Informer", "Linformer", "Skeinformer"}
    assert list(series["SDPA"].x) == [1024, 4096, 16384]
    assert series["SDPA"].y == pytest.approx([n * n * 1e-6 for n in (1024, 4096, 16384)])  # ms, though batches differ


def test_the_table_has_ratios_crossover_and_growth(tmp_path: Path) -> None:
    text = write_report(bench_records(), tmp_path / "r.html", "t").read_text(encoding="utf-8")
    page = Page(text)
    assert page.values("data-show") == {"ratio", "seconds", "peak_bytes", "flops", "peak_fraction"}
    rows = {row[0]: row for row in page.rows[:5]}
    assert rows["SDPA"][2:5] == ["1.000.900 to 1.10"] * 3
    assert rows["SDPA"][5:] == ["", "n^2.00"]
    assert rows["V-mean"][5:] == ["from n = 1,310", "n^1.00"]  # 1.31 n 1e-6 = n^2 1e-9
    assert rows["Skeinformer"][1] == "256"
    assert page.bold[:3] == ["0.632", "2.53", "10.1"]  # Informer's, neither SDPA's nor V-mean's
    assert page.values("data-mode") == {"forward", "both"}


@pytest.mark.parametrize(("scale", "expected"), [(0.01, "at all n measured"), (1e4, "not at n = 16,384")])
def test_a_method_may_be_faster_at_all_lengths_or_at_none(scale: float, expected: str, tmp_path: Path) -> None:
    records: list[Record] = [
        {**r, "ratio": float(r["ratio"] or 0) / scale} if r["method"] == "vmean" else r for r in bench_records()
    ]
    text = write_report(records, tmp_path / "r.html", "t").read_text(encoding="utf-8")
    row = next(row for row in Page(text).rows if row[0] == "V-mean")
    assert row[5] == expected


def test_sdpa_too_slow_to_measure_leaves_gaps(tmp_path: Path) -> None:
    missing = dict.fromkeys(("ratio", "ratio_q25", "ratio_q75"))
    records: list[Record] = [{**r, **missing} for r in bench_records() if r["method"] != "sdpa"]
    text = write_report(records, tmp_path / "r.html", "t").read_text(encoding="utf-8")
    assert "n^1.00" in text


def test_peers_and_steps_are_tables(tmp_path: Path) -> None:
    common: Record = {
        "method": "performer",
        "label": "Performer",
        "n": 4096,
        "batch": 4,
        "budget": 256,
        "seconds": 0.1,
    }
    peer: Record = {"kind": "bench_peer", **common, "peer": "performer-pytorch", "peer_seconds": 0.3, "ratio": 3.0}
    step: Record = {"kind": "bench_step", **common, "ratio": 4.5, "ratio_q25": 4.0, "ratio_q75": 5.0}
    several: Record = {"kind": "bench_processes", **common, "mode": "both", "processes": 4, "n_each": 1024}
    several |= {"seconds_per_token": 1e-5, "peak_bytes": 2**20, "received_bytes": 2**11, "ratio": 2.0}
    text = write_report([peer, step, several], tmp_path / "r.html", "t").read_text(encoding="utf-8")
    assert Page(text).rows == [
        ["Performer", "4,096", "256", "performer-pytorch", "100 ms", "300 ms", "3.00"],
        ["Performer", "4,096", "4", "256", "100 ms", "4.504.00 to 5.00"],
        ["Performer", "both", "4", "4,096", "1,024", "256", "100 ms", "10.0 us", "1.00 MiB", "2.00 KiB", "2.00"],
    ]
