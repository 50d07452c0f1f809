"""The certificate over shares: check rows of all ranks, exact over the keys of all ranks. Four more exchanges."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.certificate import error_of_rows, not_spent
from skeinformer.attention.inputs import Inputs, no_autocast
from skeinformer.attention.inside import set_inside
from skeinformer.attention.pilots import Pilots
from skeinformer.attention.selection import Selection
from skeinformer.attention.sharded import pilots as rows
from skeinformer.attention.virtual_keys import from_mask
from skeinformer.distributed.agreement import Shares
from skeinformer.distributed.collectives import gather_over, sum_over
from skeinformer.distributed.selection import Chosen, candidates, choose, places, rows_here
from skeinformer.noise import Rand


@torch.no_grad()
def shared_certificate(
    inputs: Inputs, output: Tensor, trace: Any, rand: Rand, num_checks: int, scale: float, shares: Shares
) -> tuple[Any, tuple[Tensor, Tensor]]:
    """What `describe` shows, by the places of all tokens, and (error, standard error) of the output of all ranks."""
    before = set_inside(True)
    try:
        with no_autocast(output.device):
            return _certify(inputs, output, trace, rand, num_checks, scale, shares)
    finally:
        set_inside(before)


def _certify(
    inputs: Inputs, output: Tensor, trace: Any, rand: Rand, num_checks: int, scale: float, shares: Shares
) -> tuple[Any, tuple[Tensor, Tensor]]:
    query, key, value, key_mask, query_mask = inputs
    group, shared, pilots = shares.group, trace.shared, trace.pilots
    ranks = _numbers(rand, query, shares) if trace.ranks is None else trace.ranks
    num_pilots = 0 if pilots is None else pilots.rows.live.shape[-1]
    own = candidates(rows.ranked(ranks, query_mask), min(num_pilots + num_checks, shares.n))
    offered = [own.score, rows.count_here(query, query_mask)]
    if shared is not None and shared.log_probability is not None:
        offered.append(shared.log_probability.logsumexp(-1, keepdim=True))
    scores, counts, *totals = gather_over(group, "checks", *offered)
    checks, real = choose(scores, own, group.rank).part(num_pilots), rows.total(counts)
    # the rows as they are in the output, their queries, and where the others are that were chosen before
    known: tuple[Chosen, ...] = () if shared is None else shared.chosen
    starts = () if shared is None else shared.starts
    places_here = [places(chosen, start) for chosen, start in zip(known, starts, strict=True)]
    wanted = [rows_here(query, checks), rows_here(output, checks)]
    if pilots is not None:
        wanted.append(rows_here(output, known[0]))
    summed = sum_over(group, "check rows", *(x.double() for x in (*wanted, *places_here)))
    queries, *outputs = (x.to(query.dtype) for x in summed[: len(wanted)])
    selections = [_everywhere(x, chosen) for x, chosen in zip(summed[len(wanted) :], known, strict=True)]
    exact = outputs[0]
    if queries.shape[-2]:  # else all rows are pilots
        here, row_sum = rows.rows_here(queries, from_mask(key, value, key_mask), scale)
        normalizer = rows.merge_sums(gather_over(group, "check sums", row_sum)[0])
        here = here.to(row_sum.dtype) * (row_sum - normalizer).exp()[..., None]
        exact = sum_over(group, "exact rows", here)[0].to(query.dtype)
    live = checks.live & not_spent(checks.live, num_pilots, num_checks, real, trace.spent)
    first = torch.arange(live.shape[-1], device=live.device).expand_as(live)
    error = error_of_rows(torch.cat(outputs, -2), Selection(first, live), exact, _after(pilots, live.shape[-1]), real)
    if shared is None:
        return None, error
    told = {"log_total": totals[0].logsumexp(0)} if totals else {}
    return shared.finish(*selections, **told), error


def _numbers(rand: Rand, query: Tensor, shares: Shares) -> Tensor:
    """One for each query of this rank, (b, h, n); a rank without any has one that is padding."""
    held = shares.queries[shares.group.rank]
    drawn = rand(held)
    return drawn if held else F.pad(drawn, (0, query.shape[-2]), value=0.5)


def _everywhere(summed: Tensor, chosen: Chosen) -> Selection:
    """The chosen rows by their places among all tokens."""
    return Selection((summed.long() - 1).clamp(min=0), chosen.live)


def _after(pilots: Pilots | None, start: int) -> Pilots | None:
    """The pilots as rows of an output that has the check rows, and then them."""
    if pilots is None:
        return None
    live = pilots.rows.live
    indices = torch.arange(start, start + live.shape[-1], device=live.device).expand_as(live)
    return pilots._replace(rows=Selection(indices, live))
