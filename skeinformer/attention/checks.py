"""Check rows: which rows of an output are compared with exact attention, and with what chance each was to be.

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

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.inputs import Inputs
from skeinformer.attention.selection import top
from skeinformer.distributed.selection import candidates as best
from skeinformer.distributed.selection import in_a_row
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import gather_rows

SEEN = 512  # of so many keys at least, where there are as many, are means and covariances taken
FAR = 16  # keys of the part `lean`
ROUNDING = 64  # times the precision: rows that differ by less are alike, and must not be told apart by rounding


class Checks(NamedTuple):
    """Rows to be compared with exact ones, and how many they were drawn from."""

    indices: Tensor  # (b, h, C)
    live: Tensor  # (b, h, C), False where there were fewer rows to draw
    chance: Tensor  # (b, h, C), of being drawn; 1 in empty slots
    candidates: Tensor  # (b, h, 1), how many rows could be drawn


class Over(NamedTuple):
    """The ranks that hold the tokens: what all of them say, and where this one's keys are among all."""

    every: Callable[..., list[Tensor]]
    """What each rank holds of some tensors, (R, *shape) each."""
    start: int
    keys: int


def alone(inputs: Inputs) -> Over:
    """All tokens are here."""
    return Over(lambda *tensors: [x[None] for x in tensors], 0, inputs.key.shape[-2])


@torch.no_grad()
def draw_checks(u: Tensor, mass: Tensor, size: int) -> Checks:
    """At most `size` rows with chances in proportion to `mass`, (b, h, n), where none exceeds 1; no row of mass 0.

    A Pareto sample: the largest of `order`. Time O(n).
    """
    count = (mass > 0).sum(-1, keepdim=True)
    size = min(size, mass.shape[-1])
    chance = chances(mass, chance_per_mass(mass.topk(size, -1).values, mass.sum(-1, keepdim=True), count))
    drawn = top(order(u, chance), size)
    return Checks(*drawn, chance.gather(-1, drawn.indices).where(drawn.live, 1), count.to(mass.dtype))


def order(u: Tensor, chance: Tensor) -> Tensor:
    """logit(chance) - logit(u) for uniform numbers u: the rows of the largest are the sample. -inf for chance 0."""
    return chance.logit() - u.to(chance.dtype).logit()


def chance_per_mass(largest: Tensor, total: Tensor, count: Tensor) -> Tensor:
    """The c for which min(1, c mass) has a sum of C: (b, h, 1). inf where there are no more than C rows of mass.

    From the C largest masses in order, (b, h, C), the sum of all and the number of rows that have any, (b, h, 1).
    """
    size = largest.shape[-1]
    rest = total - (largest.cumsum(-1) - largest)  # without the first k = 0, 1, ...
    left = size - torch.arange(size, device=largest.device)
    # the first k for which the others can share what is left, and none has more than 1
    k = (left * largest <= rest).to(torch.uint8).argmax(-1, keepdim=True)
    found = left.expand_as(rest).gather(-1, k) / rest.gather(-1, k).clamp(min=torch.finfo(rest.dtype).tiny)
    return found.where(count > size, torch.inf)


def chances(mass: Tensor, per_mass: Tensor) -> Tensor:
    """min(1, c mass), 0 where there is none: (b, h, n), (b, h, 1) -> (b, h, n)."""
    return (per_mass * mass).clamp(max=1).where(mass > 0, 0)


