"""WildCat: attention to keys drawn by randomly pivoted Cholesky, with Nystrom weights, Schroder and Mackey (2026).

    R = A_S W V / (A_S W 1),    A_S = exp(s Q K_S^T),    W = H_SS^-1 H_S,    H = exp(s K K^T / tau^2)

For comparison only, as the other rivals of `rivals`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.attention.base import Method, Trace
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask
from skeinformer.checks import check_count
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import Rand, gumbel

TWICE_RHO = 6.383202  # 2 sqrt(1 + exp(2 + W(2 / e^2))), of the closed form for tau
FLOOR = 1e-5  # what a key adds to those chosen, as a share of its own kernel: below it is rounding, and no pivot


def present(key: Tensor, key_mask: Tensor | None) -> Tensor:
    """Which keys are real, (b, h, n)."""
    if key_mask is None:
        return torch.ones(key.shape[:-1], dtype=torch.bool, device=key.device)
    return key_mask.expand(key.shape[:-1])


class WildCatNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    candidates: Tensor  # (b, h, n, rounds)
    pivots: Tensor  # (b, h, d, c): which of c candidates


class WildCat(Method):
    """The formula above, of Schroder and Mackey (2026), for d keys S.

    K is centred, which changes no softmax; tau is their closed form of the largest norms of queries and keys; S is
    drawn by randomly pivoted Cholesky on H; the result is cut off at the least and the greatest value. With `num_bins`
    above 1 the keys are cut into as many pieces, each with S, tau and W of its own and an equal share of d: faster, and
    less accurate. Two deviations: the paper draws one key at a time, here `pivots_at_once` are drawn before the
    residual of all n is updated, from twice as many candidates and with each other's residual in mind, much as
    accelerated RPCholesky does (Epperly et al. 2025); 1 is the paper's order, slower and as accurate. And where d is no
    multiple of the bins fewer keys are drawn, not more. Published for inference: W has no gradient; Q, K_S and V do.
    Exact for d >= m with one bin. Time O(n d (d / bins + p)), memory O(n d / bins).
    """

    budget: int = 256
    pivots_at_once: int = 32
    num_bins: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("pivots_at_once", self.pivots_at_once)
        check_count("num_bins", self.num_bins)

    @property
    def bins(self) -> int:
        """Pieces of the keys, at most one for each key of the budget."""
        return min(self.num_bins, self.budget)

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> WildCatNoise:
        """Uniform numbers for the candidates of every round and for the pivots among them."""
        d = self.budget // self.bins  # keys of a bin
        rounds = -(-d // self.pivots_at_once)
        return WildCatNoise(
            rand(key.shape[2], rounds),
            rand(d * self.bins, 2 * self.pivots_at_once - 1),
        )

    def attend(self, inputs: Inputs, noise: WildCatNoise) -> tuple[Tensor, Trace]:
        """(b, h, n, p_v), by the formula above."""
        query, key, value, key_mask = inputs.query, inputs.key, inputs.value, inputs.key_mask
        bins, scale, dtype = self.bins, inputs.scale, statistics_dtype(query)
        if self.budget >= key.shape[2]:
            return attend(query, from_mask(key, value, key_mask), scale), Trace()
        given, query, key, value = query.dtype, query.to(dtype), key.to(dtype), value.to(dtype)
        real = present(key, key_mask)[..., None]  # (b, h, n, 1)
        m = real.sum(-2, keepdim=True)  # (b, h, 1, 1)
        key = (key - key.sum(-2, keepdim=True) / m.clamp(min=1)) * real
        radius = largest_norm(query.detach()).repeat_interleave(bins, 1)  # (b, h bins, 1)
        drawn = WildCatNoise(*(into_bins(u, bins) for u in WildCatNoise(*noise)))
        source = compress(
            into_bins(key, bins),
            into_bins(value, bins),
            into_bins(real, bins)[..., 0],
            radius,
            drawn,
            self.budget // bins,
            self.pivots_at_once,
            scale,
        )
        keys, values, log_weight = (x.reshape(*m.shape[:2], -1, *x.shape[3:]) for x in source)  # (b, h, d, ...)
        sums = attend(query, VirtualKeys(keys, values, log_weight), scale)
        weight = sums[..., -1:]  # (b, h, n, 1), A_S W 1 up to the factor that A_S W V has too
        output = sums[..., :-1] / weight.where(weight.abs() > torch.finfo(dtype).tiny, 1)
        least = value.detach().masked_fill(~real, torch.inf).amin(-2, keepdim=True)
        greatest = value.detach().masked_fill(~real, -torch.inf).amax(-2, keepdim=True)
        output = torch.where((m <= self.budget) & (bins == 1), output, output.clamp(least, greatest))
        return output.masked_fill(m == 0, 0).to(given), Trace()


def into_bins(x: Tensor, bins: int) -> Tensor:
    """Rows in pieces of equal length, the last filled up with zeros: (b, h, n, p) -> (b, h bins, ceil(n / bins), p)."""
    if bins == 1:
        return x
    x = F.pad(x, (0, 0, 0, -x.shape[2] % bins))
    return x.reshape(x.shape[0], x.shape[1] * bins, -1, x.shape[3])


def compress(
    key: Tensor, value: Tensor, real: Tensor, radius: Tensor, noise: WildCatNoise, d: int, at_once: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """K_S, W [V, 1] and the log weights that make exp(s Q K_S^T + log weight) W [V, 1] the sums over all keys.

    radius: the largest norm of a query, (b, h, 1). Where S can hold all real keys, it does, and W is the identity.
    """
    m = real.sum(-1, keepdim=True)  # (b, h, 1)
    x = key.detach() * (scale / squared_temperature(radius, key, m, scale))[..., None].sqrt()  # H = exp(x x^T)
    pivots = random_pivots(x, real, noise, min(d, key.shape[2]), at_once)
    # H is a Gaussian kernel times exp(|x_i|^2 / 2) on both sides: log weights of S, factors of all values
    half = x.square().sum(-1) / 2  # (b, h, n)
    largest = half.amax(-1, keepdim=True)
    ones = F.pad(value, (0, 1), value=1.0)  # [V, 1]
    values = pivots.solve(ones * ((half - largest).exp() * real)[..., None])  # W [V, 1]
    log_weight = (largest - half.gather(-1, pivots.chosen)).where(pivots.live, -torch.inf)
    whole = m <= pivots.chosen.shape[-1]
    first = torch.argsort((~real).byte(), stable=True)[..., : pivots.chosen.shape[-1]]
    index = torch.where(whole, first, pivots.chosen)
    values = torch.where(whole[..., None], gather_rows(ones, first), values)
    nothing = torch.zeros_like(log_weight).masked_fill(~real.gather(-1, first), -torch.inf)
    return gather_rows(key, index), values, torch.where(whole, nothing, log_weight)


@torch.no_grad()
def squared_temperature(radius_q: Tensor, key: Tensor, m: Tensor, scale: float) -> Tensor:
    """tau^2, (b, h, 1), of WildCat: b / (2 W(b / (2 rho))) R_K / R_Q, b = 2 + log(m) / (s R_Q R_K), R the largest norm.

    W is Lambert's, w e^w = y, by Halley's iteration.
    """
    radius_k = largest_norm(key)
    b = 2 + m.clamp(min=1).log() / (scale * radius_q * radius_k)
    y = b / TWICE_RHO
    w = y.log1p()
    for _ in range(6):
        excess = w - y * (-w).exp()
        w = w - excess / (w + 1 - (w + 2) * excess / (2 * w + 2))
    squared: Tensor = b / (2 * w) * radius_k / radius_q
    return squared


def largest_norm(x: Tensor) -> Tensor:
    """The largest norm of a row, above 0: (b, h, 1)."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norm.amax(-1, keepdim=True).clamp(min=1e-6)


