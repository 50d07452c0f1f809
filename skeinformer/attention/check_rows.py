"""Check rows: which rows of an output are compared with exact attention, and with what chance each is drawn.

The error of a sketch is uneven: a few rows may hold most of it, and 32 rows drawn uniformly would miss them. So each of
five parts decides about a fifth of the draw, by a guess of a row's squared error that costs no exact row:

    uniform     1
    spread      c_i = (q_i - mean q)^T Cov(K) (q_i - mean q): how far its scores are from those of the mean query
    peak        c_i^2
    lean        sum_j b_ij^2 |v_j - mean v|^2 over the 16 keys that are farthest from the mean in key times value
    deviation   |R_i - mean R|^2

with b_ij = exp(s q_i . (k_j - mean k) - z_i), and z_i the normalizer of scores that are normally distributed. A guess
decides only how precise the estimate is: rows count by the inverse of their chance (Horvitz and Thompson 1952), and the
uniform part leaves each row a fifth of the chance that a uniform draw would give it. The draw is a Pareto sample (Rosen
1997): of fixed size, without replacement, from one uniform number for each row, so that all rows are drawn where there
are no more.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.inputs import Inputs
from skeinformer.attention.rows import Rows, in_line, top_of_all
from skeinformer.distributed.world import World
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import gather_rows

SAMPLED = 512  # of so many keys at least, where there are as many, are means and covariances taken
FAR = 16  # keys of the part `lean`
ROUNDING = 64  # times the precision: rows that differ by less are alike, and rounding must not separate them


class Checks(NamedTuple):
    """Check rows, and how many rows they were drawn from."""

    rows: Rows  # (b, h, C)
    chance: Tensor  # (b, h, C), of being drawn; 1 in empty slots
    candidates: Tensor  # (b, h, 1), how many rows could be drawn


def draw_checks(world: World, u: Tensor, mass: Tensor, size: int, n: int) -> Checks:
    """Draw at most `size` of n rows, with chances in proportion to `mass`, (b, h, n), but for the limit of 1.

    A row of mass 0 is never drawn. Time O(n), two exchanges over ranks.
    """
    size = min(size, n)
    largest = mass.topk(min(size, mass.shape[-1]), -1).values
    largest = F.pad(largest, (0, size - largest.shape[-1]))
    count = (mass > 0).sum(-1, keepdim=True).to(mass.dtype)
    all_largest, total, count = world.gather("chances", largest, mass.sum(-1, keepdim=True), count)
    total, count = total.sum(0), count.sum(0)
    best = in_line(all_largest[..., None])[..., 0].topk(size, -1).values
    chance = (chance_per_mass(best, total, count) * mass).clamp(max=1).where(mass > 0, 0)
    request = (order(u, chance), size, chance[..., None])
    ((rows,), (drawn,)) = top_of_all(world, "checks", [request], n, masked=True)
    return Checks(rows, drawn[..., 0].where(rows.is_live(), 1), count)


def order(u: Tensor, chance: Tensor) -> Tensor:
    """Return logit(chance) - logit(u): the rows of the largest are the sample. -inf for chance 0."""
    return chance.logit() - u.to(chance.dtype).logit()


def chance_per_mass(largest: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """Return the c for which min(1, c mass) has a sum of C, (b, h, 1); inf where no more than C rows have mass.

    largest: the C largest masses in order, (b, h, C); total: the sum of all; count: how many rows have mass.
    """
    size = largest.shape[-1]
    rest = total - (largest.cumsum(-1) - largest)  # without the first k = 0, 1, ...
    remaining = size - torch.arange(size, device=largest.device)
    # the first k for which the others can share what remains, and none has more than 1
    k = (remaining * largest <= rest).to(torch.uint8).argmax(-1, keepdim=True)
    per_mass = remaining.expand_as(rest).gather(-1, k) / rest.gather(-1, k).clamp(min=torch.finfo(rest.dtype).tiny)
    return per_mass.where(count > size, torch.inf)


def row_mass(inputs: Inputs, output: Tensor, candidates: Tensor) -> Tensor:
    """Return the mean of the five parts, each of sum 1 over the candidates: (b, h, n); 0 for other rows.

    Three exchanges over ranks. Time O(n p^2), memory O(n p).
    """
    query, key, value, key_mask, _, scale, world = inputs
    dtype, n_k = statistics_dtype(query), world.num_keys(key.shape[-2])
    query, key, value, output = (x.to(dtype) for x in (query, key, value, output))
    chosen = candidates[..., None].to(dtype)  # (b, h, n, 1)
    real = torch.ones_like(key[..., :1]) if key_mask is None else key_mask[..., None].to(dtype).expand_as(key[..., :1])
    step = max(1, n_k // SAMPLED)
    sampled = slice(-world.key_start % step, None, step)  # the same keys, however tokens are divided
    # units, in which squares are of moderate size, and means
    tensors, seen = (query, key, value, output), real[..., sampled, :]
    largest = [x.abs().amax((-2, -1), keepdim=True) for x in tensors]  # (b, h, 1, 1)
    sums = [chosen.mT @ query, seen.mT @ key[..., sampled, :], seen.mT @ value[..., sampled, :], chosen.mT @ output]
    counts_here = [x.sum(-2, keepdim=True) for x in (chosen, seen, real)]
    gathered = world.gather("guesses", *largest, *sums, *counts_here)
    units = [x.where(x > 0, 1) for x in (each.amax(0) for each in gathered[:4])]
    num_chosen, num_sampled, count = (x.sum(0) for x in gathered[8:])  # (b, h, 1, 1)
    counts = (num_chosen, num_sampled, num_sampled, num_chosen)
    means = [x.sum(0) / n.clamp(min=1) / unit for x, n, unit in zip(gathered[4:8], counts, units, strict=True)]
    query, key, value, output = (x / unit for x, unit in zip(tensors, units, strict=True))
    keys, values = (key - means[1]) * real, (value - means[2]) * real
    # the covariance of the keys, and the keys that are farthest from the mean
    value_squares = values.square().sum(-1)  # (b, h, n_k)
    distance = (keys.square().sum(-1) * value_squares).where(real[..., 0] > 0, -torch.inf)
    product = keys[..., sampled, :].mT @ keys[..., sampled, :]
    distance, index = distance.topk(min(FAR, distance.shape[-1]), -1)
    missing = min(FAR, n_k) - distance.shape[-1]  # a rank may have fewer keys than all ranks choose
    far = F.pad(gather_rows(torch.cat([keys, value_squares[..., None]], -1), index), (0, 0, 0, missing))
    distance = F.pad(distance, (0, missing), value=-torch.inf)
    distance, far, products = world.gather("far keys", distance[..., None], far, product)
    distance, slot = in_line(distance)[..., 0].topk(min(FAR, n_k), -1)
    far = gather_rows(in_line(far), slot)  # (b, h, FAR, p + 1)
    covariance = products.sum(0) / num_sampled.clamp(min=1)  # (b, h, p, p)
    spread, variance = _quadratic_forms(query, means[0], covariance)
    s = scale * units[0] * units[1]  # (b, h, 1, 1)
    lean = _lean(query, far, distance > -torch.inf, variance * s[..., 0].square(), count[..., 0], s)
    deviation = (output - means[3]).square().sum(-1)
    deviation = deviation.where(deviation > (ROUNDING * torch.finfo(dtype).eps) ** 2, 0)  # of numbers up to 1
    parts = [x.nan_to_num(0, 0, 0).where(candidates, 0) for x in (spread, spread.square(), lean, deviation)]
    totals = world.sum("totals", *(x.sum(-1, keepdim=True) for x in parts))
    uniform = candidates / num_chosen[..., 0].clamp(min=1)
    shares = [_share(x, total, uniform) for x, total in zip(parts, totals, strict=True)]
    return torch.stack([uniform, *shares]).mean(0)


def _quadratic_forms(query: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (q_i - mean q)^T Cov(K) (q_i - mean q) and q_i^T Cov(K) q_i: (b, h, n) each."""
    product = query @ covariance
    own = (product * query).sum(-1)
    spread = own - 2 * (product * mean).sum(-1) + (mean @ covariance * mean).sum(-1)
    return spread.where(spread > ROUNDING * torch.finfo(own.dtype).eps * own, 0), own


