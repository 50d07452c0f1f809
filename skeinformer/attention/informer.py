"""Informer: exact rows for the queries whose attention is least flat, the mean of V for the others (Zhou et al. 2021).

ProbSparse attention. How far row i is from flat is measured on U keys drawn for that query, uniformly with replacement:

    M_i = max_j s q_i . k_j - mean_j s q_i . k_j                   sparsity="max_mean", what Informer computes
    M_i = ln( (mean_j a_ij) / (prod_j a_ij)^(1/U) )                sparsity="paper", what Chen et al. (2022) analyze

with a_ij = exp(s q_i . k_j). Rows are exact over the real keys, and the mean is theirs. As published, a drawn key may
be padding, which scores 0; with `masked_selection` only real keys are drawn. Padded queries come after real ones.
"""

import functools
import itertools
import math
import warnings
from collections.abc import Callable
from typing import ClassVar, Literal, cast

import torch
from torch import Tensor

from skeinformer.attention.base import Method, Trace
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.rows import count_real
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.checks import check_number
from skeinformer.kernels.choice import is_eager_cpu, statistics_dtype
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import MULTIPLIERS, Rand, scramble

CHUNKS = 32  # the drawn keys are gathered in so many parts: all at once they would be n x U x p numbers
SCORES = 1 << 17  # on a CPU so many are computed at a time: their indices stay in the cache


