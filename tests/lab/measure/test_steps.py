"""Training steps of the Text model with each attention, beside exact attention."""

import pytest
import torch

from skeinformer.lab.contender import parse
from skeinformer.lab.measure.steps import step_records, training_step
from skeinformer.lab.records import check


def test_step_records() -> None:
    contenders = [parse("vmean"), parse("skeinformer:num_pilots=4")]
    rows = list(step_records(contenders, 64, batch=2, budget=8, rounds=2))
    assert [(r["kind"], r["method"], r["options"]) for r in rows] == [
        ("bench_step", "softmax", ""),
        ("bench_step", "vmean", ""),
        ("bench_step", "skeinformer", "num_pilots=4"),
    ]
    for row in rows:
        check(row)
        assert (row["n"], row["batch"], row["rounds"]) == (64, 2, 2)
        assert float(row["ratio_q25"] or 0) <= float(row["ratio"] or 0) <= float(row["ratio_q75"] or 0)
    assert [r["ratio"] for r in rows if r["method"] == "softmax"] == [1]
    assert [r["budget"] for r in rows] == [None, None, 8]
    assert list(step_records(contenders, 64, batch=2, budget=8, rounds=2, known=rows)) == []
    more = list(step_records([*contenders, parse("blockbert")], 64, batch=2, budget=8, rounds=2, known=rows))
    assert [r["method"] for r in more] == ["blockbert"]


def test_a_step_is_that_of_its_seed_and_leaves_the_global_state() -> None:
    before = torch.random.get_rng_state()
    training_step(parse("vmean"), 16, 1, 8)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_wrong_options_are_named() -> None:
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        next(step_records([], 16, rounds=0))
