"""Rows chosen among the tokens: uniformly, by rank, or with given probabilities; in one process or over many.

O(n), fixed shapes, no gradient. Where ranks share a sequence, each offers its best rows, and all choose among them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.distributed.world import World
from skeinformer.kernels.rows import add_rows_, gather_rows, write_rows_


class Rows(NamedTuple):
    """Distinct rows, best first."""

    index: Tensor  # type: ignore[assignment]  # (..., k), their places on this rank; 0 for rows of other ranks
    live: Tensor | None  # (..., k), False where there were fewer candidates than places; None for all True
    here: Tensor | None = None  # (b, h, k), whether a row is on this rank; None for all of them

    def is_live(self) -> Tensor:
        return torch.ones_like(self.index, dtype=torch.bool) if self.live is None else self.live

    def take(self, x: Tensor) -> Tensor:
        """Return the rows of x; 0 for those of other ranks, which a sum over ranks fills in: (..., k, p)."""
        rows = gather_rows(x, self.index)
        return rows if self.here is None else rows.where(self.here[..., None], 0)

    def are_chosen(self, n: int) -> Tensor:
        """Mark which of the n rows of this rank are chosen: (..., n)."""
        here = torch.ones_like(self.index) if self.here is None else self.here.long()
        return here.new_zeros(*here.shape[:-1], n).scatter_add_(-1, self.index, here) > 0

    def write_(self, x: Tensor, rows: Tensor) -> None:
        """Write these rows over x, in place, where they are on this rank."""
        if self.here is None:
            write_rows_(x, self.index, rows)
        else:
            x.masked_fill_(self.are_chosen(x.shape[-2])[..., None], 0)
            add_rows_(x, self.index, rows.to(x.dtype).where(self.here[..., None], 0))

    def fill_(self, x: Tensor, number: float) -> None:
        """Set the rows of x, (..., n), to a number, in place, where they are on this rank."""
        if self.here is None:
            x.scatter_(-1, self.index, number)
        else:
            x.masked_fill_(self.are_chosen(x.shape[-1]), number)

    def first(self, size: int) -> "Rows":
        return Rows(*(None if x is None else x[..., :size] for x in self))  # type: ignore[arg-type]


def count_real(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return the number of real tokens of (..., n, p), (b, 1, 1); of all tokens without a mask, (1, 1, 1)."""
    return torch.full((1, 1, 1), x.shape[-2], device=x.device) if mask is None else mask.sum(-1, keepdim=True)


def top(score: Tensor, k: int, *, masked: bool = True) -> Rows:
    """Choose the k largest scores, all where there are fewer; where some may be masked, -inf never counts as chosen."""
    values, index = score.topk(min(k, score.shape[-1]), -1)
    return Rows(index, values > -torch.inf if masked else None)


def top_of_all(
    world: World, step: str, requests: Sequence[tuple[Tensor, int, Tensor | None]], n: int, *, masked: bool
) -> tuple[list[Rows], list[Tensor]]:
    """For each (score, k, x) the k largest scores of all ranks, and for each x that is not None these rows of it.

    One exchange. score: (b, h, n_here), of the n tokens of all ranks; masked: whether it may be -inf, on one process.
    """
    if world.size == 1:
        chosen = [top(score, k, masked=masked) for score, k, _ in requests]
        pairs = zip(chosen, requests, strict=True)
        return chosen, [gather_rows(x, rows.index) for rows, (_, _, x) in pairs if x is not None]
    offers, candidates = list[Tensor](), []
    for score, k, x in requests:
        values, index = score.topk(min(k, n, score.shape[-1]), -1)
        missing = min(k, n) - values.shape[-1]
        values, index = F.pad(values, (0, missing), value=-torch.inf), F.pad(index, (0, missing))
        candidates.append(index)
        offers += [values] if x is None else [values, gather_rows(x, index)]
    gathered, chosen, rows = iter(world.gather(step, *offers)), [], []
    for index, (_, _, x) in zip(candidates, requests, strict=True):
        k = index.shape[-1]
        values, slot = in_line(next(gathered)[..., None])[..., 0].topk(k, -1)
        live = values > -torch.inf
        here = live & (slot // k == world.rank)
        chosen.append(Rows(index.gather(-1, slot % k).where(here, 0), live, here))
        if x is not None:
            rows.append(gather_rows(in_line(next(gathered)), slot))
    return chosen, rows


def places(world: World, *requests: tuple[Rows, int, int]) -> list[Tensor]:
    """Places (..., size) of rows among the tokens of all ranks, -1 for none; this rank's tokens begin at `start`."""
    here = [x.index if x.here is None else (x.index + start).where(x.here, 0) for x, start, _ in requests]
    return [
        F.pad(index.where(rows.is_live(), -1), (0, size - index.shape[-1]), value=-1)
        for index, (rows, _, size) in zip(world.sum("places", *here), requests, strict=True)
    ]


def in_line(gathered: Tensor) -> Tensor:
    """Put the rows of all ranks one after the other: (R, b, h, k, p) -> (b, h, R k, p)."""
    return gathered.permute(1, 2, 0, 3, 4).flatten(2, 3)


def masked_scores(u: Tensor, mask: Tensor | None) -> Tensor:
    """Return uniform numbers, -inf for padding; the rows with the largest are a uniform sample."""
    # without replacement, unlike the paper's: it concentrates at least as well (Hoeffding 1963)
    return u if mask is None else u.where(mask, -torch.inf)


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    """The weighted mean of rows: (B, m, p), (B, m, 1) -> (B, 1, p)."""
    return (x * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp(min=1)
