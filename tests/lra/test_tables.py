"""The tables have the numbers that the records have: the committed ones exactly, made-up ones with known answers."""

import math
import re
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
from scipy import stats

from lra.claims import (
    ACCURACY,
    CLAIMS,
    FAILS,
    HOLDS,
    TOO_FEW,
    Difference,
    Lead,
    lead_of,
    over_tasks,
    pair,
    sensitivities,
)
from lra.figures import loss_panels, study_panels, write_figures
from lra.intervals import share_error, share_interval, t_interval
from lra.job import parse_method
from lra.records import Record
from lra.results import TASK_NAMES, last_checks, published, published_methods, results_by_recipe, to_frame
from lra.tables import difference_cell, markdown
from skeinformer.attention import METHODS
from skeinformer.cli.records import read

DOCS = Path(__file__).parents[2] / "docs"
ROWS = ("softmax", "vmean", "skeinformer", "skeinformer:num_pilots=32")
NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?")


def tables(text: str) -> dict[str, list[list[str]]]:
    """Tables by title: rows of cells, the headings first."""
    found = {}
    for part in text.split("### ")[1:]:
        lines = [line for line in part.splitlines() if line.startswith("|")]
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found[part.splitlines()[0]] = [row for row in rows if not row[0].startswith("---")]
    return found


def run_record(
    spec: str, task: str, seed: int = 0, *, kind: str = "lra_run", recipe: str = "cpu", **fields: object
) -> Record:
    """A run whose accuracy grows by task, row and seed; V-mean is behind all others."""
    method = parse_method(spec)
    place = -9 if spec == "vmean" else ROWS.index(spec) if spec in ROWS else len(spec) / 7
    names = {"recipe": recipe, "task": task, "method": method.method, "options": method.options_text}
    steps = 2000 + 500 * seed
    return {
        "kind": kind,
        **names,
        "label": method.label,
        "seed": seed,
        "overrides": "",
        "data": "new_aan_pairs" if task == "retrieval" else "imdb.parquet",
        "batch": 128,
        "micro_batch": 64,
        "accumulation": 2,
        "learning_rate": 1e-4,
        "steps": steps,
        "best_step": 1500,
        "stopped": "patience",
        "seconds": 0.06 * steps,
        "cpu_seconds": 0.12 * steps,
        "seconds_per_thousand_steps": 60.0,
        "valid_loss": 0.65,
        "test_accuracy": 0.5 + 0.05 * list(TASK_NAMES).index(task) + 0.007 * place + 0.01 * seed,
        "test_examples": 2000,
        "peak_bytes": 2**29,
        **fields,
    }


def check_records(spec: str, task: str, seed: int, losses: tuple[float, ...]) -> list[Record]:
    run = run_record(spec, task, seed, kind="lra_check")
    return [
        {**run, "step": 500 * i, "loss": loss, "valid_loss": loss, "cpu_seconds": 30.0 * i}
        for i, loss in enumerate(losses, start=1)
    ]


def arena(
    specs: tuple[str, ...] = ROWS, seeds: tuple[int, ...] = (0, 1, 2), tasks: tuple[str, ...] = tuple(TASK_NAMES)
) -> list[Record]:
    runs = [run_record(spec, task, seed) for spec in specs for task in tasks for seed in seeds]
    bags = [run_record("bag_of_tokens", task, kind="lra_baseline", test_accuracy=0.45) for task in tasks]
    return [*runs, *bags]


def table_1(records: list[Record]) -> dict[str, dict[str, str]]:
    headings, *rows = tables(markdown(records))["Table 1 (recipe cpu): test accuracy, %"]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in rows}


def test_the_page_in_the_documents_has_the_numbers_of_the_records() -> None:
    written, made = (
        tables(text)
        for text in ((DOCS / "results" / "lra.md").read_text(), markdown(read(DOCS / "results" / "lra.jsonl")))
    )
    assert list(written) == list(made)
    for title, rows in written.items():
        assert [row[0] for row in rows] == [row[0] for row in made[title]], title
        for row, other in zip(rows, made[title], strict=True):
            assert [NUMBER.findall(cell) for cell in row] == [NUMBER.findall(cell) for cell in other], (title, row[0])


