"""Sub-sampling: S picks d of the n rows and weighs them so that E[S S^T] = I.

Definition 1 of Chen et al. (2022), after Drineas, Kannan and Mahoney (2006), draws with replacement. The same columns
with random signs, m of them added up, are the accumulative sketch of Chen and Yang (2021). Without replacement the
weights come from the chance that a row is chosen. The option `log_probability`, (..., n), need not be normalized; -inf
is never drawn; it carries no gradient. A row of it with nothing to draw gives S = 0.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer import noise as noises
from skeinformer.noise import Rand
from skeinformer.registry import check_count
from skeinformer.sketch.base import SparseColumns, check_sketch_noise


def subsampling_noise(rand: Rand, n: int, d: int, *, log_probability: Tensor | None = None) -> tuple[Tensor, ...]:
    """One uniform number per column, (d,)."""
    return (rand(d, dtype=torch.float64),)


def subsampling(
    noise: tuple[Tensor, ...], n: int, d: int, *, dtype: torch.dtype, log_probability: Tensor | None = None
) -> SparseColumns:
    """S whose columns are e_i / sqrt(d p_i) with probability p_i, independently.

    Definition 1 of Chen et al. (2022). Drawing costs O(n + d log n), or O(d) for uniform p; applying gathers
    d rows, O(d p).
    """
    check_sketch_noise(noise, (d,))
    index, probability = with_replacement(noise[0], n, log_probability)
    weight = _reciprocal_sqrt(d * probability).to(dtype)
    return SparseColumns(n, d, index[..., None], weight[..., None])


def accumulative_noise(
    rand: Rand, n: int, d: int, *, accumulations: int = 4, log_probability: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Uniform numbers for the rows and for the signs, (d, m) each."""
    check_count("accumulations", accumulations)
    return rand(d, accumulations, dtype=torch.float64), rand(d, accumulations)


def accumulative(
    noise: tuple[Tensor, ...],
    n: int,
    d: int,
    *,
    dtype: torch.dtype,
    accumulations: int = 4,
    log_probability: Tensor | None = None,
) -> SparseColumns:
    """S = (T_1 + ... + T_m) / sqrt(m), each T a sub-sampling matrix whose columns have independent random signs.

    Chen and Yang (2021). The signs remove the cross terms T_j T_k^T from E[S S^T]. More terms m make S more like a
    Gaussian matrix. Applying costs O(d m p).
    """
    check_count("accumulations", accumulations)
    check_sketch_noise(noise, (d, accumulations), (d, accumulations))
    index, probability = with_replacement(noise[0].flatten(-2), n, log_probability)
    index = index.reshape(*index.shape[:-1], d, accumulations)
    probability = probability.reshape(index.shape)  # (..., d, m)
    weight = noises.sign(noise[1]) * _reciprocal_sqrt(d * accumulations * probability)
    return SparseColumns(n, d, index, weight.to(dtype))


def subsampling_without_noise(
    rand: Rand, n: int, d: int, *, log_probability: Tensor | None = None
) -> tuple[Tensor, ...]:
    """One uniform number per row, (n,)."""
    return (rand(n, dtype=torch.float64),)


def subsampling_without(
    noise: tuple[Tensor, ...], n: int, d: int, *, dtype: torch.dtype, log_probability: Tensor | None = None
) -> SparseColumns:
    """S whose columns are e_i / sqrt(q_i) for d distinct rows i, the top d of log p_i + Gumbel noise.

    q_i is the chance that row i is chosen, given the noise of the others; see without_replacement. S S^T is diagonal
    and unbiased. When d is at least the number of rows with p_i > 0, it is exactly the identity on them and the columns
    left over are zero. The variance is finite for d >= 2. Drawing costs O(n log d), applying O(d p).
    """
    check_sketch_noise(noise, (n,))
    index, chance = without_replacement(noise[0], n, d, log_probability)
    return SparseColumns(n, d, index[..., None], _reciprocal_sqrt(chance).to(dtype)[..., None])


