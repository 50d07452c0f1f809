"""What the page shows of `skein approx`: panels, series, best values, the paper's order."""

import math
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.contender import parse
from skeinformer.lab.records import Record
from skeinformer.lab.report.approx import (
    RATIO,
    error_time_panels,
    figure_1_panels,
    frontiers_html,
    order_sentence,
)
from skeinformer.lab.report.figures import COLORS, MARKERS, Panel, Series, method_styles, panels_svg
from skeinformer.lab.report.inputs import group_inputs, pick_input
from skeinformer.lab.report.sections import write_report
from tests.lab.report.parsed import Page
from tests.lab.report.synthetic import MANY, approx_records, trial_record

SMALL = {"lengths": (64, 128), "budgets": (8, 16)}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    records = approx_records(("softmax", "vmean", "informer", "linformer", "skeinformer"), **SMALL)
    return write_report(records, tmp_path_factory.mktemp("page") / "r.html", "t").read_text(encoding="utf-8")


def methods_table(text: str) -> str:
    """The first table of the section "Methods"."""
    section = text.partition("<h2>Methods</h2>")[2]
    return section[section.index("<table") : section.index("</table>") + len("</table>")]


def test_figure_1_has_a_panel_for_each_weights_and_length() -> None:
    panels = figure_1_panels(group_inputs(approx_records(**SMALL)), "spectral")
    assert [panel.title for panel in panels] == [
        "initialized, n = 64",
        "initialized, n = 128",
        "pretrained, n = 64",
        "pretrained, n = 128",
    ]
    for panel in panels:
        series = {line.label: line for line in panel.series}
        assert set(series) == {"V-mean", "Informer", "Linformer", "Skeinformer"}
        assert list(series["Skeinformer"].x) == [8, 16]
        assert list(series["V-mean"].x) == []
        assert len(series["V-mean"].y) == 1


def test_the_panel_over_v_mean_leaves_out_what_is_worse_and_dropout() -> None:
    records = approx_records(("softmax", "softmax_dropout", "vmean", "linformer", "skeinformer"), **SMALL)
    panels = figure_1_panels(group_inputs(records), RATIO)
    assert len(panels) == 4
    for panel in panels:
        series = {line.label: line for line in panel.series}
        assert set(series) == {"V-mean", "Skeinformer"}
        assert list(series["V-mean"].y) == [1]
        assert list(series["Skeinformer"].y) == pytest.approx([0.625 * 2**0.5, 0.625])
        assert list(series["Skeinformer"].error) == pytest.approx([0, 0])  # trials differ, but for both alike
    without = [r for r in records if r["method"] != "vmean"]
    assert figure_1_panels(group_inputs(without), RATIO) == []


def test_dropout_and_the_floor_are_never_the_best_and_trials_are_counted(tmp_path: Path) -> None:
    methods = ("softmax_dropout", "vmean", "informer")
    rows = approx_records(methods, lengths=(64,), budgets=(8,), weights=("pretrained",), trials=3)
    good: list[Record] = [r if r["method"] == "informer" else {**r, "spectral": 1e-3} for r in rows]
    text = write_report(good, tmp_path / "r.html", "t").read_text(encoding="utf-8")
    table = methods_table(text)
    assert "pretrained, n = 64; trials: 3</h3>" in text
    assert {row.partition('"')[2].partition('"')[0] for row in table.split("<tr")[2:] if "class='best'" in row} == {
        "Informer"
    }


def test_points_are_means_over_trials_with_standard_errors() -> None:
    rows = [trial_record(parse("skeinformer"), 64, 8, "pretrained", 0, trial) for trial in range(4)]
    (panel,) = figure_1_panels(group_inputs(rows), "spectral")
    values = [float(r["spectral"] or 0) for r in rows]
    mean = sum(values) / 4
    error = math.sqrt(sum((x - mean) ** 2 for x in values) / 3 / 4)
    assert panel.series[0].y == pytest.approx([mean])
    assert panel.series[0].error == pytest.approx([error])


