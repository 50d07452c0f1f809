"""Text: IMDb reviews (Maas et al. 2011), positive or negative, as bytes."""

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lra.data.archives import members
from lra.data.holdout import hold_out
from lra.data.store import SPLITS, Example
from lra.data.tables import first_bytes, parquet_table
from skeinformer.checks import check_count

VOCAB_SIZE = 256
NUM_CLASSES = 2
LABELS = {"neg": 0, "pos": 1}
REVIEW = re.compile(r"((?:.*/)?)(train|test)/(pos|neg)/[^/]+\.txt")


class Review(NamedTuple):
    """The bytes of a review that are kept."""

    split: str
    label: int
    text: bytes


def read_text(source: Path, *, max_len: int, valid: int, seed: int) -> dict[str, list[Example]]:
    """Read the splits of `source`: the folder aclImdb, its tar.gz, or a parquet file with split, label and text.

    Of each review the first `max_len` bytes are kept. The test set is kept whole. `valid` reviews are held out of the
    training set for validation, with its share of each class. A parquet file that has a split for validation keeps it.
    No text is in both.
    """
    check_count("max_len", max_len)
    reviews = (_parquet_reviews if source.suffix == ".parquet" else _reviews)(source, max_len)
    splits = {name: [review for review in reviews if review.split == name] for name in SPLITS}
    for name in ("train", "test"):
        if not splits[name]:
            raise ValueError(f"{source} has no reviews to {name}: expected aclImdb, its tar.gz, or a parquet file")
    if splits["valid"]:
        known = {review.text for review in splits["valid"]}
        splits["train"] = [review for review in splits["train"] if review.text not in known]
    else:
        train = splits["train"]
        held_out = hold_out([review.text for review in train], [review.label for review in train], valid, seed)
        splits["valid"] = [review for review, out in zip(train, held_out, strict=True) if out]
        splits["train"] = [review for review, out in zip(train, held_out, strict=True) if not out]
    return {
        name: [Example((np.frombuffer(review.text, np.uint8),), review.label) for review in reviews]
        for name, reviews in splits.items()
    }


def _reviews(source: Path, max_len: int) -> list[Review]:
    """Read reviews in the order of their names, so that a folder and its archive give the same."""
    named: list[tuple[str, Review]] = []
    for name, text in members(source, lambda name: REVIEW.fullmatch(name) is not None, limit=max_len):
        match = REVIEW.fullmatch(name)
        assert match is not None
        if not text:
            raise ValueError(f"{source}, {name}: the review is empty")
        named.append((match[0].removeprefix(match[1]), Review(match[2], LABELS[match[3]], text)))
    named.sort(key=lambda pair: pair[0])
    return [review for _, review in named]


def _parquet_reviews(source: Path, max_len: int) -> list[Review]:
    table = parquet_table(source, ("split", "label", "text"))
    return [Review(row.split, int(row.label), first_bytes(row.text, max_len).tobytes()) for row in table.itertuples()]