class Pivots(NamedTuple):
    """d chosen keys S, and the factor of the Gaussian kernel G of all keys that they give: G_S = L (L^-1 G_S)."""

    chosen: Tensor  # (b, h, d)
    live: Tensor  # (b, h, d) False where all that was left of G was rounding
    factor: Tensor  # (b, h, d, n), L^-1 G_S; zero in the rows of empty slots

    def solve(self, x: Tensor) -> Tensor:
        """G_SS^-1 G_S x = L^-T (L^-1 G_S x): (b, h, n, p) -> (b, h, d, p). Time O(n d p + d^2 p)."""
        columns = self.chosen[..., None, :].expand(-1, -1, self.factor.shape[2], -1)
        upper = self.factor.gather(-1, columns) + torch.diag_embed((~self.live).to(x.dtype))  # (b, h, d, d), L^T
        solution: Tensor = torch.linalg.solve_triangular(upper, self.factor @ x, upper=True)
        return solution


@torch.no_grad()
def random_pivots(x: Tensor, real: Tensor, noise: WildCatNoise, d: int, at_once: int) -> Pivots:
    """d keys, each with the probability of its diagonal entry of what those before it leave of H = exp(x x^T).

    H is the Gaussian kernel G times exp(|x_i|^2 / 2) on both sides: what is kept, and safe from overflow, is a factor
    of G and its residual diagonal. A round draws twice `at_once` candidates by the diagonal, then pivots among them by
    how much of their own is left. Time O(n d (d + p)).
    """
    log_scale = x.square().sum(-1)  # (b, h, n)
    half, one = -log_scale[..., None] / 2, torch.ones_like(log_scale[..., None])
    left, right = torch.cat([x, half, one], -1), torch.cat([x, one, half], -1)  # G = exp(left right^T)
    rest = real.to(x.dtype)
    factor = x.new_zeros(*x.shape[:2], d, x.shape[2])
    found = []
    for number, start in enumerate(range(0, d, at_once)):
        size = min(at_once, d - start)
        score = rest.log() + log_scale + gumbel(noise.candidates[..., number])
        candidates = score.topk(min(2 * size - 1, x.shape[2]), -1).indices  # (b, h, c)
        before = factor[:, :, :start]
        known = before.gather(-1, candidates[..., None, :].expand(-1, -1, start, -1))  # (b, h, start, c)
        near = gather_rows(left, candidates)
        residual = gaussian(near, gather_rows(right, candidates)) - known.mT @ known  # (b, h, c, c)
        some = (rest.gather(-1, candidates) > 0).to(x.dtype)
        pick, live = pivots_among(
            residual * some[..., None] * some[..., None, :], noise.pivots[:, :, start:][:, :, :size]
        )
        pivots = candidates.gather(-1, pick)
        found.append((pivots, live))
        rows = gaussian(gather_rows(near, pick), right)  # (b, h, size, n)
        rows -= known.gather(-1, pick[..., None, :].expand(-1, -1, start, -1)).mT @ before
        rows *= live[..., None]
        block = rows.gather(-1, pivots[..., None, :].expand(-1, -1, size, -1)) * live[..., None, :]
        lower = torch.linalg.cholesky_ex(block + torch.diag_embed((~live).to(x.dtype) + FLOOR / 10)).L
        new = torch.linalg.solve_triangular(lower, rows, upper=False, out=factor[:, :, start : start + size])
        rest = rest - new.square().sum(-2)
        rest = rest.where(rest > FLOOR, 0).scatter(-1, pivots, 0)
    return Pivots(torch.cat([chosen for chosen, _ in found], -1), torch.cat([live for _, live in found], -1), factor)


