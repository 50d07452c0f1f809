"""Rows that all ranks choose together: the best of each rank's best, and where they are."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.kernels.rows import add_rows_, gather_rows


class Candidates(NamedTuple):
    """The best k rows of one rank; -inf where it has fewer."""

    score: Tensor  # (b, h, k)
    row: Tensor  # (b, h, k), of this rank


class Chosen(NamedTuple):
    """The best k rows of all ranks, in order; those that are here."""

    slot: Tensor  # (b, h, k), in the candidates of all ranks, one rank after the other
    row: Tensor  # (b, h, k), of this rank; 0 where the row is another rank's, or none
    mine: Tensor  # (b, h, k)
    live: Tensor  # (b, h, k), False where there were fewer candidates

    def part(self, start: int, stop: int | None = None) -> "Chosen":
        """Some of the ranks."""
        return Chosen(*(x[..., start:stop] for x in self))


def candidates(score: Tensor, k: int) -> Candidates:
    """The k largest scores of this rank: (b, h, n) -> (b, h, k). Where k is above n, the rest is -inf."""
    values, index = score.topk(min(k, score.shape[-1]), -1)
    missing = k - values.shape[-1]
    return Candidates(F.pad(values, (0, missing), value=-torch.inf), F.pad(index, (0, missing)))


def choose_rows(every: Tensor, own: Candidates, rank: int) -> Chosen:
    """The k best of what every rank offers, (R, b, h, k): the same on all ranks but for `row` and `mine`."""
    k = own.score.shape[-1]
    values, slot = in_a_row(every[..., None])[..., 0].topk(k, -1)
    live = values > -torch.inf
    mine = live & (slot // k == rank)
    return Chosen(slot, own.row.gather(-1, slot % k).where(mine, 0), mine, live)


def in_a_row(every: Tensor) -> Tensor:
    """What every rank offers, one rank after the other: (R, b, h, k, p) -> (b, h, R k, p)."""
    return every.permute(1, 2, 0, 3, 4).flatten(2, 3)


def rows_here(x: Tensor, chosen: Chosen) -> Tensor:
    """The chosen rows that are here, 0 for others, which a sum over ranks fills in: (b, h, n, p) -> (b, h, k, p)."""
    return gather_rows(x, chosen.row).where(chosen.mine[..., None], 0)


def is_chosen(chosen: Chosen, n: int) -> Tensor:
    """Which of the n local rows are chosen: (b, h, n)."""
    counts = chosen.mine.new_zeros(*chosen.mine.shape[:-1], n, dtype=torch.int32)
    return counts.scatter_add_(-1, chosen.row, chosen.mine.int()) > 0


def write_rows_here(x: Tensor, chosen: Chosen, rows: Tensor) -> Tensor:
    """x with the chosen rows that are here written over it, a fresh tensor: (b, h, n, p), (b, h, k, p)."""
    x = x.masked_fill(is_chosen(chosen, x.shape[-2])[..., None], 0)
    return add_rows_(x, chosen.row, rows.to(x.dtype).where(chosen.mine[..., None], 0))


def places(chosen: Chosen, start: int) -> Tensor:
    """One more than the place of the chosen rows that are here among all tokens, 0 for others: (b, h, k), int64."""
    return (chosen.row + start + 1).where(chosen.mine, 0)
