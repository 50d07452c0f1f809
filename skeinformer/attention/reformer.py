"""Reformer: attention within buckets of a locality-sensitive hash, with shared queries and keys (Kitaev et al. 2020).

Keys are queries of unit length, k_j = q_j / |q_j|, and a token attends to itself only where it sees nothing else. This
shared-QK attention, softmax_{j != i}(s q_i . k_j) v_j, is what is approximated, not softmax(s Q Q^T) V. In each of r
rounds tokens are hashed to buckets, h(x) = argmax([x R; -x R]) with a random R, sorted by bucket and then by position,
and cut into chunks. Query i sees P_i^(r): the tokens of its bucket in its chunk and in the one before it (for the first
chunk, the last). With z the log of a sum of exponentials the rounds give (appendix A of the paper)

    o_i = sum_r exp(z(i, P_i^(r)) - z(i, P_i)) o_i^(r),     scores in round r:  s q_i . k_j - log N_ij,

where N_ij counts the rounds that find j, so that o_i is attention to the union P_i, with every key counted once.
"""

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.attention.base import Method, Trace
from skeinformer.attention.inputs import Inputs, Noise, clear_padding
from skeinformer.attention.rows import count_real
from skeinformer.checks import check_count
from skeinformer.kernels.choice import all_true, backward_once, is_captured, is_eager_cpu, statistics_dtype
from skeinformer.noise import Rand, normal

COLUMNS = 64  # of R, at most: for more than twice as many buckets, a bucket is a pair of hashes
ITSELF = -1e9  # the score of a token with itself: it counts where no other is seen in any round