def gaussian(left: Tensor, right: Tensor) -> Tensor:
    """exp(-|x_i - x_j|^2 / 2) from [x, -|x|^2 / 2, 1] and [x, 1, -|x|^2 / 2]: (..., k, p + 2), (..., n, p + 2)."""
    return (left @ right.mT).clamp_(max=0).exp_()


def pivots_among(residual: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Pivots by the diagonal, relative to what it was at first: (b, h, c, c), (b, h, k, c) -> (b, h, k), twice.

    The second says which count: where all that is left is rounding, there is nothing to choose. Time O(k c^2).
    """
    initial = residual.diagonal(dim1=-2, dim2=-1).clamp(min=FLOOR)
    noise, picks, counts = gumbel(u[..., : residual.shape[-1]]) - initial.log()[..., None, :], [], []
    for step in range(u.shape[-2]):
        diagonal = residual.diagonal(dim1=-2, dim2=-1)
        score = (diagonal.log() + noise[..., step, :]).where(diagonal > FLOOR, -torch.inf)
        best, pick = score.max(-1, keepdim=True)  # (b, h, 1)
        live = best > -torch.inf
        column = residual.gather(-1, pick[..., None].expand(*residual.shape[:-1], 1))  # (b, h, c, 1)
        inverse = torch.where(live, diagonal.gather(-1, pick).clamp(min=FLOOR).reciprocal(), 0)
        residual = residual - column * column.mT * inverse[..., None]
        picks.append(pick)
        counts.append(live)
    return torch.cat(picks, -1), torch.cat(counts, -1)
