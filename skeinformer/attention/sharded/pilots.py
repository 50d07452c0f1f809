"""Pilot rows over the keys of all ranks: who they are, and the sums of their rows. Two exchanges.

A rank computes the rows of all pilots over its own keys. With lse_r the log of a row's sum there,

    lse = log sum_r exp(lse_r)        B_J V = sum_r exp(lse_r - lse) (B_J V)_r

and lse is all that the columns' mass and importance need: the second sum may wait for the next that is exchanged.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.inputs import Inputs
from skeinformer.attention.pilots import Pilots, log_norms
from skeinformer.attention.selection import Selection
from skeinformer.attention.virtual_keys import VirtualKeys, attend_with_normalizer
from skeinformer.distributed.agreement import Shares
from skeinformer.distributed.collectives import gather_over
from skeinformer.distributed.selection import Candidates, Chosen, candidates, choose_rows, in_a_row
from skeinformer.kernels.rows import gather_rows


class SharedPilots(NamedTuple):
    """The pilots, and what came with them."""

    pilots: Pilots
    """Their output is this rank's part of B_J V; the sum over ranks is B_J V."""
    chosen: Chosen  # (b, h, P), the pilots among the queries
    queries: Tensor  # (b, 1, 1), real ones of all ranks
    keys: Tensor  # (b, 1, 1)
    others: list[Chosen]
    """What the ranks chose of what else was offered."""
    loudest: Tensor  # (b, h, 1), log of the largest |v_i| of all ranks


def find_pilots(
    inputs: Inputs,
    source: VirtualKeys,
    u: Tensor,
    num_pilots: int,
    offers: Sequence[Candidates],
    scale: float,
    shares: Shares,
) -> SharedPilots:
    """The rows J, their sums, and this rank's part of B_J V. Time O(P n p) for the n keys of this rank."""
    query, group = inputs.query, shares.group
    own = candidates(ranked(u, inputs.query_mask), min(num_pilots, shares.n))
    scores, rows, queries, keys, *offered = gather_over(
        group,
        "pilots",
        own.score,
        gather_rows(query, own.row),
        count_here(query, inputs.query_mask),
        count_here(inputs.key, inputs.key_mask),
        *(offer.score for offer in offers),
    )
    chosen = choose_rows(scores, own, group.rank)
    others = [choose_rows(every, offer, group.rank) for every, offer in zip(offered, offers, strict=True)]
    pilot_queries = gather_rows(in_a_row(rows), chosen.slot).where(chosen.live[..., None], 0)  # (b, h, P, p)
    output, row_sum = rows_over_own_keys(pilot_queries, source, scale)
    loudness = log_norms(source.values).amax(-1, keepdim=True)  # (b, h, 1)
    sums, loudest = gather_over(group, "row sums", row_sum, loudness)
    normalizer = merge_sums(sums)
    output = output.to(row_sum.dtype) * (row_sum - normalizer).exp()[..., None]
    pilots = Pilots(Selection(chosen.row, chosen.live), pilot_queries, output, normalizer)
    return SharedPilots(pilots, chosen, total(queries), total(keys), others, loudest.amax(0))


def rows_over_own_keys(queries: Tensor, source: VirtualKeys, scale: float) -> tuple[Tensor, Tensor]:
    """The rows over this rank's keys and the logs of their sums, (b, h, k, p_v) and (b, h, k); -inf without a key."""
    output, row_sum = attend_with_normalizer(queries, source, scale)
    if source.log_weight is not None:
        row_sum = row_sum.where((source.log_weight > -torch.inf).any(-1, keepdim=True), -torch.inf)
    return output, row_sum


def merge_sums(every: Tensor) -> Tensor:
    """lse over the keys of all ranks, from those of each: (R, b, h, k) -> (b, h, k); 0 where there is no key."""
    lse = every.logsumexp(0)
    return lse.where(lse > -torch.inf, 0)


def ranked(u: Tensor, mask: Tensor | None) -> Tensor:
    """The numbers by which rows are chosen, -inf for padding."""
    return u if mask is None else u.where(mask, -torch.inf)


def count_here(x: Tensor, mask: Tensor | None) -> Tensor:
    """How many of the tokens (b, h, n, p) are real: (b,)."""
    if mask is None:
        return torch.full(x.shape[:1], x.shape[-2], device=x.device)
    return mask.sum(-1)[:, 0]


def total(every: Tensor) -> Tensor:
    """The counts of all ranks, (R, b) -> (b, 1, 1)."""
    return every.sum(0)[:, None, None]