class Informer(Method):
    """Rows of softmax(s Q K^T) V for the u queries of largest M, the mean of V for all others.

    Algorithm 1 of Zhou et al. (2021). The number u of queries and the number U of keys drawn for a query are `budget`,
    or ceil(factor ln n) with a `factor`. Neither is more than n, the number of queries and of keys (of the real ones
    with `masked_selection`). Where U = n each key is taken once. The selection carries no gradient. Exact where u
    reaches the number of real queries. Time O((n U + u n_k) p), memory O(n U p / 32 + n_k p).
    """

    budget: int = 256
    factor: float | None = None
    sparsity: Literal["max_mean", "paper"] = "max_mean"
    masked_selection: bool = False
    size_options: ClassVar[tuple[str, ...]] = ("factor",)

    def __post_init__(self) -> None:
        super().__post_init__()
        expected = "above 0 and finite, or None for budget / ln n"
        if self.factor is not None and not check_number("factor", self.factor, expected) > 0:
            raise ValueError(f"factor must be {expected}, got {self.factor}")

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Draw (b, h, n) numbers: the keys drawn for a query are a function of its number."""
        return (rand(query.shape[-2]),)

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        query, key, value, key_mask, query_mask, scale = inputs[:6]
        M = self.measure_sparsity(query, key, key_mask if self.masked_selection else None, noise[0], scale)
        if query_mask is not None:
            M = M.where(query_mask, -torch.inf)
        # stable: of equals the first is chosen, whatever follows them
        index = M.sort(dim=-1, descending=True, stable=True).indices[..., : self.most(query.shape[-2])]  # (b, h, u)
        rank = torch.arange(index.shape[-1], device=index.device)
        live = rank < self.chosen(count_real(query, query_mask if self.masked_selection else None))  # (b or 1, 1, u)
        rows = attend(gather_rows(query, index), from_mask(key, value, key_mask), scale)  # (b, h, u, p_v)
        total = value.sum(-2, keepdim=True, dtype=statistics_dtype(value))
        mean = (total / count_real(key, key_mask)[..., None].clamp(min=1)).to(value.dtype)  # (b, h, 1, p_v)
        rows = rows.where(live[..., None], mean)
        return mean.expand(*query.shape[:-1], -1).scatter(-2, index[..., None].expand_as(rows), rows), Trace()

    @torch.no_grad()
    def measure_sparsity(self, query: Tensor, key: Tensor, key_mask: Tensor | None, u: Tensor, scale: float) -> Tensor:
        """M_i over the keys drawn for query i, (b, h, n); -inf where there is no key to draw. Time O(n U p)."""
        dtype = statistics_dtype(query)
        # on a CPU no key is copied, and only keys that count are drawn
        measure = self._measure_by_head if is_eager_cpu(query) else self._measure_by_chunks
        return measure(scale * query.to(dtype), key.to(dtype), key_mask, u)

    def _measure_by_chunks(self, query: Tensor, key: Tensor, key_mask: Tensor | None, u: Tensor) -> Tensor:
        (b, h, n_k, p), n = key.shape, query.shape[-2]
        m = count_real(key, key_mask)  # (b or 1, 1, 1), how many keys there are to draw from
        drawn = self.chosen(m)  # (b or 1, 1, 1), how many are drawn for a query
        largest_less_mean = self.sparsity == "max_mean"
        reduce: Callable[[Tensor, int], Tensor] = torch.amax if largest_less_mean else torch.logsumexp
        merge = torch.maximum if largest_less_mean else torch.logaddexp
        rows = key.reshape(-1, p)  # (b * h * n_k, p)
        place = torch.arange(n_k, device=key.device)
        if key_mask is not None:
            place = (~key_mask).long().argsort(dim=-1, stable=True)  # (b, 1, n_k), real keys first
        place = place + n_k * torch.arange(b * h, device=key.device).view(b, h, 1)  # (b, h, n_k), in `rows`
        largest = torch.full_like(u, -torch.inf, dtype=query.dtype)  # (b, h, n)
        total, number = torch.zeros_like(largest), as_bits(u)
        for rank in torch.arange(self.most(n_k), device=key.device).chunk(CHUNKS):
            index = draw_keys(number, rank, m, drawn).flatten(-2)  # (b, h, n * U / 32)
            drawn_keys = rows.index_select(0, place.gather(-1, index).flatten()).view(b, h, n, len(rank), p)
            score = (drawn_keys @ query[..., None])[..., 0]  # (b, h, n, U / 32)
            live = (rank < drawn)[..., None, :]  # (b or 1, 1, 1, U / 32)
            largest = merge(largest, reduce(score.where(live, -torch.inf), -1))
            total = total + score.where(live, 0).sum(-1)
        drawn = drawn.clamp(min=1)
        return (largest if largest_less_mean else largest - drawn.to(query.dtype).log()) - total / drawn

    def _measure_by_head(self, query: Tensor, key: Tensor, key_mask: Tensor | None, u: Tensor) -> Tensor:
        b, h, n, _ = query.shape
        M = torch.full((b, h, n), -torch.inf, dtype=query.dtype)
        for i, j in itertools.product(range(b), range(h)):
            keys = key[i, j] if key_mask is None else key[i, j, key_mask[i, 0]]  # (m, p)
            size = int(self.chosen(torch.tensor(len(keys))))
            numbers, rank, step = as_bits(u[i, j]), torch.arange(size), max(1, SCORES // max(1, size))
            for part in (slice(start, start + step) for start in range(0, n if size else 0, step)):
                number = numbers[part]
                index = _draw_keys_32(number, rank, len(keys)) if size < len(keys) else rank.expand(len(number), size)
                score = _products(query[i, j, part], keys, index)  # (n', U)
                largest = score.amax(-1) if self.sparsity == "max_mean" else score.logsumexp(-1) - math.log(size)
                M[i, j, part] = largest - score.mean(-1)
        return M

    def chosen(self, m: Tensor) -> Tensor:
        """Return how many of m tokens are chosen: `budget` or ceil(factor ln m), at least 1 and at most m."""
        if self.factor is None:
            return m.clamp(max=self.budget)
        return (self.factor * m.clamp(min=1).log()).ceil().clamp(min=1).long().minimum(m)

    def most(self, n: int) -> int:
        """Return a bound for `chosen` of up to n tokens; with a factor there is one to spare for rounding."""
        return min(n, self.budget if self.factor is None else math.ceil(self.factor * math.log(n)) + 1)


def _products(query: Tensor, key: Tensor, index: Tensor) -> Tensor:
    """q_i . k_j for the keys j of row i of the index, as a sparse matrix: (n, p), (m, p), (n, U) -> (n, U)."""
    _accept_sparse()
    (n, U), zeros = index.shape, query.new_zeros(index.numel())
    first = torch.arange(0, n * U + 1, U)
    pattern = torch.sparse_csr_tensor(first, index.flatten(), zeros, (n, len(key)), check_invariants=False)
    return cast(Tensor, torch.sparse.sampled_addmm(pattern, query, key.mT).values().view_as(index))


@functools.cache
def _accept_sparse() -> None:
    """Silence the warning that torch gives with the first sparse matrix of a process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.eye(1).to_sparse_csr()


def _draw_keys_32(number: Tensor, rank: Tensor, m: int) -> Tensor:
    """Compute `draw_keys` for less than all of m keys, with `scramble` in 32 bits, in place: (n,), (k,) -> (n, k)."""
    bits = number.int()[:, None] + rank.int()  # these wrap around, as does all below
    for multiplier in MULTIPLIERS:
        bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(multiplier)
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))
    return bits.long().bitwise_and_(0xFFFFFFFF).mul_(m).bitwise_right_shift_(32)


def as_bits(u: Tensor) -> Tensor:
    return scramble((u * 2**25).long())  # 32 for each uniform number


def draw_keys(number: Tensor, rank: Tensor, m: Tensor, drawn: Tensor) -> Tensor:
    """Draw keys for each query, independent and uniform in [0, m): (b, h, n), (k,) -> (b, h, n, k).

    A hash of the query's number and the rank: neither n nor U changes a draw. If all keys are drawn, rank r is key r.
    """
    bits, m = scramble(number[..., None] + rank), m[..., None]  # (b, h, n, k), 32 bits each
    return torch.where(drawn[..., None] < m, (bits * m) >> 32, rank)