def _lean(query: Tensor, far: Tensor, live: Tensor, variance: Tensor, count: Tensor, scale: Tensor) -> Tensor:
    """Compute sum_j b_ij^2 |v_j - mean v|^2 over a few keys: (b, h, n).

    far: (b, h, FAR, p + 1), the differences of these keys from their mean, and |v_j - mean v|^2. The sum of m
    exponentials of normal scores with variance c is about m e^(c/2), and e^sqrt(2 c log m) where only the largest
    counts. No b_ij exceeds 1.
    """
    log_count = count.clamp(min=2).log()
    normal = torch.where(variance < 2 * log_count, log_count + variance / 2, (2 * log_count * variance).sqrt())
    scores = (scale * (query @ far[..., :-1].mT)).masked_fill(~live[..., None, :], -torch.inf)  # (b, h, n, FAR)
    normalizer = torch.logaddexp(normal, scores.logsumexp(-1))
    weight = (2 * (scores - normalizer[..., None])).exp()
    return (weight @ far[..., -1:])[..., 0]


def _share(part: Tensor, total: Tensor, uniform: Tensor) -> Tensor:
    """Scale the part to a sum of 1; the uniform part where all of it is 0."""
    return torch.where(total > 0, part / total.where(total > 0, 1), uniform)


def rows_to_draw(query: Tensor, query_mask: Tensor | None, pilots: Rows | None) -> Tensor:
    """Mark the real rows that are no pilots: (b, h, n)."""
    real = query.new_ones(query.shape[:-1], dtype=torch.bool)
    real = real if query_mask is None else real & query_mask
    return real if pilots is None else real & ~pilots.are_chosen(query.shape[-2])
