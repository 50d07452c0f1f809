"""Reformer: attention within buckets of a locality-sensitive hash, with shared queries and keys (Kitaev et al. 2020).

Keys are queries of unit length, k_j = q_j / |q_j|, and a token attends to itself only where it sees nothing else. What
is approximated is this shared-QK attention, softmax_{j != i}(s q_i . k_j) v_j, not softmax(s Q Q^T) V.

In each of r rounds tokens are hashed to buckets, h(x) = argmax([x R; -x R]) with a random R, sorted by bucket and then
by position, and cut into chunks. Query i sees P_i^(r): the tokens of its bucket in its chunk and in the one before it;
the first chunk looks back to the last. Both directions of time are seen, as there is no causal mask, but no chunk looks
ahead, as published. With z the log of a sum of exponentials the rounds give (appendix A of the paper)

    o_i = sum_r exp(z(i, P_i^(r)) - z(i, P_i)) o_i^(r),     scores in round r:  s q_i . k_j - log N_ij,

where N_ij counts the rounds that find j, so that o_i is attention to the union P_i, with every key counted once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import Attention, clear_padding, default_scale
from skeinformer.attention.block_sparse import take
from skeinformer.attention.virtual_keys import statistics_dtype
from skeinformer.noise import Rand, normal
from skeinformer.registry import check_count

COLUMNS = 64  # of R, at most: for more than twice as many buckets, a bucket is a pair of hashes
ITSELF = -1e9  # the score of a token with itself: it counts where no other is seen in any round


class Chunks(NamedTuple):
    """Every round's tokens, sorted by bucket and cut into nc chunks of C slots."""

    token: Tensor  # (b, h, r, nc, C) the token in each slot; any token where the slot is empty
    source: Tensor  # (b, h, r, nc, 2 C) the tokens of the chunk and of the one before it
    live: Tensor  # (b, 1, 1, nc, 2 C) whether the slot of `source` holds a real key
    place: Tensor  # (b, h, r, n) the slot of each token, chunk * C + offset
    before: Tensor  # (b, nc) the chunk before each; -1 where there is none


