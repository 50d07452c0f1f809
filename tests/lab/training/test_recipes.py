"""Recipes: the paper's numbers, overrides, the learning rate."""

import pytest

from skeinformer.lab.lra.store import TASKS
from skeinformer.lab.training.recipes import RECIPES, learning_rate, overrides_text, recipe


def test_every_recipe_has_every_task() -> None:
    assert set(RECIPES) == {"paper", "cpu"}
    for name, table in RECIPES.items():
        assert tuple(sorted(table)) == tuple(sorted(TASKS))
        assert all((made.name, made.task) == (name, task) for task, made in table.items())


@pytest.mark.parametrize(
    ("task", "n", "batch", "warmup", "check_every"),
    [
        ("listops", 2000, 256, 1000, 500),
        ("text", 4000, 128, 80, 500),
        ("retrieval", 4000, 64, 800, 300),
        ("pathfinder", 1024, 512, 312, 312),
        ("image", 1024, 256, 175, 50),
    ],
)
def test_the_paper_is_followed(task: str, n: int, batch: int, warmup: int, check_every: int) -> None:
    made = recipe("paper", task)
    assert (made.max_len, made.batch, made.warmup, made.check_every) == (n, batch, warmup, check_every)
    assert (made.budget, made.learning_rate, made.patience, made.dropout) == (256, 1e-4, 10, 0.1)
    assert (made.num_layers, made.dim, made.num_heads, made.feedforward_dim) == (2, 64, 2, 128)
    assert made.valid_examples is made.test_examples is None  # all of both


@pytest.mark.parametrize("task", RECIPES["cpu"])
def test_the_sketch_of_cpu_is_the_part_of_the_sequence_that_it_is_in_the_paper(task: str) -> None:
    ours, papers = (RECIPES[name][task] for name in ("cpu", "paper"))
    assert ours.budget / ours.max_len == pytest.approx(papers.budget / papers.max_len, rel=0.03)


def test_overrides_are_named() -> None:
    assert overrides_text(recipe("cpu", "text")) == ""
    changed = recipe("cpu", "text", batch=64, learning_rate=1e-4, steps=None)
    assert (changed.batch, changed.learning_rate, changed.steps) == (64, 1e-4, recipe("cpu", "text").steps)
    assert overrides_text(changed) == "batch=64, learning_rate=0.0001"


def test_the_learning_rate_rises_and_falls_on_straight_lines() -> None:
    made = recipe("cpu", "text", warmup=9, steps=109, learning_rate=1.0)
    rates = [learning_rate(made, step) for step in range(110)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == 1.0
    assert rates[59] == pytest.approx(0.5)
    assert rates[109] == 0
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert learning_rate(recipe("cpu", "text", warmup=0, steps=1, learning_rate=1e-3), 0) == 1e-3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"learning_rate": 0.0}, "learning_rate must be above 0, got 0.0"),
        ({"warmup": -1}, "warmup must be at least 0, got -1"),
        ({"valid_examples": 0}, "valid_examples must be at least 1"),
    ],
)
def test_impossible_numbers_are_refused(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("cpu", "text", **overrides)


def test_unknown_names_suggest_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown recipe 'papr'; did you mean 'paper'"):
        recipe("papr", "text")
    with pytest.raises(ValueError, match="unknown task 'texts'; did you mean 'text'"):
        recipe("cpu", "texts")
