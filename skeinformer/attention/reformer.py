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

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.inputs import Inputs, clear_padding, default_scale
from skeinformer.kernels.choice import known, statistics_dtype
from skeinformer.kernels.rounds import Chunks, attend_rounds, pick
from skeinformer.noise import Rand, normal
from skeinformer.registry import check_count

COLUMNS = 64  # of R, at most: for more than twice as many buckets, a bucket is a pair of hashes
ITSELF = -1e9  # the score of a token with itself: it counts where no other is seen in any round


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
    buckets = _hash(rotated, bucket, first)
    if known(second == 1):
        return buckets
    return buckets + first[..., 0] * _hash(rotated, bucket - first, second)


def _hash(rotated: Tensor, bucket: Tensor, count: Tensor) -> Tensor:
    """argmax([x R; -x R]) over the columns with 0 <= bucket < count: that of the largest |x R|, and its sign."""
    best = rotated.abs().masked_fill_((bucket < 0) | (bucket >= count), -1).argmax(-1, keepdim=True)
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
    source = pick(order, slot.clamp(0, n - 1)[..., None, None].expand(-1, -1, -1, h, rounds))
    position = torch.arange(n, device=m.device).expand_as(order)
    return Chunks(source, live, torch.empty_like(order).scatter_(-1, order, position), before)


@torch.no_grad()
def log_weights(
    buckets: Tensor, chunks: Chunks, dtype: torch.dtype, *, across_buckets: bool, count_duplicates: bool
) -> Tensor:
    """What is added to the scores of the queries of `token` with the keys of `source`: (b, nc, h r or 1, C, 2 C).

    -log N_ij, but -inf for keys that are not real or in another bucket, and ITSELF for the query's own key. Time and
    memory O(n r C) for every round that a round is compared with.
    """
    if across_buckets:
        buckets = torch.zeros_like(buckets)
        query, key = torch.ones_like(chunks.live, dtype=torch.long), chunks.live.long()
        query, key = query[:, :, None], key[:, :, None]  # (b, nc, 1, 2 C)
    else:
        query = by_round(pick(buckets, chunks.source))  # (b, nc, h r, 2 C)
        key = query.where(chunks.live[:, :, None], -1)
    size, rounds = chunks.token.shape[2], buckets.shape[2]
    unseen = query[..., :size, None] != key[..., None, :]  # (b, nc, h r or 1, C, 2 C)
    if count_duplicates or rounds == 1:
        bias = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
    else:
        others = count_others(buckets, chunks).to(dtype)
        bias = others.mul_(-math.log(2)) if rounds == 2 else others.log1p_().neg_()
    bias = bias.masked_fill_(unseen, -torch.inf)
    bias.diagonal(0, -2, -1).clamp_(max=ITSELF)  # a token has the same slot of its chunk as query and as key
    return bias


def count_others(buckets: Tensor, chunks: Chunks) -> Tensor:
    """N_ij - 1, how many other rounds find each key of `source` for each query of `token`: (b, nc, h r, C, 2 C).

    `buckets` (b, h, r, n) equal means that they do not matter.
    """
    (nc, size), rounds = chunks.token.shape[1:3], buckets.shape[2]
    chunk = chunks.place // size  # (b, h, r, n)
    before = chunks.before[:, None, None].expand(*chunk.shape[:3], -1).gather(-1, chunk)
    here = buckets * nc + chunk
    back = (buckets * nc + before).where(before >= 0, -1)
    found = torch.zeros((), dtype=torch.int16, device=buckets.device)
    for shift in range(1, rounds):  # every round beside the one `shift` after it
        key = by_round(pick(here.roll(-shift, 2), chunks.source))[..., None, :]  # (b, nc, h r, 1, 2 C)
        query = by_round(pick(back.roll(-shift, 2), chunks.token))[..., None]  # (b, nc, h r, C, 1)
        found = found + ((key[..., :size].mT == key) | (query == key))
    return found


