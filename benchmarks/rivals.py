"""The strongest published samplers of attention, for comparison only: written again, behind our contract.

    WildCat         Schroder and Mackey (2026)  keys by randomly pivoted Cholesky, all others through Nystrom weights
    Thinformer      Carrell et al. (2025)       keys by kernel thinning, KH-Compress; equal weights
    HyperAttention  Han et al. (2024)           blocks of hashed and sorted tokens, and uniformly sampled columns

They are no methods of the library: METHODS here is a table of its own, which `--methods` takes as in
`benchmarks.rivals:wildcat`. Each is softmax attention over few weighted keys, on the fused
kernel, and the budget d is how many keys a query is scored with. Choices carry no gradient. Constants are those that
the authors publish; what is simplified stands in the docstrings.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.wildcat import WildCat, present
from skeinformer.attention.base import Method, Trace
from skeinformer.attention.block_sparse import take
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.table import Entry
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask
from skeinformer.checks import check_count, check_number
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.noise import Rand, normal

FAILURE = 0.5  # the failure probability of KH-Compress
SMALLEST_BUCKET = 8  # that is halved at once


class Slots(NamedTuple):
    """Real tokens in a given order, spread evenly over N slots: slot j has rank floor(j m / N), once for each rank."""

    token: Tensor  # (b, h, N) the token of each slot
    live: Tensor  # (b, h, N) False where the slot repeats the one before it
    order: Tensor  # (b, h, n) tokens by rank, padding last
    m: Tensor  # (b, h, 1)

    def of_rank(self, rank: Tensor) -> Tensor:
        """The slot of each rank."""
        total = self.token.shape[-1]
        return (-(-rank * total // self.m.clamp(min=1))).clamp(max=total - 1)


@torch.no_grad()
def fill_slots(order_by: Tensor, real: Tensor, total: int) -> Slots:
    """Tokens by `order_by`, (b, h, n) integers, in `total` slots, at least as many as tokens. O(n log n)."""
    m = real.sum(-1, keepdim=True)
    order = torch.argsort(order_by.masked_fill(~real, torch.iinfo(order_by.dtype).max), stable=True)
    at = torch.arange(total, device=real.device) * m  # (b, h, N)
    return Slots(order.gather(-1, at // total), at % total < m, order, m)


class ThinformerNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    coins: Tensor  # (b, h, d, 2^rounds): one for each pair, round after round


class Thinformer(Method):
    """softmax(s Q K_S^T + log w) V_S where S is thinned from all keys and values by KH-Compress, Carrell et al. (2025).

    Rounds of kernel halving leave one of each pair of neighbours, so that the sums over all and over those left differ
    little in the kernel exp(s k . k') (v . v' + max |V|^2): a self-balancing walk, pair after pair, within buckets that
    double as the points become half as many. The paper has n a power of 4 and d = 2^g sqrt(n), so that all weights are
    equal. For other sizes and for padding, real keys are spread over d 2^rounds slots, an empty slot loses to its
    neighbour, and w counts the keys behind a slot; the walk then stays unbiased. `log_odds` says how far the walk may
    drift before the choice is certain: by default the paper's, of failure probability 1/2; a smaller one, such as 0.5,
    has no guarantee and often a smaller error. Exact for d >= m.
    Time O(d^2 p log(n / d)) for thinning, in about 2 d steps, and O(n d p) for attention; memory O(d^2 + n p).
    """

    budget: int = 256
    log_odds: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.log_odds is not None and check_number("log_odds", self.log_odds, "a positive number") <= 0:
            raise ValueError(f"log_odds must be a positive number, got {self.log_odds}")

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> ThinformerNoise:
        """One uniform number for each pair of every round."""
        return ThinformerNoise(rand(self.budget, 2 ** num_rounds(key.shape[2], self.budget)))

    def attend(self, inputs: Inputs, noise: ThinformerNoise) -> tuple[Tensor, Trace]:
        """(b, h, n, p_v), by the formula above."""
        query, key, value, scale, d = inputs.query, inputs.key, inputs.value, inputs.scale, self.budget
        real, rounds = present(key, inputs.key_mask), num_rounds(key.shape[2], d)
        index, weight = thin(key, value, real, noise[0], d, rounds, scale, self.log_odds)
        return attend(query, VirtualKeys(take(key, index), take(value, index), weight.log()), scale), Trace()


def num_rounds(n: int, d: int) -> int:
    """How often n keys are halved until at most d are left."""
    return (-(-n // d) - 1).bit_length()


@torch.no_grad()
def thin(
    key: Tensor,
    value: Tensor,
    real: Tensor,
    coins: Tensor,
    d: int,
    rounds: int,
    scale: float,
    log_odds: float | None = None,
) -> tuple[Tensor, Tensor]:
    """KH-Compress: d of the keys, (b, h, d), and how many each stands for."""
    dtype = statistics_dtype(key)
    key, value = math.sqrt(scale) * key.to(dtype), value.to(dtype)
    shift = key.square().sum(-1).amax(-1)[..., None, None, None]  # (b, h, 1, 1, 1)
    floor = value.abs().amax((-2, -1))[..., None, None, None].square()
    slots = fill_slots(torch.zeros_like(real, dtype=torch.long), real, d << rounds)
    index, weight = slots.token, slots.live.to(dtype)
    coins = coins.to(dtype).flatten(-2)
    first = max(SMALLEST_BUCKET, 2 * -(-d * 2 // 2**rounds))
    for number in range(rounds):
        pairs = d << (rounds - number - 1)
        size = max(SMALLEST_BUCKET, 2 * -(-d // 2 ** (rounds - number - 1)))  # of a bucket
        padding = (0, -(-2 * pairs // size) * size - 2 * pairs)
        bucket = F.pad(index, padding).view(*index.shape[:2], -1, size)  # (b, h, buckets, size)
        counts = F.pad(weight, padding).view(bucket.shape)
        coin = F.pad(coins[..., pairs : 2 * pairs], (0, padding[1] // 2)).view(*bucket.shape[:-1], size // 2)
        k, v = take(key, bucket), take(value, bucket)  # (b, h, buckets, size, p)
        kernel = (k @ k.mT - shift).exp_() * (v @ v.mT + floor)
        # log(2 / delta) for delta = FAILURE size / (first rounds n): as many failures as pairs share FAILURE
        safe = 0.5 + math.log(2 * first * rounds * (d << rounds) / (FAILURE * size))
        second = halve(
            kernel, counts / 2**number, coin, safe if log_odds is None else log_odds
        )  # (b, h, buckets, size / 2)
        index = torch.where(second, bucket[..., 1::2], bucket[..., ::2]).flatten(2)[..., :pairs]
        weight = (counts[..., ::2] + counts[..., 1::2]).flatten(2)[..., :pairs]
    return index, weight


def halve(kernel: Tensor, weight: Tensor, coin: Tensor, log_odds: float) -> Tensor:
    """Kernel halving of every bucket: whether the second of each pair stays, (..., size / 2).

    With x, x' a pair of weights w, w', b = |x - x'| in the kernel's norm and alpha = <sum so far, x - x'>, x stays with
    probability w / (w + w') - alpha / (2 a), a = b max(b so far) log_odds, and then takes the weight of x': the sum
    grows by w' (x - x'), or by -w (x - x') where x' stays. Time O(size^2) for each bucket.
    """
    first, second = weight[..., ::2], weight[..., 1::2]  # (..., S)
    rows = kernel[..., ::2, :] - kernel[..., 1::2, :]
    difference = rows[..., ::2] - rows[..., 1::2]  # (..., S, S), <x_i - x'_i, x_j - x'_j>
    both = (first > 0) & (second > 0)
    norm = difference.diagonal(dim1=-2, dim2=-1).clamp(min=0).sqrt() * both
    bound = 2 * log_odds * norm * norm.cummax(-1).values
    slope = torch.where(bound > 0, 1 / bound, 0)
    # coin < w / (w + w') - alpha slope; a pair with an empty slot is decided by the share alone
    threshold = (first / (first + second).clamp(min=1e-6)) - coin
    threshold = torch.where(both, threshold, torch.where(second > 0, -1, 1))
    total = torch.zeros_like(threshold)
    stays = torch.zeros_like(both)
    for pair in range(both.shape[-1]):
        at = slice(pair, pair + 1)
        other = total[..., at] * slope[..., at] >= threshold[..., at]  # (..., 1)
        stays[..., at] = other
        total += torch.where(other, -first[..., at], second[..., at]) * difference[..., pair, :]
    return stays


class HyperNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    projections: Tensor  # (b, h, p, r): normal numbers, hyperplanes
    samples: Tensor  # (b, h, d - block): columns


class HyperAttention(Method):
    """Blocks of d / 2 similar keys, and d - d / 2 uniformly sampled columns in place of all others; Han et al. (2024).

    Queries and keys are sorted by the signs of `num_projections` random projections, in the order of a Gray code, where
    neighbours differ in one sign, and cut into equally many blocks. A query sees the keys of its block, and sampled
    keys that are not among them with weight m / (number of samples): numerator and denominator are unbiased. As in the
    authors' code, one uniform sample with replacement serves both; the paper's theory has a second one by the norms of
    V, and a cap on small row sums. Exact for d >= 2 n. Time O(n (d + r) p), memory O(n p).
    """

    budget: int = 256
    num_projections: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_projections", self.num_projections)

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> HyperNoise:
        """Uniform numbers for the hyperplanes and for the sampled columns."""
        samples = self.budget - self.budget // 2
        return HyperNoise(rand(query.shape[-1], self.num_projections), rand(samples, dtype=torch.float64))

    def attend(self, inputs: Inputs, noise: HyperNoise) -> tuple[Tensor, Trace]:
        """(b, h, n, p_v): each query attends its block and the sampled columns."""
        query, key, value, key_mask, query_mask = inputs[:5]
        scale, size = inputs.scale, max(1, self.budget // 2)
        projections, u = noise
        num_blocks = -(-key.shape[2] // size)
        if num_blocks == 1:
            return attend(query, from_mask(key, value, key_mask), scale), Trace()
        query_size = -(-query.shape[2] // num_blocks)
        keys = fill_slots(gray_code(key, projections), present(key, key_mask), num_blocks * size)
        queries = fill_slots(gray_code(query, projections), present(query, query_mask), num_blocks * query_size)
        rank = (u * keys.m).long().minimum(keys.m - 1).clamp(min=0)  # (b, h, S)
        sample = keys.order.gather(-1, rank)
        elsewhere = keys.of_rank(rank)[..., None, :] // size != torch.arange(num_blocks, device=u.device)[:, None]
        log_weight = (keys.m.clamp(min=1) / u.shape[-1]).log().to(statistics_dtype(query))[..., None]
        log_weight = log_weight.where(elsewhere & (keys.m > 0)[..., None], -torch.inf)  # (b, h, nb, S)
        blocks = (*key.shape[:2], num_blocks, -1)
        own = torch.zeros_like(log_weight[..., :1]).where(keys.live.view(blocks), -torch.inf)
        token = torch.cat(
            [keys.token.view(blocks), sample[..., None, :].expand(-1, -1, num_blocks, -1)], -1
        )  # (b, h, nb, size + S)
        source = VirtualKeys(take(key, token), take(value, token), torch.cat([own, log_weight], -1))
        output = attend(take(query, queries.token.view(blocks)), source, scale)
        place = queries.of_rank(queries.order.argsort(-1))  # (b, h, n)
        return take(output.flatten(2, 3), place), Trace()


@torch.no_grad()
def gray_code(x: Tensor, projections: Tensor) -> Tensor:
    """Where the signs of x R, (b, h, n, r), come in the reflected Gray code: digit i is the parity of signs 1 to i."""
    signs = x.to(statistics_dtype(x)) @ normal(projections).to(statistics_dtype(x)) > 0  # (b, h, n, r)
    parity = signs.cumsum(-1) % 2
    return (parity << torch.arange(parity.shape[-1] - 1, -1, -1, device=x.device)).sum(-1)


METHODS: dict[str, Entry] = {
    "wildcat": Entry(
        WildCat,
        "WildCat",
        "keys by randomly pivoted Cholesky, Nystrom weights",
        "Schroder and Mackey 2026",
        "O(n d (d + p))",
        exact_from=1,
        random=True,
        in_table_1=False,
    ),
    "thinformer": Entry(
        Thinformer,
        "Thinformer",
        "keys by kernel thinning (KH-Compress)",
        "Carrell et al. 2025",
        "O(n d p)",
        exact_from=1,
        random=True,
        row_by_row=True,
        in_table_1=False,
    ),
    "hyperattention": Entry(
        HyperAttention,
        "HyperAttention",
        "blocks of keys sorted by a hash, and sampled columns",
        "Han et al. 2024",
        "O(n d p)",
        exact_from=2,  # padding counts as keys
        random=True,
        in_table_1=False,
    ),
}
