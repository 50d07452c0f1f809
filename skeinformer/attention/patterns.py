"""Four patterns of block-sparse attention: BigBird, Longformer, SparseTransformer and BlockBert."""

from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.attention.block_sparse import BlockSparse, Pattern, cut, cut_window, take
from skeinformer.attention.inputs import Noise
from skeinformer.attention.rows import Rows
from skeinformer.checks import check_count
from skeinformer.noise import Rand

NO_BLOCK = torch.iinfo(torch.long).max  # an index of no block


class BigBird(BlockSparse):
    """Attention to 3 window, `num_random` random and 2 global blocks of `block_size` tokens.

    Zaheer et al. (2020), the internal construction (ITC): a block sees itself, both neighbours, the first and the last
    block, and random blocks, distinct and none of these, drawn for each head. The queries of the first and the last
    block see everything. Blocks are of budget / 4 tokens. Exact up to 7 blocks. Time O(n d p), memory O(n p).
    """

    block_size: int | None = None
    num_random: int = 3
    size_options: ClassVar[tuple[str, ...]] = ("block_size",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("num_random", self.num_random)

    @property
    def block(self) -> int:
        return self.block_size or max(1, self.budget // 4)

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Draw (b, h, n, num_random) numbers: those of the first token of a block choose its random blocks."""
        return (rand(query.shape[2], self.num_random),)

    def pattern(self, query: Tensor, key_mask: Tensor | None, noise: Noise) -> Pattern:
        pattern = cut(query, key_mask, size := min(self.block, query.shape[2]))
        last = (pattern.used - 1).clamp(min=0)  # (b, 1)
        offset = torch.arange(size, device=query.device).expand(len(last), -1)
        slots = torch.cat([offset, last * size + offset], 1)  # (b, 2 B)
        live = pattern.live.flatten(1).gather(1, slots) & torch.cat([offset >= 0, (last > 0).expand_as(offset)], 1)
        window, in_window = pattern.blocks.index, pattern.blocks.is_live()  # (b, 1, nb, 3)
        ends = torch.stack([torch.zeros_like(last), last], -1)[:, None].expand(-1, -1, window.shape[2], -1)
        taken = torch.cat([window.where(in_window, NO_BLOCK), ends], -1)  # (b, 1, nb, 5)
        u = take(noise[0], pattern.token[:, None, :, 0])  # (b, h, nb, r)
        random, shape = draw_blocks(u, taken, pattern.used), (-1, u.shape[1], -1, -1)
        index = torch.cat([window.expand(shape), random.index], -1)  # (b, h, nb, 3 + r)
        blocks = Rows(index, torch.cat([in_window.expand(shape), random.is_live()], -1))
        return pattern._replace(blocks=blocks, everywhere=Rows(slots, live))


class Longformer(BlockSparse):
    """Attention to the `window` tokens on each side, and to `global_tokens`, which see everything.

    Beltagy et al. (2020), section 3.1, without dilation, and with one set of projections. `global_tokens` are positions
    among the real tokens; those past the end are ignored. `window` is budget / 2: a query visits budget + 1 tokens and
    the global ones. Exact where it reaches all tokens. Time O(n (d + g) p), memory O(n p) and a mask of O(n d).
    """

    window: int | None = None
    global_tokens: tuple[int, ...] = (0,)
    size_options: ClassVar[tuple[str, ...]] = ("window",)

    def __post_init__(self) -> None:
        super().__post_init__()
        tokens = self.global_tokens
        if not isinstance(tokens, tuple | list) or not all(type(token) is int and token >= 0 for token in tokens):
            raise ValueError(f"global_tokens must be positions, integers of at least 0, got {tokens!r}")
        object.__setattr__(self, "global_tokens", tuple(sorted(set(tokens))))

    def pattern(self, query: Tensor, key_mask: Tensor | None, noise: Noise) -> Pattern:
        pattern = cut_window(query, key_mask, self.window or max(1, self.budget // 2))
        present = [token for token in self.global_tokens if token < query.shape[2]]
        if not present:
            return pattern
        slots = integers(present, query.device).expand(len(query), -1)  # (b, g)
        return pattern._replace(everywhere=Rows(slots, pattern.live.flatten(1).gather(1, slots)))


class SparseTransformer(BlockSparse):
    """Attention to the `stride` tokens on each side, and to every token at a multiple of `stride` from the query.

    Child et al. (2019), section 4.3: the strided pattern, both parts in one head, made bidirectional by its mirror
    image. `stride` is budget / 2; the paper advises one near sqrt(n). Exact where the stride reaches all tokens, and at
    a stride of 1. Time O(n (d + n / d) p), memory O(n (d + n / d)) for the scores of each head.
    """

    stride: int | None = None
    size_options: ClassVar[tuple[str, ...]] = ("stride",)

    def pattern(self, query: Tensor, key_mask: Tensor | None, noise: Noise) -> Pattern:
        return cut_window(query, key_mask, self.stride or max(1, self.budget // 2))._replace(columns=True)


class BlockBert(BlockSparse):
    """Attention from each block of queries to one block of keys, chosen by a permutation that differs between heads.

    Qiu et al. (2020), section 3: block i of head j sees block i + shifts[j], cyclically, the shifts repeated over the
    heads. `num_blocks` is by default the least for which a block has at most `budget` tokens. Blocks are equally long
    but the last. Exact with one block. Time O(n d p), or O(n^2 p / num_blocks); memory O(n p).
    """

    num_blocks: int | None = None
    shifts: tuple[int, ...] = (0, 1)
    size_options: ClassVar[tuple[str, ...]] = ("num_blocks",)

    def __post_init__(self) -> None:
        super().__post_init__()
        shifts = self.shifts
        if not isinstance(shifts, tuple | list) or not shifts or not all(type(shift) is int for shift in shifts):
            raise ValueError(f"shifts must be integers, one or more, got {shifts!r}")
        object.__setattr__(self, "shifts", tuple(shifts))

    def pattern(self, query: Tensor, key_mask: Tensor | None, noise: Noise) -> Pattern:
        b, h, n, _ = query.shape
        real = torch.full((b, 1), n, device=query.device) if key_mask is None else key_mask.sum(-1)
        if self.num_blocks is None:
            size, parts = min(self.budget, n), (-(-real // self.budget)).clamp(min=1)
        else:
            size, parts = -(-n // self.num_blocks), torch.full_like(real, self.num_blocks)
        length = (-(-real // parts)).clamp(min=1)  # (b, 1)
        pattern = cut(query, key_mask, size, length, min(self.num_blocks or 1, n))
        shift = integers((self.shifts[head % len(self.shifts)] for head in range(h)), query.device)
        block = torch.arange(pattern.token.shape[1], device=query.device) + shift[:, None]  # (h, nb)
        index = block % pattern.used.clamp(min=1)[..., None]  # (b, h, nb)
        return pattern._replace(blocks=Rows(index[..., None], None))


def draw_blocks(u: Tensor, taken: Tensor, count: Tensor) -> Rows:
    """Draw r distinct blocks for every query block, uniformly from the first `count` without those taken.

    u: (b, h, nb, r). taken: (b, 1, nb, t), NO_BLOCK where there is none. Result: (b, h, nb, r). Time O(nb r (r + t)).
    """
    taken = taken.expand(*u.shape[:-1], -1).sort(-1).values
    taken = taken.where(F.pad(taken[..., 1:] > taken[..., :-1], (1, 0), value=True), NO_BLOCK)
    picks, live = [], []
    for number in u.unbind(-1):  # (b, h, nb)
        taken = taken.sort(-1).values
        free = count[..., None] - (taken < NO_BLOCK).sum(-1)
        pick = (number * free).long().minimum(free - 1).clamp(min=0)  # rank among the free blocks
        for block in taken.unbind(-1):
            pick = pick + (pick >= block)
        picks.append(pick.where(free > 0, 0))
        live.append(free > 0)
        taken = torch.cat([taken, pick.where(free > 0, NO_BLOCK)[..., None]], -1)
    return Rows(torch.stack(picks, -1), torch.stack(live, -1))


def integers(values: Iterable[int], device: torch.device) -> Tensor:
    """Return a few integers as a tensor, filled in on the device: it would wait for the copy of a list."""
    return torch.stack([torch.full((), value, device=device) for value in values])
