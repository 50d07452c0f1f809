"""Longformer: a window of tokens on each side, and global tokens (Beltagy et al. 2020)."""

from typing import Any, NamedTuple

from torch import Tensor

from skeinformer.attention.block_sparse import BlockSparse, Mask, Pattern, cut, numbers, window_band, window_blocks
from skeinformer.attention.selection import Selection
from skeinformer.registry import check_count


class LongformerOptions(NamedTuple):
    """What Longformer is told beside its inputs; None is what the budget sets."""

    budget: int = 256
    window: int | None = None
    global_tokens: tuple[int, ...] = (0,)
    scale: float | None = None


class Longformer(BlockSparse):
    """Attention to the `window` tokens on each side, and to `global_tokens`, which see everything.

    Beltagy et al. (2020), section 3.1, without dilation. `global_tokens` are positions among the real tokens, the
    first one by default; those past the end are ignored. The paper projects for global attention by matrices of their
    own; here there is one set. `window` is budget / 2, so a query visits budget + 1 tokens and the global ones: 258 at
    a budget of 256. Exact where the window reaches all tokens. Time O(n (d + g) p) for g global tokens, memory O(n p)
    and a mask of O(n d).
    """

    Options = LongformerOptions
    sizes = ("window",)

    @staticmethod
    def complete(options: LongformerOptions) -> LongformerOptions:
        window = max(1, options.budget // 2) if options.window is None else options.window
        check_count("window", window)
        tokens = options.global_tokens
        if not isinstance(tokens, tuple | list) or any(
            isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in tokens
        ):
            raise ValueError(f"global_tokens must be positions, integers of at least 0, got {tokens!r}")
        return options._replace(window=window, global_tokens=tuple(sorted(set(tokens))))

    @staticmethod
    def pattern(query: Tensor, key_mask: Mask, noise: Any, options: LongformerOptions) -> Pattern:
        assert options.window is not None
        size = min(options.window, query.shape[2])
        grid, band = cut(query, key_mask, size), window_band(size, options.window, query.device)
        present = [token for token in options.global_tokens if token < query.shape[2]]
        if not present:
            return Pattern(grid, window_blocks(grid), None, band)
        slots = numbers(present, query.device).expand(len(query), -1)  # (b, g)
        everywhere = Selection(slots, grid.live.flatten(1).gather(1, slots))
        return Pattern(grid, window_blocks(grid), everywhere, band)
