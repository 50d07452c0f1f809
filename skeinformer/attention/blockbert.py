"""BlockBERT: one block, chosen for each head by a permutation of the blocks (Qiu et al. 2020)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.block_sparse import BlockSparse, Mask, Pattern, cut, numbers
from skeinformer.attention.selection import Selection
from skeinformer.registry import check_count


class BlockBertOptions(NamedTuple):
    """What BlockBERT is told beside its inputs; without a number of blocks the budget sets it."""

    budget: int = 256
    num_blocks: int | None = None
    shifts: tuple[int, ...] = (0, 1)
    scale: float | None = None


class BlockBert(BlockSparse):
    """Attention from each block of queries to one block of keys, chosen by a permutation that differs between heads.

    Qiu et al. (2020), section 3: block i of head j sees block i + shifts[j], cyclically, the shifts repeated over the
    heads. `num_blocks` is by default the least for which a block has at most `budget` tokens: a query visits at most
    256 keys at a budget of 256. Blocks are equally long but the last. Exact with one
    block. Time O(n d p), or O(n^2 p / num_blocks); memory O(n p).
    """

    Options = BlockBertOptions
    sizes = ("num_blocks",)

    @staticmethod
    def complete(options: BlockBertOptions) -> BlockBertOptions:
        if options.num_blocks is not None:
            check_count("num_blocks", options.num_blocks)
        shifts = options.shifts
        if (
            not isinstance(shifts, tuple | list)
            or not shifts
            or any(isinstance(shift, bool) or not isinstance(shift, int) for shift in shifts)
        ):
            raise ValueError(f"shifts must be integers, one or more, got {shifts!r}")
        return options._replace(shifts=tuple(shifts))

    @staticmethod
    def pattern(query: Tensor, key_mask: Mask, noise: Any, options: BlockBertOptions) -> Pattern:
        b, h, n, _ = query.shape
        real = torch.full((b, 1), n, device=query.device) if key_mask is None else key_mask.sum(-1)
        if options.num_blocks is None:
            size, parts = min(options.budget, n), (-(-real // options.budget)).clamp(min=1)
        else:
            size, parts = -(-n // options.num_blocks), torch.full_like(real, options.num_blocks)
        length = (-(-real // parts)).clamp(min=1)  # (b, 1)
        grid = cut(query, key_mask, size, length, min(options.num_blocks or 1, n))
        shift = numbers((options.shifts[head % len(options.shifts)] for head in range(h)), query.device)
        block = torch.arange(grid.token.shape[1], device=query.device) + shift[:, None]  # (h, nb)
        index = (block % grid.used.clamp(min=1)[..., None])[..., None]  # (b, h, nb, 1)
        return Pattern(grid, Selection(index, torch.ones_like(index, dtype=torch.bool)))