def test_times_of_one_layer_serve_all_inputs_and_the_reference_is_left_out() -> None:
    records = approx_records(("softmax", "vmean", "skeinformer"), **SMALL, layers=(0, 3))
    panels = error_time_panels(group_inputs(records), "both")
    assert len(panels) == 8
    assert "layer 3" in panels[-1].title
    times = {r["budget"]: r["both_ratio"] for r in records if r["kind"] == "approx_time" and r["n"] == 64}
    for panel in panels[::2]:  # n = 64
        series = {line.label: line for line in panel.series}
        assert set(series) == {"V-mean", "Skeinformer"}
        assert list(series["Skeinformer"].x) == [times[8], times[16]]
        assert panel.line is not None
        assert panel.line[0] == 1


def test_the_frontier_stands_below_the_figure_for_each_input_and_pass() -> None:
    records = approx_records(("softmax", "vmean", "cluster"), **SMALL)
    better: list[Record] = [{**r, "spectral_relative": 1e-3} if r["method"] == "cluster" else r for r in records]
    html = frontiers_html(group_inputs(better))
    assert Page(html).values("data-pass") == {"both", "forward"}
    assert html.count("<h3>") == html.count("<table") == 8
    assert html.count("No other method beats the cluster sketch") == 8
    assert "Standard" not in html
    assert frontiers_html(group_inputs(records)).count("another method beats: 2 of 2") == 8


def test_without_times_there_is_no_error_against_time(tmp_path: Path) -> None:
    rows = approx_records(lengths=(64,), budgets=(8, 16), weights=("pretrained",))
    records = [r for r in rows if r["kind"] == "approx"]
    text = write_report(records, tmp_path / "r.html", "t").read_text(encoding="utf-8")
    assert "Error against sample size" in text
    assert "Error against time" not in text


def test_summaries_give_the_same_page_as_trials() -> None:
    records = approx_records(**SMALL)
    inputs = group_inputs(records)
    summaries = [{k: v for k, v in row.items() if k != "gradient"} for rows in inputs.values() for row in rows]
    times = [r for r in records if r["kind"] == "approx_time"]
    assert group_inputs([*summaries, *times]) == inputs


def test_every_panel_is_drawn_and_every_series_can_be_hidden(text: str) -> None:
    page = Page(text)
    # 6 measures and 2 passes, 2 weights, 2 lengths; and a swatch for each of the 5 methods
    assert page.count("figure") == 8 * 4
    assert page.count("svg") == 8 * 4 + 5
    assert page.values("data-measure") == {
        "spectral",
        "spectral_to_vmean",
        "spectral_relative",
        "frobenius_relative",
        "row",
        "gradient",
    }
    assert page.values("data-pass") == {"both", "forward"}
    assert page.values("data-label") == {"Standard", "V-mean", "Informer", "Linformer", "Skeinformer"}
    for name in ("data-n", "data-weights", "data-layer", "data-budget", "data-largest"):
        assert page.values(name)
    for svg in re.findall(r"<figure.*?</figure>", text, flags=re.DOTALL):
        drawn = {"V-mean", "Informer", "Skeinformer"} | (
            set() if 'data-measure="spectral_to_vmean"' in svg else {"Linformer"}
        )
        assert set(re.findall(r'data-label="([^"]*)"', svg)) == drawn
        assert "clip-path" not in svg
        assert set(re.findall(r'href="#([^"]*)"', svg)) <= set(re.findall(r' id="([^"]*)"', svg))
    ids = re.findall(r' id="([^"]*)"', text)
    assert len(set(ids)) == len(ids)


def test_filters_exist_only_where_there_is_a_choice(text: str) -> None:
    assert Page(text).values("data-filter") == {"n", "weights", "budget", "label", "measure", "pass"}


def test_the_script_may_run_and_nothing_else_may_load(text: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-")
    assert text.count("<script") == 1
    assert "eval(" not in text
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }


def test_the_best_approximation_is_marked_at_each_size(text: str) -> None:
    table = Page(methods_table(text))
    best = {d: [row for row in table.rows if row[1] == d and row[2].split("±")[0] in table.bold] for d in ("8", "16")}
    assert [row[0] for row in best["16"]] == ["Skeinformer"]
    assert [row[0] for row in best["8"]] == ["Skeinformer"]
    assert not any(row[0] == "Standard" and row[2].split("±")[0] in table.bold for row in table.rows)