@torch.no_grad()
def row_mass(inputs: Inputs, output: Tensor, candidates: Tensor, scale: float, over: Over) -> Tensor:
    """The mean of the five parts, each of sum 1 over the candidates, (b, h, n) in and out; 0 for other rows.

    Over several ranks by three exchanges. Time O(n p^2), memory O(n p).
    """
    query, key, value, key_mask, _ = inputs
    dtype = statistics_dtype(query)
    query, key, value, output = (x.to(dtype) for x in (query, key, value, output))
    ours = candidates[..., None].to(dtype)  # (b, h, n, 1)
    real = (
        key.new_ones(*key.shape[:-1], 1) if key_mask is None else key_mask[..., None].to(dtype).expand_as(key[..., :1])
    )
    step = max(1, over.keys // SEEN)
    seen = slice(-over.start % step, None, step)  # the same keys, however tokens are divided
    # units, in which squares are of moderate size, and means
    tensors, weights = (query, key, value, output), (ours, real[..., seen, :], real[..., seen, :], ours)
    rows = (query, key[..., seen, :], value[..., seen, :], output)
    largest = [x.abs().amax((-2, -1), keepdim=True) for x in tensors]  # (b, h, 1, 1)
    sums = [weight.mT @ x for x, weight in zip(rows, weights, strict=True)]  # (b, h, 1, p)
    found = over.every(*largest, *sums, *(x.sum(-2, keepdim=True) for x in (ours, real[..., seen, :], real)))
    units = [x.amax(0).where(x.amax(0) > 0, 1) for x in found[:4]]
    our_count, seen_count, count = (x.sum(0) for x in found[8:])  # (b, h, 1, 1)
    counts = (our_count, seen_count, seen_count, our_count)
    means = [x.sum(0) / n.clamp(min=1) / unit for x, n, unit in zip(found[4:8], counts, units, strict=True)]
    query, key, value, output = (x / unit for x, unit in zip(tensors, units, strict=True))
    keys, values = (key - means[1]) * real, (value - means[2]) * real
    # the covariance of the keys, and the keys that are farthest from the mean
    of_values = values.square().sum(-1)  # (b, h, n_k)
    far = best((keys.square().sum(-1) * of_values).where(real[..., 0] > 0, -torch.inf), min(FAR, over.keys))
    product, *offers = over.every(
        keys[..., seen, :].mT @ keys[..., seen, :],
        far.score,
        gather_rows(keys, far.row),
        of_values.gather(-1, far.row),
    )
    covariance = product.sum(0) / seen_count.clamp(min=1)  # (b, h, p, p)
    spread, variance = _quadratic_forms(query, means[0], covariance)
    s = scale * units[0] * units[1]  # (b, h, 1, 1)
    lean = _lean(query, *_farthest(*offers), variance * s[..., 0].square(), count[..., 0], s)
    deviation = (output - means[3]).square().sum(-1)
    deviation = deviation.where(deviation > (ROUNDING * torch.finfo(dtype).eps) ** 2, 0)  # of numbers up to 1
    parts = [x.nan_to_num(0, 0, 0).where(candidates, 0) for x in (spread, spread.square(), lean, deviation)]
    totals = over.every(*(x.sum(-1, keepdim=True) for x in parts))
    uniform = candidates / our_count[..., 0].clamp(min=1)
    shares = [_share(x, total.sum(0), uniform) for x, total in zip(parts, totals, strict=True)]
    return torch.stack([uniform, *shares]).mean(0)


def _quadratic_forms(query: Tensor, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """(q_i - mean q)^T Cov(K) (q_i - mean q) and q_i^T Cov(K) q_i: (b, h, n) each."""
    product = query @ covariance
    own = (product * query).sum(-1)
    spread = own - 2 * (product * mean).sum(-1) + (mean @ covariance * mean).sum(-1)
    return spread.where(spread > ROUNDING * torch.finfo(own.dtype).eps * own, 0), own


def _farthest(score: Tensor, keys: Tensor, of_values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of what every rank offers, (R, b, h, k), (R, b, h, k, p), (R, b, h, k), the k best, and which are real keys."""
    score, slot = in_a_row(score[..., None])[..., 0].topk(score.shape[-1], -1)
    return (
        gather_rows(in_a_row(keys), slot),
        in_a_row(of_values[..., None])[..., 0].gather(-1, slot),
        score > -torch.inf,
    )


def _lean(
    query: Tensor, keys: Tensor, of_values: Tensor, live: Tensor, variance: Tensor, count: Tensor, scale: Tensor
) -> Tensor:
    """sum_j b_ij^2 |v_j - mean v|^2 over a few keys, which are given less their mean: (b, h, n).

    The sum of m exponentials of normal scores with variance c is about m e^(c/2), and e^sqrt(2 c log m) where only the
    largest counts. No b_ij exceeds 1.
    """
    log_count = count.clamp(min=2).log()
    normal = torch.where(variance < 2 * log_count, log_count + variance / 2, (2 * log_count * variance).sqrt())
    scores = (scale * (query @ keys.mT)).masked_fill(~live[..., None, :], -torch.inf)  # (b, h, n, FAR)
    normalizer = torch.logaddexp(normal, scores.logsumexp(-1))
    weight = (2 * (scores - normalizer[..., None])).exp()
    return (weight @ of_values[..., None])[..., 0]


def _share(part: Tensor, total: Tensor, uniform: Tensor) -> Tensor:
    """The part with a sum of 1, or the uniform one where it says nothing."""
    return torch.where(total > 0, part / total.where(total > 0, 1), uniform)


def rows_to_draw(query: Tensor, query_mask: Tensor | None, known: Tensor | None) -> Tensor:
    """The real rows, but for those whose indices `known`, (b, h, P), has: (b, h, n). Its empty slots are padding."""
    real = query.new_ones(query.shape[:-1], dtype=torch.bool)
    real = real if query_mask is None else real & query_mask
    return real if known is None else real.scatter(-1, known, False)
