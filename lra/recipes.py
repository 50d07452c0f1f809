"""Recipes: how each task of the Long Range Arena is trained. `paper` is the paper's protocol, `cpu` a small one.

The protocol of Chen et al. (2022), Section 6: Adam, learning rate 1e-4, linear warm-up and decay, training until no
better validation for 10 checks, the best weights tested. `steps` is where the decay ends: the paper names no limit, the
numbers here are above its longest runs (Table 2).

`cpu` is smaller, so that a run takes minutes on two cores: sequences and the sketch by the same factor where that is
possible, the batch, the number of steps, and the part of the validation set that a check looks at; the learning rate is
higher, from 3e-4 to 2e-3 by task. ListOps has short, shallow expressions, Pathfinder small images, both from our
generators, Image every 2 x 2 pixels as one. Compare its numbers with each other, never with the paper's.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from skeinformer.checks import check_count, check_number, lookup
from skeinformer.cli.records import Value

Data = dict[str, Value]
CPU_LISTOPS: Data = {"min_len": 64, "max_len": 256, "train": 32_000, "valid": 2_000, "test": 2_000}
CPU_PATHFINDER: Data = {
    "image_size": 12,
    "paddles": 2,
    "distractors": 1,
    "distractor_paddles": 1,
    "seed_distance": 4.0,
    "train": 64_000,
    "valid": 2_000,
    "test": 8_000,
}


@dataclass(frozen=True)
class Recipe:
    """All numbers that decide a run except the method, the seed and the data."""

    name: str
    task: str
    max_len: int
    """Tokens that are read; longer documents are cut, other sequences may not be longer."""
    budget: int
    """The sketch size d of every method."""
    batch: int
    """Examples in an optimizer step."""
    learning_rate: float
    warmup: int
    """Steps in which the learning rate rises from 0."""
    steps: int
    """The most steps; the learning rate falls to 0 at this one."""
    check_every: int
    """Steps between two looks at the validation set."""
    patience: int = 10
    """Checks without a better validation, by accuracy and then by loss, after which training ends."""
    valid_examples: int | None = None
    """Of the validation set, evenly spread; None is all."""
    test_examples: int | None = None
    """Of the test set, evenly spread; None is all."""
    num_layers: int = 2
    dim: int = 64
    num_heads: int = 2
    feedforward_dim: int = 128
    classifier_dim: int = 128
    dropout: float = 0.1
    weight_decay: float = 0.0
    bucket: bool = False
    """Put examples of similar length into a batch."""
    data: Data = field(default_factory=dict)
    """How our own generator makes the data, where there is none: options of `python -m lra data`."""


def _paper(task: str, max_len: int, batch: int, warmup: int, check_every: int, steps: int) -> Recipe:
    return Recipe("paper", task, max_len, 256, batch, 1e-4, warmup, steps, check_every)


def _cpu(
    task: str, max_len: int, budget: int, *, batch: int, steps: int, check_every: int, rate: float, **more: Any
) -> Recipe:
    """Make a small recipe: a warm-up of one check, and a part of the validation set."""
    recipe = Recipe("cpu", task, max_len, budget, batch, rate, check_every, steps, check_every)
    return replace(recipe, **{"valid_examples": 1000, **more})


RECIPES: dict[str, dict[str, Recipe]] = {
    "paper": {
        "listops": _paper("listops", 2000, 256, 1000, 500, 15_000),
        "text": _paper("text", 4000, 128, 80, 500, 35_000),
        "retrieval": _paper("retrieval", 4000, 64, 800, 300, 35_000),
        "pathfinder": _paper("pathfinder", 1024, 512, 312, 312, 30_000),
        "image": _paper("image", 1024, 256, 175, 50, 10_000),
    },
    "cpu": {
        "listops": _cpu(
            "listops", 256, 32, batch=32, steps=600, check_every=100, rate=1e-3, bucket=True, data=CPU_LISTOPS
        ),
        "text": _cpu("text", 512, 32, batch=16, steps=400, check_every=50, rate=3e-4, test_examples=5000),
        "retrieval": _cpu("retrieval", 512, 32, batch=8, steps=300, check_every=50, rate=3e-4),
        "pathfinder": _cpu(
            "pathfinder", 144, 36, batch=16, steps=2400, check_every=300, rate=3e-4, dropout=0.0, data=CPU_PATHFINDER
        ),
        "image": _cpu("image", 256, 64, batch=32, steps=600, check_every=100, rate=2e-3),
    },
}
TRUNCATABLE_TASKS = ("text", "retrieval")  # a beginning of a document is still one; half an expression or image is not


def get_recipe(name: str, task: str, **overrides: object) -> Recipe:
    """Return the recipe `name` for `task`, with some of its fields replaced; a None replaces nothing."""
    table = lookup("recipe", name, RECIPES)
    changed = {option: value for option, value in overrides.items() if value is not None}
    return check_recipe(replace(lookup("task", task, table), **changed))  # type: ignore[arg-type]


def generator_options(chosen: Recipe) -> Data:
    """Return the options of `python -m lra data` for our own generator. No expression is longer than what is read."""
    if chosen.task != "listops":
        return chosen.data
    longest = chosen.data.get("max_len", chosen.max_len)
    assert isinstance(longest, int)
    return {**chosen.data, "max_len": min(longest, chosen.max_len)}


def overrides_text(chosen: Recipe) -> str:
    """Return what differs from the recipe of this name, as "batch=64, learning_rate=0.001"; "" for the recipe."""
    original = RECIPES[chosen.name][chosen.task]
    return ", ".join(
        f"{field.name}={getattr(chosen, field.name)}"
        for field in fields(Recipe)
        if getattr(chosen, field.name) != getattr(original, field.name)
    )


def check_recipe(chosen: Recipe) -> Recipe:
    """Return the recipe; a ValueError if one of its numbers is not possible."""
    for name in ("max_len", "budget", "batch", "steps", "check_every", "patience"):
        check_count(name, getattr(chosen, name))
    for name in ("valid_examples", "test_examples"):
        if getattr(chosen, name) is not None:
            check_count(name, getattr(chosen, name))
    if not check_number("learning_rate", chosen.learning_rate, "above 0") > 0:
        raise ValueError(f"learning_rate must be above 0, got {chosen.learning_rate}")
    for name in ("warmup", "weight_decay"):
        if not check_number(name, getattr(chosen, name), "at least 0") >= 0:
            raise ValueError(f"{name} must be at least 0, got {getattr(chosen, name)}")
    return chosen


def learning_rate(chosen: Recipe, step: int) -> float:
    """Return the rate at step number `step`, from 0: a straight line up, and one down to 0 at the last step.

    The warm-up is at most half of the steps.
    """
    warmup = min(chosen.warmup, chosen.steps // 2)
    rise = (step + 1) / (warmup + 1)
    fall = (chosen.steps - step) / max(chosen.steps - warmup, 1)
    return chosen.learning_rate * max(0.0, min(1.0, rise, fall))
