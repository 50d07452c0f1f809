"""What the page and the markdown file show of the Long Range Arena: tables by recipe, intervals, marks, failures."""

import re
from pathlib import Path
from statistics import stdev
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.records import Record
from skeinformer.lab.report.figures import method_styles, panels_svg, write_panels
from skeinformer.lab.report.intervals import binomial_interval, mean_of_shares_interval, t_interval
from skeinformer.lab.report.lra import lra_markdown, lra_sections
from skeinformer.lab.report.lra_figures import loss_panels
from skeinformer.lab.report.published import PUBLISHED, TASKS
from skeinformer.lab.report.sections import write_report
from tests.lab.report.parsed import Page
from tests.lab.report.synthetic_lra import (
    METHODS,
    baseline_record,
    check_records,
    failure_record,
    lra_records,
    run_record,
    study_records,
)

STAND_IN = "stand-in, not comparable with the published figures"


def tables(text: str) -> dict[str, list[list[str]]]:
    """The tables of a markdown text by their titles: rows of cells, the headings first."""
    found = {}
    for part in text.split("### ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found[part.splitlines()[0]] = [row for row in rows if not row[0].startswith("---")]
    return found


def table_1(records: list[Record], recipe: str = "cpu") -> dict[str, dict[str, str]]:
    """Table 1 by method and heading."""
    headings, *rows = tables(lra_markdown(records))[f"Table 1 (recipe {recipe}): test accuracy, %"]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in rows}


def percents(interval: tuple[float, float]) -> str:
    return f"{100 * interval[0]:.2f} to {100 * interval[1]:.2f}"


def page(records: list[Record], folder: Path) -> str:
    return write_report(records, folder / "r.html", "t").read_text(encoding="utf-8")


def test_a_cell_is_the_mean_over_seeds_with_deviation_and_interval() -> None:
    row = table_1(lra_records())["Skeinformer"]
    seeds = [0.514, 0.524, 0.534]
    assert row["Text, %"] == f"52.40<br>3 seeds: ± 1.00; {percents(t_interval(seeds))}"
    assert row["Text, published, %"] == "62.47"
    averages = [0.614, 0.624, 0.634]
    assert stdev(averages) == pytest.approx(0.01)
    assert row["Average, %"] == f"62.40<br>3 seeds: ± 1.00; {percents(t_interval(averages))}"
    assert row["Average, published, %"] == "58.08"
    assert not any("tell methods apart" in heading for heading in row)  # as all rows are whole, and all tasks do


def test_one_seed_has_the_interval_of_its_test_set_and_no_deviation() -> None:
    row = table_1(lra_records(seeds=(0,)))["V-mean"]
    assert row["ListOps, %"] == f"48.70<br>1 seed: {percents(binomial_interval(0.487, 2000))}"
    shares = [0.437 + 0.05 * i for i in range(5)]
    assert row["Average, %"] == f"53.70<br>1 seed: {percents(mean_of_shares_interval(shares, [2000] * 5))}"
    unknown: list[Record] = [{**r, "test_examples": None} for r in lra_records(seeds=(0,))]
    assert table_1(unknown)["V-mean"]["ListOps, %"] == "48.70<br>1 seed"
    assert table_1(unknown)["V-mean"]["Average, %"] == "53.70<br>1 seed"


def test_an_average_of_tasks_with_different_seeds_has_no_interval() -> None:
    records = [r for r in lra_records() if (r["task"], r["seed"]) != ("image", 2)]
    assert table_1(records)["V-mean"]["Average, %"] == "54.60<br>different seeds"


def test_the_average_needs_all_five_tasks() -> None:
    records = lra_records(seeds=(0,))
    records = [r for r in records if (r["method"], r.get("options"), r["task"]) != ("skeinformer", "", "image")]
    found = table_1(records)
    telling = "average of the tasks that tell methods apart, %"
    assert found["Skeinformer"]["Image, %"] == "-"
    assert found["Skeinformer"]["Image, published, %"] == "37.27"
    assert found["Skeinformer"]["Average, %"] == "-"
    assert found["Skeinformer"][telling] == "58.90<br>Text, ListOps, Retrieval, Pathfinder"
    assert found["Standard"][telling] == "60.00<br>all five"


