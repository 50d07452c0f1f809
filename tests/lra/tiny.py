"""Tiny stores in which only the order of tokens says anything, and a recipe that learns them in seconds."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lra.data.listops import evaluate
from lra.data.store import SPLITS, Example, write_store
from lra.recipes import Recipe, get_recipe

TOKENS = 12
SIZES = {"train": 256, "valid": 64, "test": 64}
VOCABULARY = {"listops": 15, "text": 256, "retrieval": 256, "pathfinder": 256, "image": 256}
CLASSES = {"listops": 10, "text": 2, "retrieval": 2, "pathfinder": 2, "image": 10}


def write_tiny(folder: Path, task: str, sizes: dict[str, int] | None = None, seed: int = 0) -> Path:
    """A store of `task` at `folder`."""
    rng = np.random.default_rng(seed)
    splits = {split: examples(task, count, rng) for split, count in (sizes or SIZES).items()}
    assert set(splits) == set(SPLITS)
    write_store(
        folder,
        splits,
        task=task,
        source="tiny",
        vocab_size=VOCABULARY[task],
        num_classes=CLASSES[task],
        sequences=2 if task == "retrieval" else 1,
        max_len=TOKENS + 4,
    )
    return folder


def examples(task: str, count: int, rng: np.random.Generator) -> Iterator[Example]:
    for number in range(count):
        label = number % 2
        if task == "listops":
            yield expression(rng)
        elif task == "retrieval":
            yield Example((marked(rng, label), marked(rng, 1 - label)), label)
        else:
            yield Example((marked(rng, label),), label)


def marked(rng: np.random.Generator, half: int) -> np.ndarray:
    """Tokens 1 and 2, and one 7 in the first or the second half; lengths differ."""
    n = TOKENS + int(rng.integers(5))
    tokens = rng.integers(1, 3, n).astype(np.uint8)
    tokens[int(rng.integers(TOKENS // 2)) + half * (n - TOKENS // 2)] = 7
    return tokens


def expression(rng: np.random.Generator) -> Example:
    """`[MIN a [MAX b b ] ]` or `[MAX a [MIN b b ] ]` of digits 0 and 9: the same tokens, other values."""
    outer = int(rng.integers(10, 12))
    a = int(rng.choice([0, 9]))
    tokens = [outer, a, 21 - outer, 9 - a, 9 - a, 14, 14]
    return Example((np.array(tokens, np.uint8),), evaluate(tokens))


def tiny_recipe(task: str, **changes: object) -> Recipe:
    """The cpu recipe, small."""
    small: dict[str, object] = {
        "max_len": TOKENS + 4,
        "budget": 8,
        "batch": 16,
        "warmup": 5,
        "steps": 12,
        "check_every": 4,
        "dim": 16,
        "feedforward_dim": 32,
        "classifier_dim": 16,
    }
    return get_recipe("cpu", task, **{**small, **changes})
