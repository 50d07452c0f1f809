"""Informer: exact rows for the queries whose attention is least flat, the mean of V for the others (Zhou et al. 2021).

ProbSparse attention. How far row i is from flat is measured on U keys drawn for that query, uniformly with replacement:

    M_i = max_j s q_i . k_j - mean_j s q_i . k_j                   sparsity="max_mean", what Informer computes
    M_i = ln( (mean_j a_ij) / (prod_j a_ij)^(1/U) )                sparsity="paper", what Chen et al. (2022) analyze

with a_ij = exp(s q_i . k_j): the logarithm of their arithmetic over their geometric mean. The u queries of largest M
get their row of softmax(s Q K^T) V. U = u = `budget`: in the terms of Zhou et al. the factor is budget / ln n.

What is padding never enters the output: rows are exact over the real keys, and the mean is theirs. As published,
the selection does not know the mask: a drawn key may be padding, which here is a zero and scores 0. A padded query
has M = 0, the least there is, and comes after every real one. With `masked_selection` only real keys are drawn.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.selection import at_most, count_real
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.drawn_keys import flatness
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import Rand
from skeinformer.registry import check_number

Sparsity = Literal["max_mean", "paper"]


class InformerNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    queries: Tensor  # (b, h, n): the keys drawn for a query are a function of its number


class InformerOptions(NamedTuple):
    """What ProbSparse attention is told beside its inputs."""

    budget: int = 256
    factor: float | None = None
    sparsity: Sparsity = "max_mean"
    masked_selection: bool = False
    scale: float | None = None


def prob_sparse_attention(inputs: Inputs, noise: tuple[Tensor], options: InformerOptions) -> tuple[Tensor, Trace]:
    """Algorithm 1 of Zhou et al. (2021) on checked inputs, padding zeroed: (b, h, n, p_v)."""
    query, key, value, key_mask, query_mask = inputs
    scale, masked = default_scale(query, options.scale), options.masked_selection
    M = measure_sparsity(query, key, key_mask if masked else None, noise[0], options, scale)
    if query_mask is not None:
        M = M.where(query_mask, -torch.inf)
    # stable: of equals the first is chosen, whatever follows them
    index = M.sort(dim=-1, descending=True, stable=True).indices[..., : most(query.shape[-2], options)]  # (b, h, u)
    rank = torch.arange(index.shape[-1], device=index.device)
    live = rank < chosen(count_real(query, query_mask if masked else None), options)  # (b or 1, 1, u)
    rows = attend(gather_rows(query, index), from_mask(key, value, key_mask), scale)  # (b, h, u, p_v)
    total = value.sum(-2, keepdim=True, dtype=statistics_dtype(value))
    mean = (total / count_real(key, key_mask)[..., None].clamp(min=1)).to(value.dtype)  # (b, h, 1, p_v)
    rows = rows.where(live[..., None], mean)
    return mean.expand(*query.shape[:-1], -1).scatter(-2, index[..., None].expand_as(rows), rows), Trace()


@torch.no_grad()
def measure_sparsity(
    query: Tensor, key: Tensor, key_mask: Tensor | None, u: Tensor, options: InformerOptions, scale: float
) -> Tensor:
    """M_i over the keys drawn for query i, (b, h, n); -inf where there is no key to draw. Time O(n U p).

    The mean is over as many keys as are drawn: U, and at most all m that the mask leaves.
    """
    m = count_real(key, key_mask)  # (b or 1, 1, 1)
    drawn = chosen(m, options)  # (b or 1, 1, 1), U
    largest_drawn = most(key.shape[-2], options)
    return flatness(query, key, key_mask, u, m, drawn, largest_drawn, options.sparsity == "max_mean", scale)


def chosen(m: Tensor, options: InformerOptions) -> Tensor:
    """How many of m tokens are chosen: `budget` or ceil(factor ln m), at least 1 and at most m."""
    if options.factor is None:
        return m.clamp(max=options.budget)
    return (options.factor * m.clamp(min=1).log()).ceil().clamp(min=1).long().minimum(m)


def most(n: int, options: InformerOptions) -> int:
    """A bound for `chosen` of up to n tokens, a Python number; with a factor there is one to spare for rounding."""
    size = options.budget if options.factor is None else math.ceil(options.factor * math.log(n)) + 1
    return at_most(size, n)


class Informer(Attention):
    """Rows of softmax(s Q K^T) V for the u queries of largest M, the mean of V for all others.

    Algorithm 1 of Zhou et al. (2021). The number u of queries and the number U of keys drawn for a query are `budget`,
    or ceil(factor ln n) with a `factor`. Here n is the number of queries and of keys (of the real ones with
    `masked_selection`), and neither u nor U is more. Where U = n each key is taken once. The selection carries no
    gradient. Exact where u reaches the number of real queries.
    Time O((n U + u n_k) p), memory O(n U p / 32 + n_k p).
    """

    Options = InformerOptions
    sizes = ("factor",)
    compute = staticmethod(prob_sparse_attention)

    @staticmethod
    def complete(options: InformerOptions) -> InformerOptions:
        expected = "above 0 and finite, or None for budget / ln n"
        if options.factor is not None and not check_number("factor", options.factor, expected) > 0:
            raise ValueError(f"factor must be {expected}, got {options.factor}")
        return options

    @staticmethod
    def draw(query: Tensor, key: Tensor, rand: Rand, options: InformerOptions) -> InformerNoise:
        return InformerNoise(rand(query.shape[-2]))