def test_the_best_method_is_bold_and_never_a_trivial_model() -> None:
    records = [*lra_records(seeds=(0,)), *(baseline_record("majority", task, 0.99) for task in TASKS)]
    found = table_1(records)
    assert found["Skeinformer, 32 pilots"]["Text, %"].startswith("**52.10**")
    assert found["Majority"]["Text, %"].startswith("99.00<br>")
    assert [text.count("**") for text in found["Standard"].values()] == [0] * 13
    alone = table_1(lra_records(("softmax", "vmean"), seeds=(0,)))
    assert alone["Standard"]["Text, %"].startswith("**")
    exact = [r for r in lra_records(seeds=(0,)) if r["method"] == "softmax"]
    assert table_1(exact)["Standard"]["Text, %"].startswith("**")  # exact attention is a rival here


def test_rows_come_in_the_papers_order_and_trivial_models_last() -> None:
    found = table_1(lra_records(("cluster", *reversed(METHODS)), seeds=(0,)))
    assert list(found) == [
        "Standard",
        "V-mean",
        "Skeinformer",
        "Skeinformer, 32 pilots",
        "Cluster sketch",
        "Bag of tokens",
        "Majority",
    ]
    assert found["Skeinformer, 32 pilots"]["Text, published, %"] == found["Cluster sketch"]["Text, published, %"] == ""


def test_the_majority_of_a_task_without_such_a_record_comes_from_the_runs() -> None:
    records = [r for r in lra_records(seeds=(0,)) if (r["method"], r["task"]) != ("majority", "text")]
    majority = table_1(records)["Majority"]
    assert majority["Text, %"].startswith("50.00")
    assert majority["Image, %"].startswith("40.00")


@pytest.mark.parametrize(
    ("title", "measured", "published"),
    [
        ("Table 2 (recipe cpu): training steps, thousands", "2.50<br>3 seeds: ± 0.50; 1.26 to 3.74; best at 1.50", "6"),
        (
            "Table 2 (recipe cpu): training time per thousand steps, minutes",
            "1.00<br>3 seeds: ± 0; 1.00 to 1.00; processor 2.00",
            "10",
        ),
        ("Table 2 (recipe cpu): accumulation in a step, micro-batches", "2", "2"),
        (
            "Table 3 (recipe cpu): total training time, minutes",
            "2.50<br>3 seeds: ± 0.50; 1.26 to 3.74; 2.50 k steps; processor 5.00",
            "59.23<br>6.17 k steps",
        ),
        ("Table 4 (recipe cpu): micro-batch, examples", "64<br>peak 512 MiB", "64"),
    ],
)
def test_tables_2_to_4_stand_beside_the_papers(title: str, measured: str, published: str) -> None:
    headings, *rows = tables(lra_markdown(lra_records()))[title]
    unit = title.rpartition(", ")[2]
    assert headings[:3] == ["method", f"Text, {unit}", f"Text, published, {unit}"]
    assert next(row for row in rows if row[0] == "Skeinformer")[1:3] == [measured, published]
    assert len(rows) == len(METHODS)  # no trivial models


def test_runs_that_the_last_step_ended_are_counted() -> None:
    runs = [run_record("vmean", "text", seed, stopped="steps" if seed else "patience") for seed in range(3)]
    (_, row) = tables(lra_markdown(runs))["Table 2 (recipe cpu): training steps, thousands"]
    assert row[1].endswith("2 of 3 at the limit")


