"""Pairs over seeds, which tasks tell methods apart, and what of the paper holds: from records with known answers."""

import math
import re
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs the extra `report`")

from skeinformer.lab.records import Record, read
from skeinformer.lab.report.intervals import share_error, t_interval
from skeinformer.lab.report.lra import lra_markdown
from skeinformer.lab.report.lra_claims import CLAIMS, FAILS, HOLDS, TOO_FEW, check_claims, judge, tasks_table
from skeinformer.lab.report.lra_paired import ACCURACY_GAP, SeedDifference, over_tasks, pair, pair_text
from skeinformer.lab.report.lra_runs import arenas
from skeinformer.lab.report.lra_tasks import Lead, lead, telling, that_tell
from skeinformer.lab.report.published import TASKS
from tests.lab.report.synthetic_lra import baseline_record, check_records, lra_records, run_record
from tests.lab.report.test_lra_page import table_1, tables

DOCS = Path(__file__).parents[3] / "docs" / "results"
ABLATIONS = ("skeinformer_uniform", "skeinformer_no_norm", "skeinformer_simple_norm", "skeinformer_no_reuse")


LEVEL, LESS_TIME, FEWER_STEPS = CLAIMS[0].text, "A step takes less time", "It converges in fewer steps"


def claims(records: list[Record]) -> dict[str, tuple[SeedDifference | None, str]]:
    """What is said of each claim; beside exact attention without dropout."""
    (arena,) = arenas(records)
    found = [one for one in check_claims(arena, telling(arena)) if one.claim.second != "softmax_dropout"]
    return {one.claim.text: (one.overall, one.verdict) for one in found}


def test_a_pair_is_the_mean_over_common_seeds_with_its_interval() -> None:
    assert pair({}) is None
    assert pair({0: 1.5}) == SeedDifference(1.5, 1, None)
    assert pair({0: 1.0, 2: 3.0, 5: 2.0}) == SeedDifference(2.0, 3, t_interval([1.0, 3.0, 2.0]))
    assert pair_text(ACCURACY_GAP, pair({0: -1.5})) == ("-1.50", "1 seed")
    low, high = t_interval([1.0, 2.0])
    assert pair_text(ACCURACY_GAP, pair({0: 1.0, 1: 2.0})) == ("+1.50", f"2 seeds: {low:+.2f} to {high:+.2f}")


def test_a_mean_over_tasks_is_one_over_the_seeds_of_all_of_them() -> None:
    many, few = {0: 1.0, 1: 2.0, 2: 3.0, 3: 9.0}, {0: 5.0}
    assert over_tasks({"text": many, "image": few}) == pair(many, ("text",))  # one seed would leave one seed for all
    assert over_tasks({"text": few, "image": {0: 7.0, 1: 1.0}}) == SeedDifference(6.0, 1, None, ("text", "image"))
    both = over_tasks({"text": many, "image": {0: 3.0, 1: 4.0, 2: 5.0}})
    assert both == pair({0: 2.0, 1: 3.0, 2: 4.0}, ("text", "image"))
    assert over_tasks({"text": {}, "image": {}}) is None


@pytest.mark.parametrize(
    ("values", "level", "helps", "less"),
    [
        ([0.5, 0.6, 0.7], HOLDS, HOLDS, FAILS),
        ([-0.5, -0.6, -0.4], HOLDS, FAILS, HOLDS),
        ([-2.5, -2.6, -2.4], FAILS, FAILS, HOLDS),
        ([-3.0, 3.0, 0.0], TOO_FEW, TOO_FEW, TOO_FEW),
        ([0.5, 0.6], TOO_FEW, TOO_FEW, TOO_FEW),
        ([0.5], TOO_FEW, TOO_FEW, TOO_FEW),
        ([], TOO_FEW, TOO_FEW, TOO_FEW),
    ],
)
def test_a_claim_holds_where_the_interval_says_so_and_never_from_one_seed(
    values: list[float], level: str, helps: str, less: str
) -> None:
    found = pair(dict(enumerate(values)))
    shortest = [judge(claim, found).partition(" (")[0] for claim in (CLAIMS[0], CLAIMS[2], CLAIMS[-1])]
    assert shortest == [level, helps, less]


def test_every_claim_of_the_paper_is_judged() -> None:
    records = lra_records(("softmax", "vmean", "skeinformer", *ABLATIONS))
    found = claims(records)
    assert len(found) == 7
    overall, verdict = found[LEVEL]
    assert overall is not None
    assert (overall.mean, overall.seeds, overall.tasks) == (pytest.approx(1.4), 3, tuple(TASKS))
    assert verdict == HOLDS
    # their accuracies grow with the length of the name: all ablations are ahead here
    for text in ("Importance sampling helps", "Row normalization helps", "Pilot reutilization helps"):
        assert found[text][1] == FAILS
    table = tables(lra_markdown(records))["What of the paper holds (recipe cpu)"]
    first = dict(zip(*table[:2], strict=True))
    assert first["Text"].startswith("+1.40<br>3 seeds: +1.40 to +1.40")
    assert first["published, mean over five tasks"] == "+0.70"
    assert first["mean over tasks"].endswith("Text, ListOps, Retrieval, Pathfinder, Image")
    for one_seed in claims(lra_records(("softmax", "vmean", "skeinformer", *ABLATIONS), seeds=(1,))).values():
        assert one_seed[1].startswith(TOO_FEW)


