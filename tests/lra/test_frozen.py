"""Data and training give the numbers that were frozen: the same examples to the bit, the same losses to rounding."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lra.data import image, listops, pathfinder, text
from lra.data.batches import Order, evaluation_order
from lra.data.snakes import PathfinderSettings
from lra.data.store import TASKS, Example, open_store
from lra.job import Job, parse_method
from lra.train import train
from skeinformer.cli.records import read
from tests.lra.tiny import tiny_recipe, write_tiny

FROZEN: dict[str, Any] = json.loads(Path(__file__).with_name("frozen.json").read_text())
DATA = FROZEN["generated"]
SHORT = listops.ListOpsSettings(min_len=8, max_len=40, max_depth=4, max_args=5)
SMALL = PathfinderSettings(image_size=12, paddles=2, distractors=1, distractor_paddles=1, seed_distance=4.0)
CROWDED = PathfinderSettings(image_size=16, paddles=6, retreats=10)


def digest(examples: Iterable[Example]) -> str:
    found = hashlib.sha256()
    for example in examples:
        for tokens in example.sequences:
            found.update(len(tokens).to_bytes(4, "little") + np.ascontiguousarray(tokens).tobytes())
        found.update(bytes([example.label]))
    return found.hexdigest()


@pytest.mark.parametrize("workers", [1, 2])
def test_generated_examples(workers: int) -> None:
    assert digest(listops.generate(200, seed=5, workers=workers, settings=SHORT)) == DATA["listops_short"]
    assert digest(pathfinder.generate(40, seed=5, workers=workers, settings=SMALL)) == DATA["pathfinder_small"]
    if workers == 1:
        assert digest(listops.generate(6, seed=3)) == DATA["listops"]
        assert digest(pathfinder.generate(12, seed=3)) == DATA["pathfinder"]
        assert digest(pathfinder.generate(4, seed=1, settings=CROWDED)) == DATA["pathfinder_retreats"]


def test_files_and_the_order_of_examples(tmp_path: Path) -> None:
    for task in TASKS:
        sums = open_store(write_tiny(tmp_path / task, task)).meta.checksums.values()
        assert hashlib.sha256("".join(sums).encode()).hexdigest() == DATA[f"store_{task}"]
    store = open_store(tmp_path / "text")
    assert Order(store.split("train"), 16, 7, bucket=True).indices(70).tolist() == DATA["order_bucket"]
    assert Order(store.split("train"), 24, 7).indices(11).tolist() == DATA["order"]
    assert evaluation_order(store.split("valid"), 8, 20)[1].tolist() == DATA["evaluation"]


def test_official_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    binary, reviews = tmp_path / "cifar-10-batches-bin", tmp_path / "aclImdb"
    binary.mkdir()
    for name in [f"data_batch_{number}.bin" for number in range(1, 6)] + ["test_batch.bin"]:
        rows = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
        rows[:, 0] = np.arange(20) % 10
        (binary / name).write_bytes(rows.tobytes())
    for side in (32, 16):
        splits = image.read_image(binary, valid=20, seed=1, side=side)
        assert {name: digest(split) for name, split in splits.items()} == DATA[f"image_{side}"]
    for folder in ("train/pos", "train/neg", "test/pos", "test/neg"):
        (reviews / folder).mkdir(parents=True)
        for number in range(10):
            content = rng.integers(32, 127, 30 + number, dtype=np.uint8).tobytes()
            (reviews / folder / f"{number}_1.txt").write_bytes(content)
    splits = {name: iter(split) for name, split in text.read_text(reviews, max_len=32, valid=6, seed=2).items()}
    assert {name: digest(split) for name, split in splits.items()} == DATA["text"]


@pytest.mark.parametrize("run", FROZEN["training"])
def test_losses_and_accuracies(run: str, tmp_path: Path) -> None:
    task, method = run.split("/")
    recipe = tiny_recipe(task, steps=6, check_every=3)
    train(Job(recipe, parse_method(method), write_tiny(tmp_path / "store", task), tmp_path / "run", seed=1))
    records = read(tmp_path / "run" / "records.jsonl")
    for record, expected in zip(records, FROZEN["training"][run], strict=True):
        ours = {name: record[name] for name in expected}
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