def test_recipes_have_tables_of_their_own_with_their_marks(tmp_path: Path) -> None:
    records = [*lra_records(seeds=(0,)), *lra_records(("vmean",), tasks=("text",), seeds=(0,), recipe="paper")]
    text = lra_markdown(records)
    assert text.index("## Recipe `paper`") < text.index("## Recipe `cpu`")
    assert list(table_1(records, "paper")) == ["V-mean", "Bag of tokens", "Majority"]
    assert "Rows without a run: Standard, dropout, Standard, Big Bird" in text
    assert all("(recipe paper)" in title or "(recipe cpu)" in title for title in tables(text))
    html = page(records, tmp_path)
    assert html.index("<h2>Long Range Arena, recipe paper</h2>") < html.index("<h2>Long Range Arena, recipe cpu</h2>")
    assert {"paper", "cpu"} <= Page(html).values("data-recipe")
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert len(titles) == 19  # without exact attention, recipe paper has nothing to pair
    assert titles == list(tables(text))
    assert Page(html).values("data-filter") == {"recipe", "task", "label"}


def test_retrieval_from_other_documents_is_marked_as_a_stand_in(tmp_path: Path) -> None:
    aan = lra_records(seeds=(0,))
    other: list[Record] = [{**r, "data": "papers.parquet"} if r["task"] == "retrieval" else r for r in aan]
    assert "stand-in" not in lra_markdown(aan)
    text = lra_markdown(other)
    found = tables(text)
    assert f"Retrieval, and with it the Average: {STAND_IN}." in text
    assert text.count(f"Retrieval: {STAND_IN}.") == 5
    assert all("Retrieval (stand-in), " in ", ".join(rows[0]) for title, rows in found.items() if "Table" in title)
    assert found["Settings and data (recipe cpu)"][3][:2] == ["Retrieval", f"papers.parquet ({STAND_IN})"]
    assert page(other, tmp_path).count(STAND_IN) == 7


def test_the_later_of_two_records_of_a_run_counts() -> None:
    first = run_record("vmean", "text", test_accuracy=0.7, started="2026-01-02T00:00:00+00:00")
    second = run_record("vmean", "text", test_accuracy=0.8, started="2026-01-03T00:00:00+00:00")
    for order in ([first, second], [second, first]):
        assert table_1(order)["V-mean"]["Text, %"].startswith("**80.00**<br>1 seed")
    unknown: list[Record] = [{**first, "started": None}, {**second, "started": None}]
    assert table_1(unknown)["V-mean"]["Text, %"].startswith("**80.00**<br>1 seed")
    assert table_1(unknown[::-1])["V-mean"]["Text, %"].startswith("**70.00**<br>1 seed")


def test_failures_are_listed_unless_the_run_was_finished_later(tmp_path: Path) -> None:
    runs = lra_records(("vmean",), tasks=("text",), seeds=(0,))
    mended = failure_record("vmean", "text", error="was mended")
    again = failure_record("reformer", "text", error="first")
    failed = failure_record("reformer", "text", error="not <finite>")
    records = [mended, *runs, again, failed, failure_record("vmean", "text", 1)]
    text = lra_markdown(records)
    assert "- recipe cpu, Text, Reformer, seed 0: not &lt;finite>" in text
    assert "- recipe cpu, Text, V-mean, seed 1: out of memory" in text
    assert "was mended" not in text
    assert "first" not in text
    assert table_1(records)["Reformer"]["Text, %"] == "failed"
    assert table_1(records)["Reformer"]["Image, %"] == "-"
    assert table_1(records)["V-mean"]["Text, %"].startswith("**43.70**")
    html = page(records, tmp_path)
    assert "<h2>Failed runs</h2>" in html
    assert "recipe cpu, Text, Reformer, seed 0: not &lt;finite&gt;" in html


def test_failures_after_a_run_leave_its_figures() -> None:
    records = [run_record("vmean", "text"), failure_record("vmean", "text", error="killed")]
    assert table_1(records)["V-mean"]["Text, %"].startswith("**43.70**")
    assert "seed 0: killed" in lra_markdown(records)


