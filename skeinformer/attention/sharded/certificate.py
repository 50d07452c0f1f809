"""The certificate over shares: check rows of all ranks, exact over the keys of all ranks. Eight more exchanges."""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.certificate import Info, Known, all_finite, estimate_error
from skeinformer.attention.checks import Checks, Over, chance_per_mass, chances, order, row_mass, rows_to_draw
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.pilots import Pilots
from skeinformer.attention.selection import Selection
from skeinformer.attention.sharded import pilots as rows
from skeinformer.attention.virtual_keys import from_mask
from skeinformer.distributed.agreement import Shares
from skeinformer.distributed.collectives import gather_over, sum_over
from skeinformer.distributed.selection import Chosen, candidates, choose_rows, in_a_row, is_chosen, places, rows_here
from skeinformer.kernels.choice import no_autocast
from skeinformer.kernels.inside import inside
from skeinformer.noise import Rand


@torch.no_grad()
def shared_certificate(
    inputs: Inputs, output: Tensor, trace: Any, rand: Rand, num_checks: int, scale: float, shares: Shares
) -> tuple[Any, Info]:
    """What `describe` shows, by the places of all tokens, and the error of the output of all ranks."""
    with inside(), no_autocast(output.device):
        return _certify(inputs, output, trace, rand, num_checks, scale, shares)


def _certify(
    inputs: Inputs, output: Tensor, trace: Any, rand: Rand, num_checks: int, scale: float, shares: Shares
) -> tuple[Any, Info]:
    query, key, value, key_mask, query_mask = inputs
    group, shared, pilots = shares.group, trace.shared, trace.pilots
    known: tuple[Chosen, ...] = () if shared is None else shared.chosen
    # the chances of this rank's rows, from what is guessed of all
    free = rows_to_draw(query, query_mask, None)
    if pilots is not None:
        free = free & ~is_chosen(known[0], query.shape[-2])
    over = Over(partial(gather_over, group, "guesses"), shares.of_keys.start, shares.n_k)
    mass = row_mass(inputs, output, free, scale, over)
    lost = (~all_finite(output))[..., None].to(mass.dtype)  # (b, h, 1), whether a row of this rank is not finite
    offered = [candidates(mass, min(num_checks, shares.n)).score.clamp(min=0), *_sums(mass), lost]
    if shared is not None and shared.log_probability is not None:
        offered.append(shared.log_probability.logsumexp(-1, keepdim=True))
    masses, total, count, lost, *totals = gather_over(group, "chances", *offered)
    largest = in_a_row(masses[..., None])[..., 0].topk(masses.shape[-1], -1).values
    chance = chances(mass, chance_per_mass(largest, total.sum(0), count.sum(0)))
    own = candidates(order(_numbers(rand, query, shares), chance), min(num_checks, shares.n))
    checks = choose_rows(gather_over(group, "checks", own.score)[0], own, group.rank)
    # the rows as they are in the output, their queries and chances, and where those are that were chosen before
    starts = () if shared is None else shared.starts
    places_here = [places(chosen, start) for chosen, start in zip(known, starts, strict=True)]
    wanted = [rows_here(chance[..., None], checks), rows_here(query, checks), rows_here(output, checks)]
    if pilots is not None:
        wanted.append(rows_here(output, known[0]))
    summed = sum_over(group, "check rows", *(x.double() for x in (*wanted, *places_here)))
    queries, *outputs = (x.to(query.dtype) for x in summed[1 : len(wanted)])
    selections = [_everywhere(x, chosen) for x, chosen in zip(summed[len(wanted) :], known, strict=True)]
    here, row_sum = rows.rows_over_own_keys(queries, from_mask(key, value, key_mask), scale)
    normalizer = rows.merge_sums(gather_over(group, "check sums", row_sum)[0])
    here = here.to(row_sum.dtype) * (row_sum - normalizer).exp()[..., None]
    exact = sum_over(group, "exact rows", here)[0].to(query.dtype)
    first = torch.arange(checks.live.shape[-1], device=query.device).expand_as(checks.live)
    of_checks = summed[0][..., 0].to(chance.dtype).where(checks.live, 1)
    drawn = Checks(first, checks.live, of_checks, count.sum(0).to(chance.dtype))
    of_pilots, of_lost = _after(pilots, first.shape[-1]), lost.sum(0)[..., 0] > 0
    info = estimate_error(torch.cat(outputs, -2), drawn, exact, of_pilots, of_lost)
    if shared is None:
        return None, info
    told = {"log_total": totals[0].logsumexp(0)} if totals else {}
    return shared.finish(*selections, **told), info


def _sums(mass: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and how many rows have any: (b, h, 1) each."""
    return mass.sum(-1, keepdim=True), (mass > 0).sum(-1, keepdim=True)


def _numbers(rand: Rand, query: Tensor, shares: Shares) -> Tensor:
    """One for each query of this rank, (b, h, n); a rank without any has one that is padding."""
    held = shares.queries[shares.group.rank]
    drawn = rand(held)
    return drawn if held else F.pad(drawn, (0, query.shape[-2]), value=0.5)


def _everywhere(summed: Tensor, chosen: Chosen) -> Selection:
    """The chosen rows by their places among all tokens."""
    return Selection((summed.long() - 1).clamp(min=0), chosen.live)


def _after(pilots: Pilots | None, start: int) -> Known | None:
    """The pilots as rows of an output that has the check rows, and then them."""
    if pilots is None:
        return None
    live = pilots.rows.live
    indices = torch.arange(start, start + live.shape[-1], device=live.device).expand_as(live)
    return Known(Selection(indices, live), pilots.output)