def with_replacement(u: Tensor, n: int, log_probability: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Independent indices i with probability p_i, and their p_i: (..., k), (..., n) -> (..., k), (..., k).

    By the inverse distribution function, in float64. Where all of log p is -inf, the index is 0 and p_i is 0.
    """
    if log_probability is None:
        index = noises.integer(u.double(), n)
        return index, torch.full_like(u, 1 / n, dtype=torch.float64)
    log_p = _check_log_probability(log_probability, n, u)
    peak = log_p.amax(-1, keepdim=True)
    p = torch.exp(log_p - torch.where(peak == -math.inf, 0.0, peak))  # (..., n), the largest is 1
    cumulative = p.cumsum(-1)
    total = cumulative[..., -1:]
    target = u.double() * total  # (..., k)
    batch = target.shape[:-1]
    index = torch.searchsorted(cumulative.expand(*batch, n).contiguous(), target, right=True).clamp(max=n - 1)

    # rounding in the sums can end on a row with p = 0: step back to the last row that can be drawn, or up to the first
    live = p > 0
    first = live.long().argmax(-1, keepdim=True)
    landing = torch.where(live, torch.arange(n, device=p.device), first).cummax(-1).values  # (..., n)
    index = landing.expand(*batch, n).gather(-1, index)
    p = p / torch.where(total == 0, 1.0, total)
    return index, p.expand(*batch, n).gather(-1, index)


def without_replacement(u: Tensor, n: int, d: int, log_probability: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """d distinct indices and the chance q_i of each: (..., n), (..., n) -> (..., d), (..., d).

    The top d of the perturbed log p_i + Gumbel noise. With kappa the (d+1)-th largest of them, row i is chosen when its
    own noise lifts it above the d-th largest of the others, which is kappa for every chosen row, so
    q_i = 1 - exp(-exp(log p_i - kappa)). Dividing by q_i is unbiased (Duffield, Lund and Thorup 2007; Kool, van Hoof
    and Welling 2019). An empty slot has q_i = 0 and repeats the first index.
    """
    if log_probability is None:
        log_probability = u.new_zeros(n)
    log_p = _check_log_probability(log_probability, n, u)
    perturbed = log_p + noises.gumbel(u.double())  # (..., n)
    log_p = log_p.expand(perturbed.shape)
    value, order = perturbed.topk(min(d + 1, n), dim=-1)
    index = order[..., :d]
    log_p = log_p.gather(-1, index)
    chance = torch.ones_like(log_p)
    if d < n:
        chance = -torch.expm1(-torch.exp(log_p - value[..., d:]))
    empty = log_p == -math.inf
    index = torch.where(empty, index[..., :1], index)
    chance = torch.where(empty, 0.0, chance)
    spare = max(d - n, 0)
    index = torch.cat((index, index[..., :1].expand(*index.shape[:-1], spare)), -1)
    return index, F.pad(chance, (0, spare))


def _reciprocal_sqrt(x: Tensor) -> Tensor:
    """1 / sqrt(x), and 0 where x is 0."""
    return torch.where(x == 0, 0.0, x.rsqrt())


def _check_log_probability(log_probability: Tensor, n: int, u: Tensor) -> Tensor:
    """log p in float64 without gradient, or an error."""
    if not isinstance(log_probability, Tensor) or not log_probability.is_floating_point():
        kind = log_probability.dtype if isinstance(log_probability, Tensor) else type(log_probability).__name__
        raise TypeError(f"log_probability must be a floating point tensor of shape (..., {n}), got {kind}")
    if log_probability.ndim < 1 or log_probability.shape[-1] != n:
        raise ValueError(f"log_probability has shape {tuple(log_probability.shape)}, expected (..., {n}) = (..., n)")
    if log_probability.device != u.device:
        raise ValueError(
            f"log_probability is on {log_probability.device}, the noise on {u.device}; draw the noise with "
            f"device={str(log_probability.device)!r}"
        )
    return log_probability.detach().double()