def test_the_study_has_every_batch_and_rate_with_the_recipes_own_runs() -> None:
    records = [*lra_records(seeds=(0,)), *study_records()[1:]]  # without batch 64 and rate 1e-3
    found = tables(lra_markdown(records))
    (headings, *rows) = found["Recipe cpu, data imdb.parquet: every batch with every learning rate"]
    assert headings[:3] == ["batch, examples", "learning rate", "test accuracy, %"]
    assert "total training time, minutes" in headings
    values = {(row[0], row[1]): row[2].partition("<br>")[0] for row in rows}
    assert values == {
        ("64", "1e-05"): "66.39",
        ("64", "0.0001"): "66.30",
        ("64", "0.001"): "-",
        ("128", "1e-05"): "**72.79**",
        ("128", "0.0001"): "51.40",  # the recipe's
        ("128", "0.001"): "71.80",
    }
    assert table_1(records)["Skeinformer"]["Text, %"].startswith("51.40<br>1 seed")
    assert "Runs with other settings" not in lra_markdown(records)


def test_a_study_may_change_other_settings_if_all_its_runs_do() -> None:
    shorter = [{**record, "overrides": f"max_len=256, {record['overrides']}, steps=150"} for record in study_records()]
    found = tables(lra_markdown([*lra_records(seeds=(0,)), *shorter]))
    (_, *rows) = found[
        "Recipe cpu with max_len=256, steps=150, data imdb.parquet: every batch with every learning rate"
    ]
    assert [row[2].partition("<br>")[0] for row in rows if row[:2] == ["128", "0.0001"]] == ["-"]  # not the recipe's


def test_runs_with_other_settings_or_data_are_apart_and_not_lost() -> None:
    records = [
        *lra_records(("vmean", "softmax"), tasks=("text",), seeds=(0,)),
        run_record("vmean", "text", overrides="max_steps=5", test_accuracy=0.9),
        run_record("vmean", "text", data="other.parquet", test_accuracy=0.8),
    ]
    (_, *rows) = tables(lra_markdown(records))["Recipe cpu, with other settings or data"]
    assert [row[:5] for row in rows] == [
        ["V-mean", "Text", "max_steps=5", "imdb.parquet", f"90.00<br>1 seed: {percents(binomial_interval(0.9, 2000))}"],
        ["V-mean", "Text", "-", "other.parquet", f"80.00<br>1 seed: {percents(binomial_interval(0.8, 2000))}"],
    ]
    assert table_1(records)["V-mean"]["Text, %"].startswith("43.70<br>1 seed")


def test_of_data_with_as_many_runs_the_last_belongs_to_the_tables() -> None:
    records = [run_record("vmean", "text", data=name, test_accuracy=x) for name, x in (("old", 0.7), ("new", 0.8))]
    assert table_1(records)["V-mean"]["Text, %"].startswith("**80.00**")


def test_the_settings_say_what_differs() -> None:
    records = [run_record("vmean", "text", n=512), run_record("skeinformer", "text", 1, memory_budget=None)]
    headings, row = tables(lra_markdown(records))["Settings and data (recipe cpu)"]
    values = dict(zip(headings, row, strict=True))
    assert values["n"] == "512, 1,024"
    assert values["seeds"] == "0, 1"
    assert values["memory for a micro-batch"] == "1024 MiB"
    assert values["data"] == "imdb.parquet"


def test_loss_has_a_panel_for_each_recipe_and_task_and_lines_for_each_seed() -> None:
    records = [*lra_records(seeds=(0, 1)), *lra_records(("vmean",), tasks=("text",), seeds=(0,), recipe="paper")]
    panels = loss_panels(records)
    assert [panel.title for panel in panels] == [
        "recipe paper: Text",
        *(f"recipe cpu: {name}" for name in TASKS.values()),
    ]
    lines = [line for line in panels[1].series if line.label == "V-mean"]
    assert [(line.thin, line.named) for line in lines] == [(False, True), (True, True), (False, False), (True, True)]
    assert list(lines[0].x) == [60, 120, 180, 240, 300]
    assert lines[0].y == pytest.approx([0.7 / (1 + 0.05 * i) + 0.02 for i in range(1, 6)])
    assert lines[1].y == pytest.approx([0.7 / (1 + 0.1 * i) for i in range(1, 6)])
    svg = panels_svg([panels[1]], method_styles(records))
    assert set(re.findall(r'data-label="([^"]*)"', svg)) == {
        "Standard",
        "V-mean",
        "Skeinformer",
        "Skeinformer, 32 pilots",
    }
    assert len(re.findall(r"<text[^>]*>V-mean<", svg)) == 1  # the name stands once, though there are two seeds


