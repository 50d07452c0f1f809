"""What limits training: arms are trained once, and differences are paired by seed."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from skeinformer.attention import METHODS
from skeinformer.lab.records import Record, read
from studies.finetune import second_half
from studies.limits import NEVER, Limits, differences, exclusions, run_limits, table_of
from tests.lra.tiny import write_tiny


def test_differences_are_paired_by_seed() -> None:
    records = [
        {
            "kind": "limits",
            "task": "text",
            "arm": arm,
            "d": d,
            "seed": seed,
            "second_half_loss": loss,
            "steps": 2,
            "accuracy": 0.5,
        }
        for arm, d, offset in (("softmax", None, 0.0), ("cluster", 16, 0.1))
        for seed, loss in ((0, 1 + offset), (1, 5 + offset), (2, 3 + offset))
        if (arm, seed) != ("cluster", 2)
    ]
    (table,) = differences(records).values()
    cluster = table["cluster", 16]
    assert cluster.seeds == 2
    assert cluster.loss.mean == pytest.approx(0.1)
    assert cluster.loss.half == pytest.approx(0, abs=1e-6)
    assert table["softmax", None].loss.mean == pytest.approx(3)


def test_another_arm_is_compared_with_at_the_same_budget() -> None:
    records: list[Record] = [
        {"kind": "limits", "task": "text", "arm": arm, "d": d, "seed": 0, "steps": 2, "accuracy": accuracy}
        | {"second_half_loss": 1.0}
        for arm, d, accuracy in (("cluster", 16, 0.5), ("cluster", 64, 0.625), ("other", 16, 0.75), ("other", 64, 0.75))
    ]
    (table,) = differences(records, "cluster").values()
    assert {arm: found.accuracy.mean for arm, found in table.items()} == {
        ("cluster", 16): 0.5,
        ("cluster", 64): 0.625,
        ("other", 16): 0.25,
        ("other", 64): 0.125,
    }
    assert differences(records)["Text from scratch, 2 steps"] == {}  # exact attention was not run


def test_the_test_loss_is_shown_where_both_arms_have_it() -> None:
    run: Record = {"kind": "limits", "task": "text", "steps": 2, "accuracy": 0.5, "second_half_loss": 1.0}
    records: list[Record] = [
        {**run, "arm": "softmax", "d": None, "seed": 0, "test_loss": 2.0},
        {**run, "arm": "softmax", "d": None, "seed": 1},  # from before it was kept
        {**run, "arm": "cluster", "d": 16, "seed": 0, "test_loss": 2.5},
        {**run, "arm": "cluster", "d": 64, "seed": 1, "test_loss": 2.5},
    ]
    (table,) = differences(records).values()
    assert {arm: found.test_loss for arm, found in table.items()} == {
        ("softmax", None): None,
        ("cluster", 16): (0.5, None),
        ("cluster", 64): None,
    }
    head, rows = table_of(table)
    assert head[-1] == "test loss"
    assert [row[-1] for row in rows] == ["", "+0.500", ""]
    (without,) = differences([record for record in records if "test_loss" not in record]).values()
    assert table_of(without)[0][-1] == "accuracy, %"


def test_runs_of_the_long_range_arena_are_arms() -> None:
    """Those by the recipe itself; their loss comes from their checks."""
    records: list[Record] = []
    for method, offset, overrides in (("softmax", 0.0, ""), ("cluster", 0.25, ""), ("cluster", 9.0, "steps=5")):
        run: Record = {"recipe": "cpu", "task": "listops", "method": method, "options": "", "seed": 0}
        run |= {"overrides": overrides}
        records += [{"kind": "lra_check", **run, "step": step, "loss": 8.0 / step + offset} for step in (1, 4)]
        records.append({"kind": "lra_run", **run, "steps": 600, "budget": 32, "test_accuracy": 0.3})
    (table,) = differences(records).values()
    assert table["softmax", None].loss == (2, None)
    assert table["cluster", 32].loss == (0.25, None)
    (twice,) = differences([*records, *records]).values()  # a run that two files have
    assert twice == table
    others = [{**record, "recipe": "paper", "test_accuracy": 0.9} for record in records]
    (alone,) = differences([*records, *others]).values()  # of another recipe, by chance of as many steps
    assert alone == table


def test_a_run_without_its_checks_says_what_is_missing() -> None:
    run: Record = {"recipe": "cpu", "task": "listops", "method": "softmax", "options": "", "seed": 0, "overrides": ""}
    with pytest.raises(ValueError, match="softmax on listops with seed 0 has no checks"):
        differences([{"kind": "lra_run", **run, "steps": 600, "budget": 32, "test_accuracy": 0.3}])


def test_the_second_half_counts() -> None:
    assert second_half([9, 9, 1, 3]) == 2
    assert second_half([5]) == 5


def test_arms_are_trained_once_and_shown(tmp_path: Path) -> None:
    write_tiny(tmp_path / "text", "text")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- limits -->\n<!-- end -->\nafter\n")
    arms = ("softmax", "mixed:output=exact")
    options = Limits(arms=arms, data=tmp_path / "text", seeds=(0,), steps=2, out=tmp_path / "runs", page=page)
    for _ in range(2):
        console = Console(file=StringIO(), width=120)
        run_limits(options, console)
        assert "mixed" not in METHODS
        assert [record["arm"] for record in read(tmp_path / "runs" / "records.jsonl")] == [
            "softmax",
            "mixed:output=exact",
        ]
    assert "mixed:output=exact" in console.file.getvalue()  # type: ignore[attr-defined]
    runs = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/run.json")]
    assert [run["patience"] for run in runs] == [NEVER, NEVER]  # one that stopped early would leave its table
    assert "Text from scratch, 2 steps:\n\n| arm | d | seeds | training loss |" in page.read_text()


def test_another_task_number_of_steps_or_shape_is_another_run(tmp_path: Path) -> None:
    write_tiny(tmp_path / "text", "text")
    write_tiny(tmp_path / "image", "image")
    changed = ("steps", "num_layers", "batch", "max_len")
    runs = (
        ("text", 2, None, None, None),
        ("image", 2, None, None, None),
        ("image", 3, None, None, None),
        ("image", 2, 1, None, None),
        ("image", 2, 1, 3, None),
        ("image", 2, 1, 3, 1024),
    )
    for task, *changes in runs:
        options = Limits(arms=("softmax",), data=tmp_path / task, seeds=(0,), out=tmp_path / "runs")
        run_limits(replace(options, **dict(zip(changed, changes, strict=True))), Console(file=StringIO(), width=120))
    records = list(read(tmp_path / "runs" / "records.jsonl"))
    assert [tuple(record[name] for name in ("task", *changed)) for record in records] == [*runs]
    assert list(differences(records))[-3:] == [
        "Image from scratch, 2 steps, layers: 1",
        "Image from scratch, 2 steps of 3, layers: 1",
        "Image from scratch, 2 steps of 3, 1024 tokens, layers: 1",
    ]


def test_what_given_records_hold_is_not_trained_again(tmp_path: Path) -> None:
    write_tiny(tmp_path / "text", "text")
    options = Limits(arms=("softmax",), data=tmp_path / "text", seeds=(0,), steps=2, out=tmp_path / "first")
    run_limits(options, Console(file=StringIO(), width=120))
    known, shown = tmp_path / "first" / "records.jsonl", StringIO()
    run_limits(replace(options, records=(known,), out=tmp_path / "second"), Console(file=shown, width=120))
    assert not (tmp_path / "second").exists()
    assert "softmax" in shown.getvalue()


def test_what_the_long_range_arena_ran_is_not_trained_again(tmp_path: Path) -> None:
    write_tiny(tmp_path / "text", "text")
    run: Record = {"recipe": "cpu", "task": "text", "method": "softmax", "options": "", "seed": 0, "overrides": ""}
    with (tmp_path / "lra.jsonl").open("w") as file:
        for record in (
            {"kind": "lra_check", **run, "step": 1, "loss": 0.5},
            {"kind": "lra_run", **run, "steps": 400, "budget": 32, "test_accuracy": 0.3},
        ):
            file.write(json.dumps(record) + "\n")
    options = Limits(records=(tmp_path / "lra.jsonl",), arms=("softmax",), data=tmp_path / "text", seeds=(0,))
    run_limits(replace(options, out=tmp_path / "runs"), Console(file=StringIO(), width=120))
    assert not (tmp_path / "runs").exists()


def test_the_order_of_options_makes_no_other_arm() -> None:
    run: Record = {"kind": "limits", "task": "text", "steps": 2, "accuracy": 0.5, "second_half_loss": 1.0, "d": 16}
    arms = ("softmax", "mixed:dq=exact,dk=exact", "mixed:dk=exact,dq=exact")
    (table,) = differences([{**run, "arm": arm, "seed": 0} for arm in arms]).values()
    assert set(table) == {("softmax", None), ("mixed:dk=exact,dq=exact", 16)}  # exact attention has no budget


def test_a_later_record_of_a_run_does_not_lose_its_test_loss() -> None:
    run: Record = {"kind": "limits", "task": "text", "steps": 2, "accuracy": 0.5, "second_half_loss": 1.0, "seed": 0}
    records: list[Record] = [{**run, "arm": "softmax", "test_loss": 2.0}, {**run, "arm": "softmax"}]
    (table,) = differences(records).values()
    assert table["softmax", None].test_loss == (2.0, None)


def test_another_learning_rate_model_or_selection_is_another_table() -> None:
    run: Record = {"kind": "finetune", "n": 8, "steps": 2, "batch": 4, "test_examples": 3, "seed": 0, "options": ""}
    run |= {"test_accuracy": 0.5, "second_half_loss": 1.0, "method": "softmax", "min_tokens": 5, "learning_rate": 1e-4}
    run |= {"model": "MiniLM", "text": "imdb.parquet"}
    others: list[Record] = [{**run, "learning_rate": 5e-5}, {**run, "model": "other"}, {**run, "min_tokens": 6}]
    found = differences([run, *others])
    assert next(iter(found)) == (
        "Fine-tuning MiniLM on imdb.parquet, reviews of at least 5 tokens cut after 8, 2 steps of 4, "
        "learning rate 0.0001, 3 test reviews, float32"
    )
    assert [table["softmax", None].seeds for table in found.values()] == [1] * 4


def test_what_is_trained_sketched_and_tested_exact_is_an_arm_of_its_own() -> None:
    run: Record = {"kind": "finetune", "n": 8, "steps": 2, "batch": 4, "test_examples": 3, "seed": 0, "options": ""}
    run |= {"second_half_loss": 1.0, "min_tokens": 5, "learning_rate": 1e-4, "model": "MiniLM", "text": "imdb.parquet"}
    run |= {"exact_test_accuracy": 0.75, "exact_test_loss": 0.5}
    records: list[Record] = [
        {**run, "method": "softmax", "test_accuracy": 0.75, "test_loss": 0.5},
        {**run, "method": "cluster", "budget": 16, "test_accuracy": 0.5, "test_loss": 1.0},
    ]
    (table,) = differences(records).values()
    assert {arm: found.test_loss for arm, found in table.items()} == {
        ("softmax", None): (0.5, None),
        ("cluster", 16): (0.5, None),
        ("cluster, tested exact", 16): (0.0, None),
    }
    assert table["cluster, tested exact", 16].loss is None  # it is the other's
    assert [row[3] for row in table_of(table)[1]] == ["1.000", "+0.000", ""]


def test_v_mean_is_the_scale_and_some_intervals_exclude_0_by_chance() -> None:
    run: Record = {"kind": "limits", "task": "text", "steps": 2}
    records: list[Record] = [
        {
            **run,
            "arm": arm,
            "d": 16,
            "seed": seed,
            "second_half_loss": loss * (1 + 0.01 * seed),
            "accuracy": 0.5 + off * seed,
        }
        for arm, loss, off in (("softmax", 1.0, 0.0), ("cluster", 1.25, 0.1), ("vmean", 2.0, 0.2))
        for seed in range(3)
    ]
    (table,) = differences(records).values()
    assert set(table) == {("softmax", None), ("cluster", 16), ("vmean", None)}
    assert (
        exclusions([table]) == "Of 2 intervals, 1 exclude 0, without V-mean. If nothing differed, one of twenty would."
    )


def test_tables_of_some_seeds() -> None:
    run: Record = {"kind": "limits", "task": "text", "steps": 2, "accuracy": 0.5, "d": 16}
    records: list[Record] = [
        {**run, "arm": arm, "seed": seed, "second_half_loss": loss * (seed + 1)}
        for arm, loss in (("softmax", 1.0), ("cluster", 2.0))
        for seed in range(4)
    ]
    (table,) = differences(records, seeds=(2, 3)).values()
    assert table["cluster", 16].seeds == 2
    assert table["cluster", 16].loss.mean == 3.5
    with pytest.raises(ValueError, match="over all seeds; leave out"):
        run_limits(Limits(records=(Path("x"),), shown_seeds=(2,), page=Path("page.md")))


def test_a_page_is_kept_where_there_is_nothing_to_compare(tmp_path: Path) -> None:
    run: Record = {"kind": "limits", "task": "text", "steps": 2, "accuracy": 0.5, "second_half_loss": 1.0, "d": 16}
    records, page = tmp_path / "records.jsonl", tmp_path / "page.md"
    records.write_text(json.dumps({**run, "arm": "cluster", "seed": 0}) + "\n")
    page.write_text("<!-- limits -->\nold\n<!-- end -->\n")
    with pytest.raises(ValueError, match="no run of softmax shares task, shape and seed"):
        run_limits(Limits(records=(records,), page=page), Console(file=StringIO(), width=120))
    assert "old" in page.read_text()


def test_nothing_to_show_is_an_error() -> None:
    with pytest.raises(ValueError, match="give --records"):
        run_limits(Limits())