class Reformer(Method):
    """LSH attention with shared queries and keys: pass the same tensor as query and as key.

    Kitaev et al. (2020). s is 1/sqrt(p), their Eq. (1); their code has s = 1. `chunk_size` is budget / (2 num_hashes),
    so that a query is scored with `budget` keys; those in its buckets count. Chunks and buckets are of real tokens.
    Exact, as shared-QK attention, up to 2 chunk_size real tokens. By default as in the paper; both options as in most
    other code: `across_buckets` counts every key of the two chunks, `count_duplicates` counts a key once for every
    round that finds it. Time O(n (d + c) p) with c = min(n / chunk_size, 64) for each hash, memory O(n (d + p)).
    """

    budget: int = 256
    num_hashes: int = 2
    chunk_size: int | None = None
    across_buckets: bool = False
    count_duplicates: bool = False
    size_options: ClassVar[tuple[str, ...]] = ("chunk_size",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_hashes", self.num_hashes)
        check_count("chunk_size", self.chunk)

    @property
    def chunk(self) -> int:
        return max(1, self.budget // (2 * self.num_hashes)) if self.chunk_size is None else self.chunk_size

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        def memory(x: Tensor) -> object:
            return x.shape, x.stride(), x.dtype, x.device, x.data_ptr()

        # outside of graphs and transforms a view of the same memory, laid out alike, is the same tensor
        if key is not query and (is_captured() or memory(key) != memory(query)):
            fix = "tie the two projections and pass the queries twice: attention(query, query, value)"
            raise ValueError(f"Reformer shares queries and keys, but key is another tensor than query; {fix}")

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Draw (b, h, columns, num_hashes, p) numbers: as normal numbers the columns of R."""
        return (rand(num_columns(query.shape[2], self.chunk), self.num_hashes, query.shape[3]),)

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        key, key_mask = inputs.key, inputs.key_mask
        dtype, m = statistics_dtype(key), count_real(key, key_mask).expand(len(key), 1, 1)[..., 0]  # (b, 1)
        buckets = hash_tokens(key.to(dtype), normal(noise[0]).to(dtype), m, self.chunk)
        return clear_padding(self.attend_in_buckets(inputs, buckets), key_mask), Trace()

    def attend_in_buckets(self, inputs: Inputs, buckets: Tensor) -> Tensor:
        """Compute the formula above for buckets (b, h, r, n): (b, h, n, p_v). Memory O(n r C) for each head."""
        query, key, value, key_mask = inputs[:4]
        chunks, dtype = sort_tokens(buckets, key_mask, self.chunk), statistics_dtype(query)
        bias = self._log_weights(buckets, chunks, dtype).flatten(0, 1)  # (b nc, h r or 1, C, 2 C)
        norm = torch.linalg.vector_norm(key.to(dtype), dim=-1, keepdim=True)
        q, k, v = query.to(dtype), key.to(dtype) / norm.where(norm > 0, 1), value.to(dtype)
        if not is_eager_cpu(query):
            return _attend_rounds(q, k, v, chunks, bias, inputs.scale).to(query.dtype)
        width = max(q.shape[-1], v.shape[-1])  # the fused kernel, twice as fast, wants one width
        q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
        output: Tensor = _FusedRounds.apply(q, k, v, chunks, bias, inputs.scale)  # type: ignore[no-untyped-call]
        return output[..., : value.shape[-1]].to(query.dtype)

    @torch.no_grad()
    def _log_weights(self, buckets: Tensor, chunks: "Chunks", dtype: torch.dtype) -> Tensor:
        """Return -log N_ij for `token` and `source`, (b, nc, h r or 1, C, 2 C): -inf for keys that do not count."""
        if self.across_buckets:
            buckets = torch.zeros_like(buckets)
            query = torch.zeros_like(chunks.live, dtype=torch.long)[:, :, None]  # (b, nc, 1, 2 C)
        else:
            query = _by_round(pick(buckets, chunks.source))  # (b, nc, h r, 2 C)
        key = query.where(chunks.live[:, :, None], -1)
        size, rounds = chunks.token.shape[2], buckets.shape[2]
        unseen = query[..., :size, None] != key[..., None, :]  # (b, nc, h r or 1, C, 2 C)
        bias = torch.zeros(unseen.shape, dtype=dtype, device=unseen.device)
        if not self.count_duplicates and rounds > 1:
            others = count_others(buckets, chunks).to(dtype)
            bias = others.mul_(-math.log(2)) if rounds == 2 else others.log1p_().neg_()
        bias = bias.masked_fill_(unseen, -torch.inf)
        bias.diagonal(0, -2, -1).clamp_(max=ITSELF)  # a token has the same slot of its chunk as query and as key
        return bias


def num_buckets(m: Tensor, chunk_size: int) -> tuple[Tensor, Tensor]:
    """Return the number of buckets of the first hash for m tokens, and of the second: 1 where one hash is enough."""
    # two for each chunk (section 2 of the paper), so that a bucket fills half of one; at most COLUMNS^2
    total = torch.where(m <= 2 * chunk_size, 1, -(-m // chunk_size) * 2)
    root = ((total.sqrt() / 2).ceil().long() * 2).clamp(max=COLUMNS)
    single = total <= 2 * COLUMNS
    return total.where(single, root), root.where(~single, 1)


def num_columns(n: int, chunk_size: int) -> int:
    """Return the columns of R that up to n tokens need: half as many as buckets, for both hashes together."""
    return min(-(-n // chunk_size), COLUMNS)


@torch.no_grad()
def hash_tokens(x: Tensor, rotations: Tensor, m: Tensor, chunk_size: int) -> Tensor:
    """Return each token's bucket in every round: (b, h, n, p), (b, h, columns, r, p), (b, 1) -> (b, h, r, n)."""
    rotated = x[:, :, None] @ rotations.permute(0, 1, 3, 4, 2)  # (b, h, r, n, columns)
    bucket = 2 * torch.arange(rotated.shape[-1], device=x.device)
    first, second = (count[..., None, None, None] for count in num_buckets(m, chunk_size))  # (b, 1, 1, 1, 1)
    buckets = _hash(rotated, bucket, first)
    return buckets if all_true(second == 1) else buckets + first[..., 0] * _hash(rotated, bucket - first, second)


def _hash(rotated: Tensor, bucket: Tensor, count: Tensor) -> Tensor:
    """argmax([x R; -x R]) over the columns with 0 <= bucket < count: that of the largest |x R|, and its sign."""
    best = rotated.abs().masked_fill_((bucket < 0) | (bucket >= count), -1).argmax(-1, keepdim=True)
    negative = rotated.gather(-1, best) < 0
    index = bucket.expand(rotated.shape).gather(-1, best) // 2 + negative * (count // 2)
    return index.where(count > 1, 0)[..., 0]


class Chunks(NamedTuple):
    """Every round's tokens, sorted by bucket and cut into nc chunks of C slots."""

    source: Tensor  # (b, nc, 2 C, h, r) the tokens of the chunk and of the one before it; any where the slot is empty
    live: Tensor  # (b, nc, 2 C) whether the slot of `source` holds a real key
    place: Tensor  # (b, h, r, n) the slot of each token, chunk * C + offset
    before: Tensor  # (b, nc) the chunk before each; -1 where there is none

    @property
    def token(self) -> Tensor:
        return self.source[:, :, : self.source.shape[2] // 2]  # (b, nc, C, h, r), the chunk itself


def pick(x: Tensor, at: Tensor) -> Tensor:
    """x[i, j, s, at[i, ..., j, s]]: (b, h, r or 1, n, ...), (b, nc, k, h, r) -> (b, nc, k, h, r, ...)."""
    b, h, rounds, n = x.shape[:4]  # one index_select is many times faster than a gather with an expanded index
    first = n * torch.arange(b * h * rounds, device=x.device).view(b, 1, 1, h, rounds)
    return x.flatten(0, 3).index_select(0, (at + first).flatten()).view(*at.shape, *x.shape[4:])


def to_slots(x: Tensor, at: Tensor) -> Tensor:
    """Read the tokens of slots: (b, h, n, p), (b, nc, k, h, r) -> (b nc, h r, k, p)."""
    return pick(x[:, :, None], at).flatten(3, 4).flatten(0, 1).transpose(1, 2)


def to_tokens(x: Tensor, chunks: Chunks) -> Tensor:
    """Put slots back in the order of tokens: (b nc, h r, C, p) -> (b, h, r, n, p)."""
    b, nc, size, h, rounds = chunks.token.shape
    first = nc * size * torch.arange(b, device=x.device).view(b, 1, 1, 1)
    row = (first + chunks.place) * (h * rounds) + torch.arange(h * rounds, device=x.device).view(h, rounds, 1)
    return x.transpose(1, 2).reshape(-1, x.shape[-1]).index_select(0, row.flatten()).view(*row.shape, -1)


@torch.no_grad()
def sort_tokens(buckets: Tensor, key_mask: Tensor | None, chunk_size: int) -> Chunks:
    """Sort real tokens by bucket and then by position, and cut them into chunks; padding comes last. O(n log n)."""
    b, h, rounds, n = buckets.shape
    size = min(chunk_size, n)
    m = count_real(buckets.mT, key_mask).expand(b, 1, 1)[..., 0]  # (b, 1)
    sort_key = buckets if key_mask is None else buckets + (~key_mask)[:, :, None] * (1 << 40)
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


def count_others(buckets: Tensor, chunks: Chunks) -> Tensor:
    """Count the other rounds in which a query of `token` finds a key of `source`: (b, nc, h r, C, 2 C)."""
    (nc, size), rounds = chunks.token.shape[1:3], buckets.shape[2]
    chunk = chunks.place // size  # (b, h, r, n)
    before = chunks.before[:, None, None].expand(*chunk.shape[:3], -1).gather(-1, chunk)
    here, back = buckets * nc + chunk, (buckets * nc + before).where(before >= 0, -1)
    count = torch.zeros((), dtype=torch.int16, device=buckets.device)
    for shift in range(1, rounds):  # every round and the one `shift` after it
        key = _by_round(pick(here.roll(-shift, 2), chunks.source))[..., None, :]  # (b, nc, h r, 1, 2 C)
        query = _by_round(pick(back.roll(-shift, 2), chunks.token))[..., None]  # (b, nc, h r, C, 1)
        count = count + ((key[..., :size].mT == key) | (query == key))
    return count


def _by_round(x: Tensor) -> Tensor:
    return x.flatten(3).mT.contiguous()  # (b, nc, k, h, r) -> (b, nc, h r, k)


def _attend_rounds(query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, bias: Tensor, scale: float) -> Tensor:
    """Attend within every chunk of every round, and merge the rounds: (b, h, n, p_v). O(n r C) scores in memory."""
    q, k, v = to_slots(query, chunks.token), to_slots(key, chunks.source), to_slots(value, chunks.source)
    scores = (scale * (q @ k.mT) + bias).clamp(min=torch.finfo(bias.dtype).min)
    z = scores.logsumexp(-1, keepdim=True)
    output = (scores - z).exp().masked_fill(bias == -torch.inf, 0) @ v  # (b nc, h r, C, p_v)
    return (to_tokens(z, chunks).softmax(2) * to_tokens(output, chunks)).sum(2)


class _FusedRounds(torch.autograd.Function):
    """`_attend_rounds` on the CPU's fused kernel, which forms no scores, for one width of queries and values.

    With w = exp(z(i, P_i^(r)) - z(i, P_i)), score_ij has the gradient w a_ij do_i . (v_j - o_i): the kernel takes o_i.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, bias: Tensor, scale: float
    ) -> Tensor:
        q, k, v = to_slots(query, chunks.token), to_slots(key, chunks.source), to_slots(value, chunks.source)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, z = kernel(q, k, v, 0.0, False, attn_mask=bias, scale=scale)  # (b nc, h r, C, p), (b nc, h r, C)
        w = to_tokens(z[..., None], chunks).softmax(2)  # (b, h, r, n, 1)
        output = (w * to_tokens(output, chunks)).sum(2)  # (b, h, n, p)
        ctx.save_for_backward(q, k, v, bias, z, w, output, *chunks)
        ctx.scale = scale
        return output

    @staticmethod
    @backward_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, z, w, output, *rest = ctx.saved_tensors
        chunks, (b, h, n, p) = Chunks(*rest), output.shape
        w = pick(w, chunks.token)  # (b, nc, C, h, r, 1)
        w.flatten(1, 2)[:, n:] = 0  # empty slots
        gradient = to_slots(gradient, chunks.token).mul_(w.flatten(3, 4).flatten(0, 1).transpose(1, 2))
        output = to_slots(output, chunks.token)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_q, d_k, d_v = kernel(gradient, q, k, v, output, z, 0.0, False, attn_mask=bias, scale=ctx.scale)
        row = (chunks.source + n * torch.arange(b * h).view(b, 1, 1, h, 1)).flatten()
        slots = (x.transpose(1, 2).reshape(-1, p) for x in (d_k, d_v))
        d_key, d_value = (x.new_zeros(b * h * n, p).index_add_(0, row, x).view(b, h, n, p) for x in slots)
        return to_tokens(d_q, chunks).sum(2), d_key, d_value, None, None, None