def test_a_repeated_run_replaces_its_checks_and_a_resumed_one_goes_on() -> None:
    first = check_records("vmean", "text", checks=5)
    second: list[Record] = [{**r, "valid_loss": 0.3} for r in first]
    (panel,) = loss_panels([*first, *second[:2]])
    assert list(panel.series[0].y) == [0.3, 0.3]
    (panel,) = loss_panels([*first[:3], *second[2:]])
    assert panel.series[0].y == pytest.approx([0.7 / 1.05 + 0.02, 0.7 / 1.1 + 0.02, 0.3, 0.3, 0.3])
    assert loss_panels([{**r, "overrides": "batch=64"} for r in first]) == []
    assert loss_panels([{**r, "valid_loss": None, "loss": 0.0} for r in first]) == []


def test_pictures_of_long_runs_are_files(tmp_path: Path) -> None:
    records = check_records("vmean", "text", checks=200)
    svg, png = write_panels(loss_panels(records), method_styles(records), tmp_path / "lra-loss")
    text = svg.read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag.endswith("svg")
    assert text.count("<use") < 60  # marks on few of the points
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_run_that_is_not_finished_shows_its_loss_only(tmp_path: Path) -> None:
    html = page(check_records("vmean", "text"), tmp_path)
    assert Page(html).count("figure") == 1
    assert "<table" not in html
    with pytest.raises(ValueError, match="no table of the Long Range Arena shows these records"):
        lra_markdown(check_records("vmean", "text"))


def test_the_page_has_sections_rows_and_escaped_names(tmp_path: Path) -> None:
    attack = "<script>alert(1)</script> | *x*"
    records: list[Record] = [
        {**r, "label": attack} if r["method"] == "vmean" else r for r in [*lra_records(seeds=(0,)), *study_records()]
    ]
    html = page(records, tmp_path)
    assert Page(html).count("script") == 1
    assert re.findall(r"<h2>(.*?)</h2>", html) == [
        "Long Range Arena, recipe cpu",
        "Loss against training time",
        "Skeinformer on Text: batch and learning rate",
        "How this was made",
    ]
    assert attack in Page(html).values("data-label")
    assert "Bag of tokens" not in Page(html).values("data-label")
    assert Page(html).values("data-task") == set(TASKS)
    cells = [re.findall(r"(?<!\\)\|", line) for line in lra_markdown(records).splitlines() if "script>" in line]
    assert {len(bars) for bars in cells} == {8, 12, 14}  # the paired table, Tables 2 to 4, Table 1
    assert "<script" not in lra_markdown(records)


def test_an_unknown_task_is_an_error() -> None:
    with pytest.raises(ValueError, match="unknown task of the Long Range Arena 'txt'; did you mean 'text'"):
        lra_sections([{**run_record("vmean", "text"), "task": "txt"}], {})


def test_every_row_of_the_paper_can_be_filled() -> None:
    records = [run_record(method, task) for method in PUBLISHED for task in TASKS]
    found = table_1(records)
    assert len(found) == len(PUBLISHED) + 1  # and the majority
    for (_, row), published in zip(found.items(), PUBLISHED.values(), strict=False):
        assert [row[f"{name}, published, %"] for name in TASKS.values()] == [
            f"{figures.accuracy:.2f}" for figures in published.tasks.values()
        ]
    assert "Rows without a run: Cluster sketch." in lra_markdown(records)
    assert "without a run" not in lra_markdown([*records, run_record("cluster", "text")])