def test_the_guide_has_the_numbers_of_the_page() -> None:
    rows = tables((DOCS / "results" / "lra.md").read_text())
    guide = (DOCS / "lra.md").read_text()
    for claim, compared, *_, overall, paper, verdict in rows["What of the paper holds (recipe cpu)"][1:]:
        second = re.split(r" [-/] ", compared.partition(";")[0], maxsplit=1)[1]
        assert f"| {claim} | {second} | {overall.replace('<br>', ', ')} | {paper} | {verdict} |" in guide
    for row in rows["Table 1 (recipe cpu): test accuracy, %"][1:-1]:
        line = next(line for line in guide.splitlines() if line.startswith(f"| {row[0]} |"))
        means = [float(cell.strip("*").partition("<br>")[0].strip("*")) for cell in row[1::2][:6]]
        shown = [float(cell.partition("±")[0]) for cell in line.strip("|").split("|")[1:]]
        assert [shown[i] for i in (1, 0, 2, 3, 4, 5)] == pytest.approx(means, abs=0.0501)


def test_a_cell_is_the_mean_over_seeds_with_deviation_and_interval() -> None:
    row = table_1(arena())["Skeinformer"]
    half = 100 * stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    assert row["Text, %"] == f"52.40<br>3 seeds: ± 1.00; {52.4 - half:.2f} to {52.4 + half:.2f}"
    assert row["Average, %"].startswith("62.40<br>3 seeds: ± 1.00; ")
    assert (row["Text, published, %"], row["Average, published, %"]) == ("62.47", "58.08")
    low, high = share_interval(0.514, 2000)
    one = table_1(arena(seeds=(0,)))["Skeinformer"]
    assert one["Text, %"] == f"51.40<br>1 seed: {100 * low:.2f} to {100 * high:.2f}"
    uneven = [run for run in arena() if (run["task"], run["seed"]) != ("image", 2)]
    assert table_1(uneven)["Skeinformer"]["Average, %"].endswith("<br>different seeds")
    missing = [run for run in arena() if (run["task"], run["method"]) != ("image", "vmean")]
    assert table_1(missing)["V-mean"]["Average, %"] == "-"