def test_the_order_of_the_paper_is_checked_at_the_largest_size() -> None:
    (rows,) = group_inputs(approx_records(lengths=(64,), budgets=(8, 16), weights=("pretrained",))).values()
    sentence = order_sentence(rows)
    assert "; the order holds, Linformer's error is 10.0 times V-mean's." in sentence
    swapped: list[Record] = [{**r, "spectral": 9.0} if r["method"] == "skeinformer" else r for r in rows]
    assert "over V-mean's, trial by trial, 0.625 ± 0 and 0.800 ± 0;" in sentence
    assert "broken: Skeinformer < Informer" in order_sentence(swapped)
    plain = [{k: v for k, v in r.items() if not k.startswith(RATIO)} for r in swapped]
    assert "standard errors the other way)." in order_sentence(plain)
    assert "trial by trial" not in order_sentence(plain)
    assert order_sentence([r for r in rows if r["method"] != "vmean"]) == ""
    masked: list[Record] = [{**r, "method": "informer_mask"} if r["method"] == "informer" else r for r in rows]
    assert order_sentence(masked) == sentence


def test_the_input_of_the_picture_is_chosen() -> None:
    inputs = group_inputs(approx_records(("vmean",), **SMALL, layers=(0, 3)))
    assert pick_input(inputs)[0].title == "pretrained, n = 128, layer 0"
    assert pick_input(inputs, n=64, weights="initialized", layer=3)[0].title == "initialized, n = 64, layer 3"
    with pytest.raises(ValueError, match="no records of n 5; there are: initialized, n = 64, layer 0"):
        pick_input(inputs, n=5)


def test_styles_tell_the_methods_apart() -> None:
    records: list[Record] = [
        {"method": spec.partition(":")[0], "options": spec.partition(":")[2], "label": spec} for spec in MANY
    ]
    styles = method_styles(records)
    assert len({(style.color, style.marker) for style in styles.values()}) == len(MANY)
    assert math.gcd(len(COLORS), len(MARKERS)) == 1
    assert {name for name, style in styles.items() if style.thick} == {
        "vmean",
        "informer",
        "linformer",
        "skeinformer",
        "skeinformer:num_pilots=32",
        "cluster",
    }


def test_names_and_titles_are_escaped(tmp_path: Path) -> None:
    attack = "<script>alert('1')</script> & \"$x$\" series-0"
    rows: list[Record] = [
        {**r, "label": attack, "text": attack, "model": attack} if r["method"] == "skeinformer" else r
        for r in approx_records(lengths=(64,), budgets=(8, 16), weights=("pretrained",))
    ]
    text = write_report(rows, tmp_path / "r.html", attack).read_text(encoding="utf-8")
    page = Page(text)
    assert page.count("script") == 1
    assert "alert('1')</script>" not in text.replace("&lt;/script&gt;", "")
    assert attack in page.values("data-label")


def test_a_panel_of_one_point_or_of_equal_values_is_drawn() -> None:
    panel = Panel("t", "x", "y", [Series("A", [8.0], [1.0], [0.5]), Series("B", [], [1.0]), Series("C", [8], [1], [2])])
    svg = panels_svg([panel], method_styles([{"method": name, "label": name} for name in "ABC"]))
    assert set(re.findall(r'data-label="([^"]*)"', svg)) == {"A", "B", "C"}
    assert "nan" not in svg.lower()


def test_what_was_skipped_is_said(tmp_path: Path) -> None:
    skipped: Record = {
        "kind": "approx_skipped",
        "method": "bigbird",
        "label": "Big Bird",
        "n": 64,
        "budget": 2,
        "reason": "too <small>",
    }
    text = write_report([skipped], tmp_path / "r.html", "t").read_text(encoding="utf-8")
    assert "Big Bird (n = 64; d = 2): too &lt;small&gt;" in text
    more = [{**skipped, "n": n, "budget": d} for n in (1024, 4096) for d in (8, 16)]
    text = write_report(more, tmp_path / "r.html", "t").read_text(encoding="utf-8")
    assert text.count("<li>") == 1
    assert "Big Bird (n = 1,024, 4,096; d = 8, 16): too &lt;small&gt;" in text
