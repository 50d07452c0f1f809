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

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import Attention, default_scale
from skeinformer.attention.virtual_keys import attend, from_mask, statistics_dtype
from skeinformer.noise import MULTIPLIERS, Rand, scramble
from skeinformer.registry import check_choice, check_number
from skeinformer.kernels.rows import gather_rows, plain_cpu

Sparsity = Literal["max_mean", "paper"]

CHUNKS = 32  # the drawn keys are gathered in so many parts: all at once they would be n x U x p numbers
SCORES = 1 << 17  # on a CPU so many are computed at a time: their indices stay in the cache


class InformerNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    queries: Tensor  # (b, h, n): the keys drawn for a query are a function of its number


class InformerOptions(NamedTuple):
    """What ProbSparse attention is told beside its inputs."""

    budget: int
    factor: float | None
    sparsity: Sparsity
    masked_selection: bool
    scale: float | None


class Informer(Attention):
    """Rows of softmax(s Q K^T) V for the u queries of largest M, the mean of V for all others.

    Algorithm 1 of Zhou et al. (2021). u and the number U of keys drawn for a query are `budget`, or ceil(factor ln n)
    with a `factor`, n being the number of queries and of keys (of the real ones with `masked_selection`), and never
    more than n. Where U = n each key is taken once. The selection carries no gradient. Exact where u reaches the number
    of real queries.
    Time O((n U + u n_k) p), memory O(n U p / 32 + n_k p).
    """

    def __init__(
        self,
        *,
        head_dim: int,
        max_len: int | None = None,
        budget: int = 256,
        seed: int | None = None,
        factor: float | None = None,
        sparsity: Sparsity = "max_mean",
        masked_selection: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__(head_dim=head_dim, max_len=max_len, budget=budget, seed=seed)
        check_choice("sparsity", sparsity, ("max_mean", "paper"))
        expected = "above 0 and finite, or None for budget / ln n"
        if factor is not None and not check_number("factor", factor, expected) > 0:
            raise ValueError(f"factor must be {expected}, got {factor}")
        self.options = InformerOptions(budget, factor, sparsity, masked_selection, scale)

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> InformerNoise:
        return InformerNoise(rand(query.shape[-2]))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        noise: tuple[Tensor],
    ) -> Tensor:
        return prob_sparse_attention(query, key, value, key_mask, query_mask, noise[0], self.options)

    def extra_repr(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.options._asdict().items())
        return f"head_dim={self.head_dim}, {shown}"


def prob_sparse_attention(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    value: Tensor,  # (b, h, n_k, p_v)
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    u: Tensor,  # (b, h, n)
    options: InformerOptions,
) -> Tensor:
    """Algorithm 1 of Zhou et al. (2021) on checked inputs, padding zeroed: (b, h, n, p_v)."""
    scale, masked = default_scale(query, options.scale), options.masked_selection
    M = measure_sparsity(query, key, key_mask if masked else None, u, options, scale)
    if query_mask is not None:
        M = M.where(query_mask, -torch.inf)
    # stable: of equals the first is chosen, whatever follows them
    index = M.sort(dim=-1, descending=True, stable=True).indices[..., : most(query.shape[-2], options)]  # (b, h, u)
    rank = torch.arange(index.shape[-1], device=index.device)
    live = rank < chosen(count(query, query_mask if masked else None), options)  # (b or 1, 1, u)
    rows = attend(gather_rows(query, index), from_mask(key, value, key_mask), scale)  # (b, h, u, p_v)
    total = value.sum(-2, keepdim=True, dtype=statistics_dtype(value))
    mean = (total / count(key, key_mask)[..., None].clamp(min=1)).to(value.dtype)  # (b, h, 1, p_v)
    rows = rows.where(live[..., None], mean)
    return mean.expand(*query.shape[:-1], -1).scatter(-2, index[..., None].expand_as(rows), rows)


@torch.no_grad()
def measure_sparsity(
    query: Tensor, key: Tensor, key_mask: Tensor | None, u: Tensor, options: InformerOptions, scale: float
) -> Tensor:
    """M_i over the keys drawn for query i, (b, h, n); -inf where there is no key to draw. Time O(n U p).

    The mean is over as many keys as are drawn: U, and at most all m that the mask leaves.
    """
    m = count(key, key_mask)  # (b or 1, 1, 1)
    drawn = chosen(m, options)  # (b or 1, 1, 1), U
    if plain_cpu(query) and plain_cpu(key) and plain_cpu(u):
        return _measure_by_head(query, key, key_mask, u, m, drawn, options.sparsity, scale)
    (b, h, n_k, p), n, dtype = key.shape, query.shape[-2], statistics_dtype(query)
    reduce: Callable[[Tensor, int], Tensor] = torch.amax if options.sparsity == "max_mean" else torch.logsumexp
    merge = torch.maximum if options.sparsity == "max_mean" else torch.logaddexp
    scaled = (scale * query.to(dtype))[..., None, :]  # (b, h, n, 1, p)
    rows = key.to(dtype).reshape(-1, p)  # (b * h * n_k, p)
    head = n_k * torch.arange(b * h, device=key.device).view(b, h, 1)  # where each head's rows start
    if key_mask is None:
        place = head + torch.arange(n_k, device=key.device)  # (b, h, n_k)
    else:
        place = head + (~key_mask).long().argsort(dim=-1, stable=True)  # (b, h, n_k), real keys first

    largest = torch.full_like(u, -torch.inf, dtype=dtype)  # (b, h, n)
    total = torch.zeros_like(largest)
    number = as_bits(u)
    fused = torch.compiler.is_compiling()  # a compiler never forms the drawn keys, and would only repeat the loop
    for rank in torch.arange(most(n_k, options), device=key.device).chunk(1 if fused else CHUNKS):
        index = draw_keys(number, rank, m, drawn).flatten(-2)  # (b, h, n * U / 32)
        drawn_keys = rows.index_select(0, place.gather(-1, index).flatten()).view(b, h, n, len(rank), p)
        score = (drawn_keys * scaled).sum(-1) if fused else (drawn_keys @ scaled.mT)[..., 0]  # (b, h, n, U / 32)
        live = (rank < drawn)[..., None, :]  # (b or 1, 1, 1, U / 32)
        largest = merge(largest, reduce(score.where(live, -torch.inf), -1))
        total = total + score.where(live, 0).sum(-1)
    drawn = drawn.clamp(min=1)
    mean = total / drawn
    return largest - mean if options.sparsity == "max_mean" else largest - drawn.to(dtype).log() - mean


