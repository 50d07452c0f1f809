"""Batches of a split: in which order examples come, and padded tensors with the mask that their lengths give.

The order is a function of the seed and the step alone, so a run continues where it stopped from the step's number.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lra.data.store import Split

Indices = NDArray[np.int64]
BUCKETED = 64  # steps whose examples are sorted by length together


class Batch(NamedTuple):
    """One or two padded sequences per example, masks that are True where a token is real, and labels."""

    tokens: tuple[Tensor, ...]  # each (b, n), int64
    masks: tuple[Tensor | None, ...]  # each (b, n), bool; None where nothing is padding
    labels: Tensor  # (b,)
    real_tokens: int

    def to(self, device: torch.device) -> "Batch":
        tokens = tuple(x.to(device) for x in self.tokens)
        masks = tuple(None if mask is None else mask.to(device) for mask in self.masks)
        return self._replace(tokens=tokens, masks=masks, labels=self.labels.to(device))

    @property
    def arguments(self) -> tuple[Tensor | None, ...]:
        """Return what a classifier takes: all sequences, then all masks."""
        return (*self.tokens, *self.masks)


class Order:
    """Which examples stand in the batch of each step: one permutation after the other, without end, none left out.

    With `bucket`, examples of similar length share a batch: those of 64 steps are sorted by length, cut into batches,
    and the batches permuted.
    """

    def __init__(self, split: Split, batch: int, seed: int, *, bucket: bool = False) -> None:
        self.split, self.batch, self.seed, self.bucket = split, batch, seed, bucket
        self._epoch = lru_cache(maxsize=2)(self._permutation)  # a batch may begin in one epoch and end in the next
        self._group = lru_cache(maxsize=1)(self._bucketed)

    def indices(self, step: int) -> Indices:
        """Return the examples of step number `step`, from 0."""
        if self.bucket:
            group, place = divmod(step, BUCKETED)
            batch: Indices = self._group(group)[place]
            return batch
        return self._stream(step * self.batch, self.batch)

    def _stream(self, start: int, count: int) -> Indices:
        """Return `count` examples from position `start` of all epochs in a row."""
        epochs, positions = np.divmod(np.arange(start, start + count), len(self.split))
        parts = [self._epoch(int(epoch))[positions[epochs == epoch]] for epoch in np.unique(epochs)]
        return np.concatenate(parts)

    def _permutation(self, epoch: int) -> Indices:
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.split))

    def _bucketed(self, group: int) -> Indices:
        """Return the batches of 64 steps, (64, batch)."""
        count = BUCKETED * self.batch
        chosen = self._stream(group * count, count)
        chosen = chosen[np.argsort(self.split.lengths[chosen].max(1), kind="stable")]
        return np.random.default_rng((self.seed, group, BUCKETED)).permutation(chosen.reshape(-1, self.batch))


def evaluation_order(split: Split, batch: int, count: int | None = None) -> list[Indices]:
    """Return every example once, or `count` of them, in batches, the longest first so that little is padding.

    Those are spread evenly over the split: the same at every check.
    """
    chosen = np.arange(len(split))
    if count is not None and count < len(split):
        chosen = np.linspace(0, len(split) - 1, count).round().astype(np.int64)
    chosen = chosen[np.argsort(-split.lengths[chosen].max(1), kind="stable")]
    return [chosen[start : start + batch] for start in range(0, len(chosen), batch)]


def micro_batches(split: Split, indices: Indices, share: slice, micro: int, max_len: int) -> Iterator[Batch]:
    """Yield the examples `indices[share]`, `micro` at a time, each padded to the longest of all `indices`.

    So what a method makes of an example does not depend on how the batch is divided.
    """
    longest = [min(int(n), max_len) for n in split.lengths[indices].max(0)]
    mine = indices[share]
    for start in range(0, len(mine), micro):
        yield collate(split, mine[start : start + micro], longest)


def collate(split: Split, indices: Indices, lengths: list[int]) -> Batch:
    """Make a batch of examples whose sequences are cut and padded to `lengths`, one number for each sequence."""
    tokens: list[Tensor] = []
    masks: list[Tensor | None] = []
    count = 0
    for which, n in enumerate(lengths):
        padded = np.zeros((len(indices), n), np.uint8)
        real = np.minimum(split.lengths[indices, which], n)
        for row, index in enumerate(indices):
            padded[row, : real[row]] = split.sequence(int(index), which)[:n]
        tokens.append(torch.from_numpy(padded).long())
        masks.append(None if (real == n).all() else torch.from_numpy(np.arange(n) < real[:, None]))
        count += int(real.sum())
    return Batch(tuple(tokens), tuple(masks), torch.from_numpy(split.labels[indices]), count)
