"""How far the scores of a query with keys drawn for it are from flat, without a matrix of them all."""

import functools
import itertools
import math
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from skeinformer.kernels.choice import fast_form, statistics_dtype
from skeinformer.noise import MULTIPLIERS, scramble

CHUNKS = 32  # the drawn keys are gathered in so many parts: all at once they would be n x U x p numbers
SCORES = 1 << 17  # on a CPU so many are computed at a time: their indices stay in the cache


def flatness_by_chunks(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    key_mask: Tensor | None,  # (b, 1, n_k)
    u: Tensor,  # (b, h, n), uniform numbers
    m: Tensor,  # (b or 1, 1, 1), how many keys there are to draw from
    drawn: Tensor,  # (b or 1, 1, 1), how many are drawn for a query
    most: int,  # a bound for those
    largest_less_mean: bool,
    scale: float,
) -> Tensor:
    """`flatness` with the drawn keys gathered in parts."""
    (b, h, n_k, p), n, dtype = key.shape, query.shape[-2], statistics_dtype(query)
    reduce: Callable[[Tensor, int], Tensor] = torch.amax if largest_less_mean else torch.logsumexp
    merge = torch.maximum if largest_less_mean else torch.logaddexp
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
    for rank in torch.arange(most, device=key.device).chunk(1 if fused else CHUNKS):
        index = draw_keys(number, rank, m, drawn).flatten(-2)  # (b, h, n * U / 32)
        drawn_keys = rows.index_select(0, place.gather(-1, index).flatten()).view(b, h, n, len(rank), p)
        score = (drawn_keys * scaled).sum(-1) if fused else (drawn_keys @ scaled.mT)[..., 0]  # (b, h, n, U / 32)
        live = (rank < drawn)[..., None, :]  # (b or 1, 1, 1, U / 32)
        largest = merge(largest, reduce(score.where(live, -torch.inf), -1))
        total = total + score.where(live, 0).sum(-1)
    drawn = drawn.clamp(min=1)
    mean = total / drawn
    return largest - mean if largest_less_mean else largest - drawn.to(dtype).log() - mean


@fast_form(flatness_by_chunks)
def flatness(
    query: Tensor,
    key: Tensor,
    key_mask: Tensor | None,
    u: Tensor,
    m: Tensor,
    drawn: Tensor,
    most: int,
    largest_less_mean: bool,
    scale: float,
) -> Tensor:
    """The largest score less the mean score, or the log of the arithmetic over the geometric mean of a: (b, h, n).

    Over the keys that are drawn for each query, -inf where there is none. Head by head: no key is copied, and nothing
    is drawn that does not count.
    """
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
            largest = score.amax(-1) if largest_less_mean else score.logsumexp(-1) - math.log(size)
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
