"""Big Bird: a window, random blocks and two global ones (Zaheer et al. 2020)."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.attention.block_sparse import BlockSparse, Mask, Pattern, cut, take, window_blocks
from skeinformer.attention.selection import Selection, at_most
from skeinformer.kernels.choice import exporting
from skeinformer.noise import Rand
from skeinformer.registry import check_count

NONE = torch.iinfo(torch.long).max  # an index of no block


def draw_blocks(u: Tensor, taken: Tensor, count: Tensor) -> Selection:
    """For every query block r distinct blocks, uniformly from the first `count` without those taken: (b, h, nb, r).

    u: (b, h, nb, r) uniform numbers. taken: (b, 1, nb, t) blocks, NONE where there is none. Time O(nb r (r + t)).
    """
    taken = taken.expand(*u.shape[:-1], -1).sort(-1).values
    taken = taken.where(F.pad(taken[..., 1:] > taken[..., :-1], (1, 0), value=True), NONE)
    picks, live = [], []
    for number in u.unbind(-1):  # (b, h, nb)
        taken = taken.sort(-1).values
        free = count[..., None] - (taken < NONE).sum(-1)
        pick = (number * free).long().minimum(free - 1).clamp(min=0)  # rank among the free blocks
        for block in taken.unbind(-1):
            pick = pick + (pick >= block)
        picks.append(pick.where(free > 0, 0))
        live.append(free > 0)
        taken = torch.cat([taken, pick.where(free > 0, NONE)[..., None]], -1)
    return Selection(torch.stack(picks, -1), torch.stack(live, -1))


class BigBirdNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    random: Tensor  # (b, h, n, num_random): those of the first token of a block choose its random blocks


class BigBirdOptions(NamedTuple):
    """What Big Bird is told beside its inputs; None is what the budget sets."""

    budget: int = 256
    block_size: int | None = None
    num_random: int = 3
    scale: float | None = None


class BigBird(BlockSparse):
    """Attention to 3 window, `num_random` random and 2 global blocks of `block_size` tokens.

    Zaheer et al. (2020), the internal construction (ITC): a block sees itself, both neighbours, random blocks of its
    own, and the first and the last block. Random blocks are drawn for each head, distinct and none of the others. The
    queries of the first and the last block see everything. Blocks are of budget / 4 tokens: 64 at a budget of 256,
    where a query visits 8 * 64 = 512 keys and the global rows add 128, the 640 n elements of Chen et al. (2022). Exact
    up to 7 blocks. Time O(n d p), memory O(n p).
    """

    Options = BigBirdOptions
    sizes = ("block_size",)

    @staticmethod
    def complete(options: BigBirdOptions) -> BigBirdOptions:
        size = max(1, options.budget // 4) if options.block_size is None else options.block_size
        check_count("block_size", size)
        check_count("num_random", options.num_random)
        return options._replace(block_size=size)

    @staticmethod
    def draw(query: Tensor, key: Tensor, rand: Rand, options: BigBirdOptions) -> BigBirdNoise:
        return BigBirdNoise(rand(query.shape[2], options.num_random))

    @staticmethod
    def pattern(query: Tensor, key_mask: Mask, noise: Any, options: BigBirdOptions) -> Pattern:
        assert options.block_size is not None
        size = at_most(options.block_size, query.shape[2])
        # an exported graph is for all numbers of blocks but those that some other dimension has: few have empty ones
        grid = cut(query, key_mask, size, num_blocks=4 if exporting() else 1)
        last = (grid.used - 1).clamp(min=0)  # (b, 1)
        offset = torch.arange(size, device=query.device).expand(len(last), -1)
        slots = torch.cat([offset, last * size + offset], 1)  # (b, 2 B)
        live = grid.live.flatten(1).gather(1, slots) & torch.cat([offset >= 0, (last > 0).expand_as(offset)], 1)
        window = window_blocks(grid)
        ends = torch.stack([torch.zeros_like(last), last], -1)[:, None].expand(-1, -1, grid.token.shape[1], -1)
        taken = torch.cat([window.indices.where(window.live, NONE), ends], -1)  # (b, 1, nb, 5)
        u = take(noise[0], grid.token[:, None, :, 0])  # (b, h, nb, r)
        pairs = zip(window, draw_blocks(u, taken, grid.used), strict=True)
        blocks = Selection(*(torch.cat([x.expand(-1, u.shape[1], -1, -1), y], -1) for x, y in pairs))
        return Pattern(grid, blocks, Selection(slots, live))