def by_round(x: Tensor) -> Tensor:
    """(b, nc, k, h, r) -> (b, nc, h r, k)."""
    return x.flatten(3).mT.contiguous()


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
    that finds it. Time O(n r C p) after sorting, and O(n r C) weights for each head in memory.
    """
    dtype = statistics_dtype(query)
    chunks = sort_tokens(buckets, key_mask, chunk_size)
    bias = log_weights(buckets, chunks, dtype, across_buckets=across_buckets, count_duplicates=count_duplicates)
    norm = torch.linalg.vector_norm(key.to(dtype), dim=-1, keepdim=True)
    inputs = (query.to(dtype), key.to(dtype) / norm.where(norm > 0, 1), value.to(dtype))
    return attend_rounds(*inputs, chunks, bias, scale).to(query.dtype)


class ReformerNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    rotations: Tensor  # (b, h, columns, num_hashes, p): normal numbers, the columns of R


class ReformerOptions(NamedTuple):
    """What Reformer is told beside its inputs; None is what the budget sets."""

    budget: int = 256
    num_hashes: int = 2
    chunk_size: int | None = None
    across_buckets: bool = False
    count_duplicates: bool = False
    scale: float | None = None


class Reformer(Attention):
    """LSH attention with shared queries and keys: pass the same tensor as query and as key.

    Kitaev et al. (2020). s is 1/sqrt(p), their Eq. (1); their code has s = 1. `chunk_size` is budget / (2 num_hashes),
    so that a query is scored with `budget` keys: 2 rounds of 2 chunks of 64 at a budget of 256; those in its buckets
    count. Chunks and buckets are of real tokens. Exact, as shared-QK attention, up to 2 chunk_size real tokens. By
    default as in the paper; both options as in most other code: `across_buckets` counts every key of the two chunks,
    `count_duplicates` counts a key once for every round that finds it.
    Time O(n (d + c) p) with c = min(n / chunk_size, 64) for each hash, memory O(n (d + p)).
    """

    Options = ReformerOptions
    sizes = ("chunk_size",)

    @staticmethod
    def complete(options: ReformerOptions) -> ReformerOptions:
        check_count("num_hashes", options.num_hashes)
        size = options.chunk_size
        size = max(1, options.budget // (2 * options.num_hashes)) if size is None else size
        check_count("chunk_size", size)
        return options._replace(chunk_size=size)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if not same_tensor(query, key):
            raise ValueError(
                "Reformer shares queries and keys, but key is another tensor than query; tie the two projections and "
                "pass the queries twice: attention(query, query, value) (in a compiled graph, the same object)"
            )

    @staticmethod
    def draw(query: Tensor, key: Tensor, rand: Rand, options: ReformerOptions) -> ReformerNoise:
        assert options.chunk_size is not None
        return ReformerNoise(rand(num_columns(query.shape[2], options.chunk_size), options.num_hashes, query.shape[3]))

    @staticmethod
    def compute(inputs: Inputs, noise: tuple[Tensor], options: ReformerOptions) -> tuple[Tensor, Trace]:
        query, key, value, key_mask, _ = inputs
        dtype, n, size = statistics_dtype(query), query.shape[2], options.chunk_size
        assert size is not None
        m = torch.full((len(query), 1), n, device=query.device) if key_mask is None else key_mask.sum(-1)
        buckets = hash_tokens(key.to(dtype), normal(noise[0]).to(dtype), m, size)
        output = lsh_attention(
            query,
            key,
            value,
            key_mask,
            buckets,
            size,
            default_scale(query, options.scale),
            across_buckets=options.across_buckets,
            count_duplicates=options.count_duplicates,
        )
        return clear_padding(output, key_mask), Trace()


def same_tensor(query: Tensor, key: Tensor) -> bool:
    """Whether both are one tensor, or (outside graphs and transforms) views of the same memory, laid out alike."""
    if key is query:
        return True
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if key.shape != query.shape or key.stride() != query.stride():
        return False
    return key.dtype == query.dtype and key.device == query.device and key.data_ptr() == query.data_ptr()