def test_time_of_a_step_and_steps_to_a_loss_are_ratios() -> None:
    records: list[Record] = []
    for seed in range(3):
        for method, pace, losses in (("softmax", 0.4, (0.9, 0.8, 0.5)), ("skeinformer", 0.1, (0.9, 0.6, 0.6))):
            records.append(run_record(method, "text", seed, cpu_seconds=pace * 2000, steps=2000))
            for check, loss in zip(check_records(method, "text", seed, checks=3), losses, strict=True):
                records.append({**check, "valid_loss": loss})
        records += [run_record("vmean", "text", seed), baseline_record("bag_of_tokens", "text", 0.4)]
    found = claims(records)
    pace, verdict = found[LESS_TIME]
    assert pace is not None
    assert math.exp(pace.mean) == pytest.approx(0.25)
    assert verdict == HOLDS
    # both reach 0.6: Skeinformer at step 1000, exact attention at 1500
    steps, verdict = found[FEWER_STEPS]
    assert steps is not None
    assert math.exp(steps.mean) == pytest.approx(2 / 3)
    assert verdict == HOLDS


def test_a_task_that_tells_nothing_is_marked_and_not_averaged_in_silence() -> None:
    records = [r for r in lra_records(seeds=(0,)) if (r["method"], r["task"]) != ("bag_of_tokens", "text")]
    records.append(baseline_record("bag_of_tokens", "text", 0.49))
    found = table_1(records)
    row = found["Skeinformer"]
    assert row["Text †, %"].startswith("51.40")
    assert not any(cells["Text †, %"].startswith("**") for cells in found.values())  # none is the best there
    assert found["Skeinformer, 32 pilots"]["ListOps, %"].startswith("**")
    assert row["Average †, %"].startswith("61.40")
    assert row["average of the tasks that tell methods apart, %"] == "63.90<br>ListOps, Retrieval, Pathfinder, Image"
    text = lra_markdown(records)
    assert "† does not tell methods apart" in text
    rows = tables(text)["Which tasks tell methods apart (recipe cpu)"]
    said = {row[0]: row[-1] for row in rows[1:]}
    assert said["Text †"] == "no: exact attention does not beat Bag of tokens by 2 standard errors"
    assert {said[name] for name in TASKS.values() if name != "Text"} == {"yes"}
    more = [
        run_record(method, task, seed) for method in ("softmax", "skeinformer") for task in TASKS for seed in (1, 2)
    ]
    level, verdict = claims([*records, *more])[LEVEL]
    assert level is not None
    assert (level.tasks, verdict) == (("listops", "retrieval", "pathfinder", "image"), HOLDS)


def test_a_task_without_the_trivial_models_is_not_known_to_tell() -> None:
    records = [r for r in lra_records(seeds=(0,)) if r["kind"] != "lra_baseline"]
    (arena,) = arenas(records)
    known = telling(arena)
    assert that_tell(known) == []
    verdicts = {str(row["verdict"]) for row in tasks_table(arena, known).rows}
    assert verdicts == {"not known: no run of Bag of tokens with its seeds"}
    assert table_1(records)["V-mean"]["average of the tasks that tell methods apart, %"] == "-"
    no_exact = [r for r in records if r["method"] != "softmax"]
    (arena,) = arenas(no_exact)
    assert telling(arena)["text"].verdict == "not known: no run of exact attention"


def test_a_lead_has_the_greater_of_two_errors() -> None:
    def runs(*accuracies: float) -> list[Record]:
        return [run_record("vmean", "text", seed, test_accuracy=x) for seed, x in enumerate(accuracies)]

    alike = lead(runs(0.6, 0.6), runs(0.5, 0.5))
    assert alike is not None
    assert alike.points == pytest.approx(10)
    assert alike.error == pytest.approx(100 * math.hypot(share_error(0.6, 2000), share_error(0.5, 2000)))
    spread = lead(runs(0.5, 0.7, 0.9), runs(0.5, 0.5, 0.5, 0.1))
    assert spread == pytest.approx(Lead(20, 100 * 0.2 / math.sqrt(3)))
    assert not Lead(3.9, 2).is_clear
    assert lead(runs(0.5), []) is None


def test_methods_stand_beside_exact_attention_seed_by_seed() -> None:
    records = [r for r in lra_records() if (r["method"], r["task"], r["seed"]) != ("softmax", "text", 2)]
    headings, *rows = tables(lra_markdown(records))[
        "Accuracy beside that of Standard (recipe cpu), points, seed by seed"
    ]
    found = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    assert list(found) == ["V-mean", "Skeinformer", "Skeinformer, 32 pilots", "Bag of tokens", "Majority"]
    assert found["V-mean"]["Text"] == "-6.30<br>2 seeds: -6.30 to -6.30"
    assert found["V-mean"]["mean over tasks, points"].endswith("; ListOps, Retrieval, Pathfinder, Image")
    assert found["Bag of tokens"]["Text"] == "-5.00<br>1 seed"


def test_the_page_in_the_documents_is_what_the_records_say() -> None:
    written = (DOCS / "lra.md").read_text(encoding="utf-8")
    made = lra_markdown(read(DOCS / "lra.jsonl"))
    assert written == made, (
        "write it again: skein report --records docs/results/lra.jsonl --markdown docs/results/lra.md"
    )
    assert re.search(r"### What of the paper holds \(recipe cpu\)", written)
