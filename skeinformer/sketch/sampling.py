"""Sub-sampling: S picks d of the n rows, with weights for which E[S S^T] = I.

The option `log_probability`, (..., n), is log p up to a constant, uniform if None. A row with -inf is never drawn. It
carries no gradient. Where all rows are -inf, S = 0.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.checks import check_count
from skeinformer.noise import gumbel, integer, sign
from skeinformer.sketch.base import Noise, SparseSketch


def subsampling(
    noise: Noise, n: int, d: int, *, dtype: torch.dtype, log_probability: Tensor | None = None
) -> SparseSketch:
    """Build S with independent columns e_i / sqrt(d p_i), i of probability p_i: Definition 1 of Chen et al. (2022)."""
    index, probability = with_replacement(noise[0], n, log_probability)
    return SparseSketch(n, d, index[..., None], _reciprocal_sqrt(d * probability).to(dtype)[..., None])


def accumulative_shapes(n: int, d: int, *, accumulations: int, **_: object) -> tuple[tuple[int, int], ...]:
    check_count("accumulations", accumulations)
    return (d, accumulations), (d, accumulations)


def accumulative(
    noise: Noise, n: int, d: int, *, dtype: torch.dtype, accumulations: int, log_probability: Tensor | None = None
) -> SparseSketch:
    """Build S = (T_1 + ... + T_m) / sqrt(m), T sub-sampling with random signs (Chen and Yang 2021)."""
    index, probability = with_replacement(noise[0].flatten(-2), n, log_probability)
    index, probability = (x.reshape(*x.shape[:-1], d, accumulations) for x in (index, probability))  # (..., d, m)
    weight = sign(noise[1]) * _reciprocal_sqrt(d * accumulations * probability)
    return SparseSketch(n, d, index, weight.to(dtype))


def subsampling_without(
    noise: Noise, n: int, d: int, *, dtype: torch.dtype, log_probability: Tensor | None = None
) -> SparseSketch:
    """Build S with columns e_i / sqrt(q_i) for d distinct rows i, where q_i is the probability that row i is chosen.

    They are the top d of log p_i + Gumbel noise, and kappa is the next largest of these sums. With the noise of the
    other rows fixed, row i is chosen when its own sum exceeds kappa, so q_i = 1 - exp(-exp(log p_i - kappa)), and
    division by q_i is unbiased (Duffield, Lund and Thorup 2007; Kool, van Hoof and Welling 2019), of finite variance
    for d >= 2. Where d is at least the number of rows with p_i > 0, S S^T is the identity on them. Costs O(n log d).
    """
    u = noise[0]
    log_p = _check_log_probability(u.new_zeros(n) if log_probability is None else log_probability, n, u)
    perturbed = log_p + gumbel(u.double())  # (..., n)
    value, order = perturbed.topk(min(d + 1, n), dim=-1)
    index = order[..., :d]
    log_p = log_p.expand(perturbed.shape).gather(-1, index)
    probability = -torch.expm1(-torch.exp(log_p - value[..., d:])) if d < n else torch.ones_like(log_p)
    empty = log_p == -math.inf
    # an empty slot repeats the first row
    index, probability = index.where(~empty, index[..., :1]), probability.masked_fill(empty, 0)
    spare = max(d - n, 0)
    index = torch.cat((index, index[..., :1].expand(*index.shape[:-1], spare)), -1)
    weight = _reciprocal_sqrt(F.pad(probability, (0, spare))).to(dtype)
    return SparseSketch(n, d, index[..., None], weight[..., None])


def with_replacement(u: Tensor, n: int, log_probability: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Draw independent indices i, and return them with their p_i: (..., k), (..., n) -> (..., k), (..., k)."""
    # the inverse distribution function, in float64; where all of log p is -inf, the index and p_i are 0
    if log_probability is None:
        return integer(u.double(), n), torch.full_like(u, 1 / n, dtype=torch.float64)
    log_p = _check_log_probability(log_probability, n, u)
    peak = log_p.amax(-1, keepdim=True)
    p = torch.exp(log_p - torch.where(peak == -math.inf, 0.0, peak))  # (..., n), the largest is 1
    cumulative = p.cumsum(-1)
    total = cumulative[..., -1:]
    target = u.double() * total  # (..., k)
    shape = (*target.shape[:-1], n)
    index = torch.searchsorted(cumulative.expand(shape).contiguous(), target, right=True).clamp(max=n - 1)
    # rounding in the sums can select a row with p = 0: move to the last row before it with p > 0, or else to the first
    possible = p > 0
    first = possible.long().argmax(-1, keepdim=True)
    nearest = torch.where(possible, torch.arange(n, device=p.device), first).cummax(-1).values  # (..., n)
    index = nearest.expand(shape).gather(-1, index)
    return index, (p / torch.where(total == 0, 1.0, total)).expand(shape).gather(-1, index)


def _reciprocal_sqrt(x: Tensor) -> Tensor:
    """Return 1 / sqrt(x), and 0 where x is 0."""
    return torch.where(x == 0, 0.0, x.rsqrt())


def _check_log_probability(log_probability: Tensor, n: int, u: Tensor) -> Tensor:
    """Return log p in float64 without gradient, or raise."""
    if not isinstance(log_probability, Tensor) or not log_probability.is_floating_point():
        kind = log_probability.dtype if isinstance(log_probability, Tensor) else type(log_probability).__name__
        raise TypeError(f"log_probability must be a floating point tensor of shape (..., {n}), got {kind}")
    if log_probability.ndim < 1 or log_probability.shape[-1] != n:
        raise ValueError(f"log_probability has shape {tuple(log_probability.shape)}, expected (..., {n}) = (..., n)")
    if (device := log_probability.device) != u.device:
        raise ValueError(f"log_probability is on {device}, the noise on {u.device}; draw with device={str(device)!r}")
    return log_probability.detach().double()