@pytest.mark.parametrize(
    ("title", "measured", "published_text"),
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
def test_tables_2_to_4(title: str, measured: str, published_text: str) -> None:
    _, *rows = tables(markdown(arena()))[title]
    assert next(row for row in rows if row[0] == "Skeinformer")[1:3] == [measured, published_text]
    assert len(rows) == len(ROWS)  # no trivial models


def test_rows_are_in_the_papers_order_and_the_best_is_bold() -> None:
    records = [*arena(("cluster", *reversed(ROWS)), seeds=(0,)), run_record("vmean", "text", 1, majority=0.99)]
    found = table_1(records)
    assert list(found) == [
        "Standard",
        "V-mean",
        "Skeinformer",
        "Skeinformer, 32 pilots",
        "Cluster sketch",
        "Bag of tokens",
        "Majority",
    ]
    assert found["Skeinformer, 32 pilots"]["Text, %"].startswith("**52.10**")
    assert found["Majority"]["Text, %"].startswith("99.00")
    assert found["Cluster sketch"]["Text, published, %"] == ""


def test_all_figures_of_the_paper_are_there() -> None:
    figures = published()
    assert (len(published_methods()), len(figures)) == (16, 16 * 6)
    assert set(published_methods()) == {name for name, row in METHODS.items() if row.in_table_1}
    means = figures.drop("average", level="task").groupby("method").accuracy.mean()
    pd.testing.assert_series_equal(
        means.round(2), figures.xs("average", level="task").accuracy, check_names=False, check_like=True, atol=0.011
    )
    counts = figures.drop("average", level="task")
    pd.testing.assert_series_equal(counts.exact_steps.round(), counts.steps.astype(float), check_names=False, atol=1.01)


def test_a_task_that_does_not_tell_methods_apart_is_marked() -> None:
    records = [r for r in arena() if (r["method"], r["task"]) != ("bag_of_tokens", "text")]
    records.append(run_record("bag_of_tokens", "text", kind="lra_baseline", test_accuracy=0.5))
    found = table_1(records)
    assert not any(cells["Text †, %"].startswith("**") for cells in found.values())  # none is the best there
    assert found["Skeinformer"]["average of the tasks that tell methods apart, %"].endswith(
        "ListOps, Retrieval, Pathfinder, Image"
    )
    rows = tables(markdown(records))["Which tasks tell methods apart (recipe cpu)"]
    assert {row[0]: row[-1] for row in rows[1:]}["Text †"].startswith("no: ")
    unknown = [r for r in arena() if r["kind"] == "lra_run"]
    (results,) = results_by_recipe(to_frame(unknown))
    assert {s.tells_apart for s in sensitivities(results).values()} == {None}


def test_a_lead_has_the_greater_of_two_errors() -> None:
    def runs(*shares: float) -> pd.DataFrame:
        return to_frame([run_record("vmean", "text", seed, test_accuracy=share) for seed, share in enumerate(shares)])

    alike = lead_of(runs(0.6, 0.6), runs(0.5, 0.5))
    assert alike == pytest.approx(Lead(10, 100 * math.hypot(share_error(0.6, 2000), share_error(0.5, 2000))))
    assert lead_of(runs(0.5, 0.7, 0.9), runs(0.5, 0.5, 0.5, 0.1)) == pytest.approx(Lead(20, 100 * 0.2 / math.sqrt(3)))
    assert lead_of(runs(0.5), runs(0.5)[:0]) is None


def test_pairs_are_over_common_seeds_and_tasks_with_enough_of_them() -> None:
    assert pair(pd.Series(dtype=float)) is None
    assert pair(pd.Series({0: 1.5})) == Difference(1.5, 1, None)
    assert pair(pd.Series({0: 1.0, 2: 3.0, 5: 2.0})) == Difference(2.0, 3, t_interval([1.0, 3.0, 2.0]))
    many, few = pd.Series({0: 1.0, 1: 2.0, 2: 3.0}), pd.Series({0: 5.0})
    assert over_tasks({"text": many, "image": few}) == pair(many, ("text",))
    assert over_tasks({"text": few, "image": pd.Series({0: 7.0, 1: 1.0})}) == Difference(
        6.0, 1, None, ("text", "image")
    )
    assert over_tasks({"text": few[:0]}) is None
    assert difference_cell(ACCURACY, pair(few)).detail == "1 seed"


@pytest.mark.parametrize(
    ("values", "level", "helps", "less"),
    [
        ([0.5, 0.6, 0.7], HOLDS, HOLDS, FAILS),
        ([-0.5, -0.6, -0.4], HOLDS, FAILS, HOLDS),
        ([-2.5, -2.6, -2.4], FAILS, FAILS, HOLDS),
        ([-3.0, 3.0, 0.0], TOO_FEW, TOO_FEW, TOO_FEW),
        ([0.5, 0.6], TOO_FEW, TOO_FEW, TOO_FEW),
        ([], TOO_FEW, TOO_FEW, TOO_FEW),
    ],
)
def test_a_claim_holds_where_the_interval_says_so(values: list[float], level: str, helps: str, less: str) -> None:
    difference = pair(pd.Series(values, dtype=float))
    verdicts = [claim.verdict(difference).partition(" (")[0] for claim in (CLAIMS[0], CLAIMS[2], CLAIMS[-1])]
    assert verdicts == [level, helps, less]


def test_time_and_steps_are_compared_as_ratios() -> None:
    records: list[Record] = []
    for seed in range(3):
        for method, pace, losses in (("softmax", 0.4, (0.9, 0.8, 0.5)), ("skeinformer", 0.1, (0.9, 0.6, 0.6))):
            records.append(run_record(method, "text", seed, cpu_seconds=pace * 2000, steps=2000))
            records += check_records(method, "text", seed, losses)
        records += [
            run_record("vmean", "text", seed),
            run_record("bag_of_tokens", "text", seed, kind="lra_baseline", test_accuracy=0.4),
        ]
    rows = tables(markdown(records))["What of the paper holds (recipe cpu)"]
    found = {(row[0], row[1].partition(";")[0]): row for row in rows}
    pace = found["A step takes less time", "Skeinformer / Standard"]
    steps = found["It converges in fewer steps", "Skeinformer / Standard"]
    assert (pace[-3].partition("<br>")[0], pace[-1]) == ("0.25", HOLDS)
    assert (steps[-3].partition("<br>")[0], steps[-1]) == ("0.67", HOLDS)  # both reach 0.6: at step 1000 and at 1500


def test_the_later_of_two_records_counts_and_failures_that_were_not_repaired() -> None:
    first = run_record("vmean", "text", test_accuracy=0.7, started="2026-01-02T00:00:00+00:00")
    second = run_record("vmean", "text", test_accuracy=0.8, started="2026-01-03T00:00:00+00:00")
    for order in ([first, second], [second, first]):
        assert table_1(order)["V-mean"]["Text, %"].startswith("**80.00**<br>1 seed")
    repaired = run_record("vmean", "text", kind="lra_failure", error="repaired")
    failed = run_record("reformer", "text", kind="lra_failure", error="not <finite>")
    text = markdown([repaired, first, failed])
    assert "- recipe cpu, Text, Reformer, seed 0: not &lt;finite>" in text
    assert "repaired" not in text
    assert table_1([repaired, first, failed])["Reformer"]["Text, %"] == "failed"


def test_other_settings_are_apart_and_the_study_has_every_batch_and_rate() -> None:
    study = [
        run_record(
            "skeinformer", "text", overrides=f"batch={batch}, learning_rate={rate}", batch=batch, learning_rate=rate
        )
        for batch, rate in ((64, 1e-4), (64, 1e-3), (128, 1e-3))
    ]
    other = run_record("vmean", "text", overrides="steps=5", test_accuracy=0.9)
    found = tables(markdown([*arena(seeds=(0,)), *study, other]))
    rows = found["Recipe cpu, data imdb.parquet: every batch with every learning rate"]
    assert [row[:2] for row in rows[1:]] == [["64", "0.0001"], ["64", "0.001"], ["128", "0.0001"], ["128", "0.001"]]
    assert [row[:3] for row in found["Recipe cpu, with other settings or data"][1:]] == [["V-mean", "Text", "steps=5"]]
    panels = study_panels(to_frame([*arena(seeds=(0,)), *study]))
    assert [panel.y_label for panel in panels] == ["test accuracy, %", "validation loss"]


def test_a_repeated_check_replaces_the_earlier_ones_from_its_step_on() -> None:
    first = check_records("vmean", "text", 0, (0.9, 0.8, 0.7))
    again = check_records("vmean", "text", 0, (0.5, 0.4))
    assert last_checks(to_frame([*first, *again])).loss.tolist() == [0.5, 0.4]
    assert last_checks(to_frame([*first, again[1]])).loss.tolist() == [0.9, 0.4]


def test_figures_are_files(tmp_path: Path) -> None:
    checks = [check for task in ("text", "image") for check in check_records("vmean", task, 0, (0.9, 0.8))]
    assert [panel.title for panel in loss_panels(to_frame(checks))] == ["recipe cpu: Text", "recipe cpu: Image"]
    svg, png = write_figures(checks, tmp_path)
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no figure shows these records"):
        write_figures(arena(("vmean",)), tmp_path)


def test_names_cannot_break_a_table_and_wrong_records_are_errors() -> None:
    attack = [{**run, "label": "<script> | *x*"} for run in arena(("vmean",))]
    text = markdown(attack)
    assert "<script" not in text
    assert r"&lt;script> \| \*x\*" in text
    with pytest.raises(ValueError, match="unknown task of the Long Range Arena 'txt'; did you mean 'text'"):
        markdown([{**arena()[0], "task": "txt"}])
    with pytest.raises(ValueError, match="no table of the Long Range Arena shows these records"):
        markdown(check_records("vmean", "text", 0, (0.5,)))
