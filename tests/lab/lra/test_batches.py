"""The order of examples is a function of seed and step; padding is masked; nothing is left out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skeinformer.lab.lra.batches import Order, collate, evaluation_order, micro_batches
from skeinformer.lab.lra.store import SPLITS, Example, Split, open_store, write_store


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Split:
    """37 examples of 1 to 20 tokens; the tokens of number i are i + 1."""
    folder = tmp_path_factory.mktemp("batches") / "store"
    lengths = np.random.default_rng(0).integers(1, 21, 37)
    made = [Example((np.full(n, i + 1, np.uint8),), i % 3) for i, n in enumerate(lengths)]
    shape = {"vocab_size": 64, "num_classes": 3, "sequences": 1, "max_len": 20}
    write_store(folder, dict.fromkeys(SPLITS, made), task="image", source="test", **shape)
    return open_store(folder).split("train")


@given(batch=st.integers(1, 50), seed=st.integers(0, 5))
def test_each_epoch_has_every_example_once(split: Split, batch: int, seed: int) -> None:
    order = Order(split, batch, seed)
    stream = np.concatenate([order.indices(step) for step in range(-(-3 * len(split) // batch))])
    for epoch in range(3):
        part = stream[epoch * len(split) : (epoch + 1) * len(split)]
        assert sorted(part) == list(range(len(split)))


@given(batch=st.integers(1, 9), seed=st.integers(0, 5), groups=st.integers(1, 3))
def test_buckets_leave_none_out(split: Split, batch: int, seed: int, groups: int) -> None:
    order = Order(split, batch, seed, bucket=True)
    stream = np.concatenate([order.indices(step) for step in range(64 * groups)])
    counts = np.bincount(stream, minlength=len(split))
    assert counts.max() - counts.min() <= 1


def test_the_order_needs_no_history(split: Split) -> None:
    for bucket in (False, True):
        forward = [Order(split, 5, 3, bucket=bucket).indices(step) for step in range(20)]
        order = Order(split, 5, 3, bucket=bucket)
        for step in reversed(range(20)):
            np.testing.assert_array_equal(order.indices(step), forward[step])
    assert not np.array_equal(Order(split, 5, 4).indices(0), forward[0])


def test_buckets_hold_similar_lengths_in_every_epoch(split: Split) -> None:
    def padding(bucket: bool) -> int:
        batches = [split.lengths[Order(split, 4, 0, bucket=bucket).indices(step)] for step in range(100, 160)]
        return sum(int((lengths.max() - lengths).sum()) for lengths in batches)

    assert padding(True) < padding(False) / 2


@given(batch=st.integers(1, 40), count=st.none() | st.integers(1, 60))
def test_evaluation_takes_every_example_once_or_a_spread(split: Split, batch: int, count: int | None) -> None:
    chosen = np.concatenate(evaluation_order(split, batch, count))
    assert len(set(chosen)) == len(chosen) == min(count or len(split), len(split))
    lengths = split.lengths[chosen, 0]
    assert (np.diff(lengths) <= 0).all()


def test_padding_is_masked_and_long_sequences_are_cut(split: Split) -> None:
    indices = np.array([3, 8, 20])
    lengths = split.lengths[indices, 0]
    batch = collate(split, indices, [int(lengths.max())])
    (tokens,), (mask,) = batch.tokens, batch.masks
    assert mask is not None
    assert mask.sum(1).tolist() == lengths.tolist()
    assert batch.real_tokens == lengths.sum()
    torch.testing.assert_close(tokens, (torch.tensor(indices) + 1)[:, None] * mask)
    shortest = collate(split, indices, [int(lengths.min())])
    assert shortest.masks == (None,)  # nothing is padding
    assert batch.labels.tolist() == [0, 2, 2]


def test_a_divided_batch_is_padded_like_the_whole(split: Split) -> None:
    indices = np.arange(10)
    (whole,) = micro_batches(split, indices, slice(None), 10, 16)
    parts = list(micro_batches(split, indices, slice(None), 3, 16))
    assert [len(part.labels) for part in parts] == [3, 3, 3, 1]
    torch.testing.assert_close(torch.cat([part.tokens[0] for part in parts]), whole.tokens[0])
    shares = [list(micro_batches(split, indices, slice(rank, None, 2), 5, 16)) for rank in range(2)]
    assert sorted(torch.cat([batch.tokens[0] for share in shares for batch in share]).tolist()) == sorted(
        whole.tokens[0].tolist()
    )