def num_buckets(m: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """How many buckets for m tokens: their number for the first hash, and for the second, 1 where one hash will do.

    Twice as many as chunks, so that a bucket fills half a chunk on average (section 2 of the paper); one bucket where a
    chunk and the one before it hold all tokens. With two hashes there are at most COLUMNS^2.
    """
    total = torch.where(m <= 2 * chunk_size, 1, -(-m // chunk_size) * 2)
    root = ((total.sqrt() / 2).ceil().long() * 2).clamp(max=COLUMNS)
    single = total <= 2 * COLUMNS
    return total.where(single, root), torch.where(single, 1, root)


def num_columns(n: int, chunk_size: int) -> int:
    """The columns of R that up to n tokens need: half as many as buckets, for both hashes together."""
    return min(-(-n // chunk_size), COLUMNS)


@torch.no_grad()
def hash_tokens(x: Tensor, rotations: Tensor, m: Tensor, chunk_size: int) -> Tensor:
    """The bucket of every token in every round: (b, h, n, p), (b, h, columns, r, p), (b, 1) -> (b, h, r, n).

    The second hash takes the columns after those of the first. Time O(n r p) for every column.
    """
    rotated = x[:, :, None] @ rotations.permute(0, 1, 3, 4, 2)  # (b, h, r, n, columns)
    bucket = 2 * torch.arange(rotated.shape[-1], device=x.device)
    first, second = (count[..., None, None, None] for count in num_buckets(m, chunk_size))  # (b, 1, 1, 1, 1)
    return _hash(rotated, bucket, first) + first[..., 0] * _hash(rotated, bucket - first, second)


def _hash(rotated: Tensor, bucket: Tensor, count: Tensor) -> Tensor:
    """argmax([x R; -x R]) over the columns with 0 <= bucket < count: that of the largest |x R|, and its sign."""
    best = rotated.abs().masked_fill((bucket < 0) | (bucket >= count), -1).argmax(-1, keepdim=True)
    negative = rotated.gather(-1, best) < 0
    index = bucket.expand(rotated.shape).gather(-1, best) // 2 + negative * (count // 2)
    return index.where(count > 1, 0)[..., 0]


@torch.no_grad()
def sort_tokens(buckets: Tensor, key_mask: Tensor | None, chunk_size: int) -> Chunks:
    """Real tokens by bucket and then by position, in chunks, and after them the padding. O(n log n)."""
    b, h, rounds, n = buckets.shape
    size = min(chunk_size, n)
    m = torch.full((b, 1), n, device=buckets.device)
    sort_key = buckets
    if key_mask is not None:
        m = key_mask.sum(-1)
        sort_key = buckets + (~key_mask)[:, :, None] * (1 << 40)
    order = torch.argsort(sort_key, stable=True)  # (b, h, r, n)
    chunk = torch.arange(-(-n // size), device=m.device)
    last = -(-m // size) - 1  # (b, 1)
    before = (chunk - 1).where(chunk > 0, last.where(last > 0, -1))  # (b, nc)
    slot = torch.stack([chunk.expand_as(before), before], -1)[..., None] * size + torch.arange(size, device=m.device)
    slot = slot.flatten(2)  # (b, nc, 2 C): the chunk, and the one before it
    live = (slot >= 0) & (slot < m[..., None])
    source = take(order.flatten(1, 2), slot.clamp(0, n - 1)[:, None]).view(b, h, rounds, *slot.shape[1:])
    return Chunks(source[..., :size], source, live[:, None, None], order.argsort(-1), before)


@torch.no_grad()
def count_rounds(buckets: Tensor, chunks: Chunks) -> Tensor:
    """N_ij, how many rounds find each key of `source` for each query of `token`: (b, h, r, nc, C, 2 C).

    `buckets` (b, h, r, n) equal means that they do not matter. Time and memory O(n r C) for every round.
    """
    nc, size = chunks.token.shape[3:]
    chunk = chunks.place // size  # (b, h, r, n)
    before = chunks.before[:, None, None].expand(*chunk.shape[:3], -1).gather(-1, chunk)
    found = torch.zeros((), dtype=torch.int16, device=buckets.device)
    for own_bucket, own_chunk, one_before in zip(buckets.unbind(2), chunk.unbind(2), before.unbind(2), strict=True):
        at = take(own_bucket * nc + own_chunk, chunks.source)[..., None, :]  # (b, h, r, nc, 1, 2 C)
        here = take(own_bucket * nc + own_chunk, chunks.token)[..., None]  # (b, h, r, nc, C, 1)
        back = take((own_bucket * nc + one_before).where(one_before >= 0, -1), chunks.token)[..., None]
        found = found + ((at == here) | (at == back))
    return found


def lsh_attention(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n, p)
    value: Tensor,  # (b, h, n, p_v)
    key_mask: Tensor | None,
    buckets: Tensor,  # (b, h, r, n)
    chunk_size: int,
    scale: float,
    *,
    across_buckets: bool = False,
    count_duplicates: bool = False,
) -> Tensor:
    """The formula above for given buckets, with k_j the keys scaled to unit length: (b, h, n, p_v).

    Without `across_buckets` a query sees only its own bucket. With `count_duplicates` a key counts once for every round
    that finds it. Time O(n r C p) after sorting, and O(n r C) scores for each head in memory.
    """
    dtype = statistics_dtype(query)
    b, h, rounds, n = buckets.shape
    chunks = sort_tokens(buckets, key_mask, chunk_size)
    buckets = torch.zeros_like(buckets) if across_buckets else buckets
    norm = torch.linalg.vector_norm(key.to(dtype), dim=-1, keepdim=True)
    unit = key.to(dtype) / norm.where(norm > 0, 1)
    q = take(query.to(dtype), chunks.token)  # (b, h, r, nc, C, p)
    k, v = take(unit, chunks.source), take(value.to(dtype), chunks.source)  # (b, h, r, nc, 2 C, p)
    by_round = buckets.flatten(1, 2)  # (b, h r, n)
    own = take(by_round, chunks.token.flatten(1, 2)).view_as(chunks.token)  # (b, h, r, nc, C)
    other = take(by_round, chunks.source.flatten(1, 2)).view_as(chunks.source)  # (b, h, r, nc, 2 C)
    seen = (own[..., None] == other[..., None, :]) & chunks.live[..., None, :]  # (b, h, r, nc, C, 2 C)
    scores = scale * (q @ k.mT)
    if not count_duplicates and rounds > 1:
        scores = scores - count_rounds(buckets, chunks).clamp(min=1).to(dtype).log()
    scores = scores.masked_fill(chunks.token[..., None] == chunks.source[..., None, :], ITSELF)
    scores = scores.masked_fill(~seen, torch.finfo(dtype).min)
    weights = scores.softmax(-1)
    # the log of a row's sum, read off its largest weight: logsumexp is slow on masked scores
    largest, at = scores.max(-1, keepdim=True)
    z = largest - weights.gather(-1, at).log()  # (b, h, r, nc, C, 1)
    output = weights.masked_fill(~seen, 0) @ v  # (b, h, r, nc, C, p_v)
    place = chunks.place.flatten(1, 2)  # (b, h r, n)
    output = take(output.flatten(3, 4).flatten(1, 2), place).reshape(b, h, rounds, n, -1)
    z = take(z.flatten(3, 4).flatten(1, 2), place).reshape(b, h, rounds, n, 1)
    return (z.softmax(2) * output).sum(2).to(query.dtype)


class ReformerNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    rotations: Tensor  # (b, h, columns, num_hashes, p): normal numbers, the columns of R


class Reformer(Attention):
    """LSH attention with shared queries and keys: pass the same tensor as query and as key.

    Kitaev et al. (2020). s is 1/sqrt(p), their Eq. (1); their code has s = 1. `chunk_size` is budget / (2 num_hashes),
    so that a query is scored with `budget` keys: 2 rounds of 2 chunks of 64 at a budget of 256; those in its buckets
    count. Chunks and buckets are of real tokens. Exact, as shared-QK attention, up to 2 chunk_size real tokens. By
    default as in the paper; both options as in most other code: `across_buckets` counts every key of the two chunks,
    `count_duplicates` counts a key once for every round that finds it.
    Time O(n (d + c) p) with c = min(n / chunk_size, 64) for each hash, memory O(n (d + p)).
    """

    def __init__(
        self,
        *,
        head_dim: int,
        max_len: int | None = None,
        budget: int = 256,
        seed: int | None = None,
        num_hashes: int = 2,
        chunk_size: int | None = None,
        across_buckets: bool = False,
        count_duplicates: bool = False,
        scale: float | None = None,
    ) -> None:
        super().__init__(head_dim=head_dim, max_len=max_len, budget=budget, seed=seed)
        check_count("num_hashes", num_hashes)
        self.num_hashes = num_hashes
        self.chunk_size = max(1, budget // (2 * num_hashes)) if chunk_size is None else chunk_size
        check_count("chunk_size", self.chunk_size)
        self.across_buckets = across_buckets
        self.count_duplicates = count_duplicates
        self.scale = scale

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if not same_tensor(query, key):
            raise ValueError(
                "Reformer shares queries and keys, but key is another tensor than query; tie the two projections and "
                "pass the queries twice: attention(query, query, value) (in a compiled graph, the same object)"
            )

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> ReformerNoise:
        return ReformerNoise(rand(num_columns(query.shape[2], self.chunk_size), self.num_hashes, query.shape[3]))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        noise: tuple[Tensor],
    ) -> Tensor:
        dtype, n = statistics_dtype(query), query.shape[2]
        m = torch.full((len(query), 1), n, device=query.device) if key_mask is None else key_mask.sum(-1)
        rotations = normal(noise[0]).to(dtype)
        buckets = hash_tokens(key.to(dtype), rotations, m, self.chunk_size)
        output = lsh_attention(
            query,
            key,
            value,
            key_mask,
            buckets,
            self.chunk_size,
            default_scale(query, self.scale),
            across_buckets=self.across_buckets,
            count_duplicates=self.count_duplicates,
        )
        return clear_padding(output, key_mask)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, num_hashes={self.num_hashes}, chunk_size={self.chunk_size}"


def same_tensor(query: Tensor, key: Tensor) -> bool:
    """Whether both are one tensor, or (outside compiled graphs) two views of the same memory in the same layout."""
    if key is query:
        return True
    if torch.compiler.is_compiling() or key.shape != query.shape or key.stride() != query.stride():
        return False
    return key.dtype == query.dtype and key.device == query.device and key.data_ptr() == query.data_ptr()