def _measure_by_head(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    u: Tensor,
    m: Tensor,
    drawn: Tensor,
    sparsity: Sparsity,
    scale: float,
) -> Tensor:
    """`measure_sparsity` where numbers may be looked at: no key is copied, and nothing is drawn that does not count."""
    (b, h, n, _), dtype = query.shape, statistics_dtype(query)
    M = torch.full((b, h, n), -torch.inf, dtype=dtype)
    for i, j in itertools.product(range(b), range(h)):
        num_keys, size = int(m[i % len(m)]), int(drawn[i % len(m)])
        if not size:
            continue
        keys = (key[i, j] if key_mask is None else key[i, j, key_mask[i, 0]]).to(dtype)  # (m, p)
        queries, numbers, rank = scale * query[i, j].to(dtype), as_bits(u[i, j]), torch.arange(size)
        step = max(1, SCORES // size)
        for part in (slice(start, start + step) for start in range(0, n, step)):
            number = numbers[part]
            index = _draw_keys_32(number, rank, num_keys) if size < num_keys else rank.expand(len(number), size)
            score = _products(queries[part], keys, index)  # (n', U)
            largest = score.amax(-1) if sparsity == "max_mean" else score.logsumexp(-1) - math.log(size)
            M[i, j, part] = largest - score.mean(-1)
    return M


def _products(query: Tensor, key: Tensor, index: Tensor) -> Tensor:
    """q_i . k_j for the keys j listed for query i: (n, p), (m, p), (n, U) -> (n, U).

    The list is the pattern of a sparse matrix. The kernel takes it as it is, in any order and with repetitions.
    """
    _accept_sparse()
    (n, U), zeros = index.shape, query.new_zeros(index.numel())
    first = torch.arange(0, n * U + 1, U)
    pattern = torch.sparse_csr_tensor(first, index.flatten(), zeros, (n, len(key)), check_invariants=False)
    products: Tensor = torch.sparse.sampled_addmm(pattern, query, key.mT).values()
    return products.view(n, U)


@functools.cache
def _accept_sparse() -> None:
    """Make torch say here, unheard, what it says once in a process: that its sparse matrices may still change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()


def _draw_keys_32(number: Tensor, rank: Tensor, m: int) -> Tensor:
    """`draw_keys` for less than all of m keys, with `scramble` in 32 bits and in place: (n,), (k,) -> (n, k)."""
    bits = number.int()[:, None] + rank.int()  # these wrap around, as all below does
    for multiplier in MULTIPLIERS:
        bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(multiplier)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    return bits.long().bitwise_and_(0xFFFFFFFF).mul_(m).bitwise_right_shift_(32)


def as_bits(u: Tensor) -> Tensor:
    """32 bits for each uniform number, as integers."""
    return scramble((u * 2**25).long())


def draw_keys(number: Tensor, rank: Tensor, m: Tensor, drawn: Tensor) -> Tensor:
    """The keys drawn for each query, one for each rank, counted among the m real ones: (b, h, n), (k,) -> (b, h, n, k).

    Independent and uniform in [0, m): a hash of the query's number and the rank, so that n numbers are enough for n U
    draws, and neither n nor U changes a draw. Where all m keys are drawn, rank r takes key r.
    """
    bits = scramble(number[..., None] + rank)  # (b, h, n, k), 32 bits each
    m, drawn = m[..., None], drawn[..., None]
    return torch.where(drawn < m, (bits * m) >> 32, rank)


def count(x: Tensor, mask: Tensor | None) -> Tensor:
    """The number of real tokens, (b, 1, 1); of all tokens without a mask, (1, 1, 1)."""
    if mask is None:
        return torch.zeros(1, 1, 1, dtype=torch.long, device=x.device) + x.shape[-2]
    return mask.sum(-1, keepdim=True)


def chosen(m: Tensor, options: InformerOptions) -> Tensor:
    """How many of m tokens are chosen: `budget` or ceil(factor ln m), at least 1 and at most m."""
    if options.factor is None:
        return m.clamp(max=options.budget)
    return (options.factor * m.clamp(min=1).log()).ceil().clamp(min=1).long().minimum(m)


def most(n: int, options: InformerOptions) -> int:
    """A bound for `chosen` of up to n tokens, a Python number; with a factor there is one to spare for rounding."""
    size = options.budget if options.factor is None else math.ceil(options.factor * math.log(n)) + 1
    return size if size < n else n  # not min(): a compiler with symbolic n would keep it symbolic
