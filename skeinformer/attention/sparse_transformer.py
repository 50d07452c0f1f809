"""Sparse Transformer: a window of tokens on each side, and every stride-th token (Child et al. 2019)."""

from typing import Any, NamedTuple

from torch import Tensor

from skeinformer.attention.block_sparse import BlockSparse, Mask, Pattern, cut, window_band, window_blocks
from skeinformer.registry import check_count


class SparseTransformerOptions(NamedTuple):
    """What the Sparse Transformer is told beside its inputs; None is what the budget sets."""

    budget: int = 256
    stride: int | None = None
    scale: float | None = None


class SparseTransformer(BlockSparse):
    """Attention to the `stride` tokens on each side, and to every token at a multiple of `stride` from the query.

    Child et al. (2019), section 4.3: the strided pattern, both parts in one head, made bidirectional by its mirror
    image. Any token reaches any other in two steps. `stride` is budget / 2, so a query visits budget + 1 tokens nearby
    and n / stride - 3 far ones: 286 of 4096 at a budget of 256. The paper advises a stride near sqrt(n). Exact where
    the stride reaches all tokens, and at a stride of 1.
    Time O(n (d + n / d) p), memory O(n (d + n / d)) for the scores of each head.
    """

    Options = SparseTransformerOptions
    sizes = ("stride",)

    @staticmethod
    def complete(options: SparseTransformerOptions) -> SparseTransformerOptions:
        stride = max(1, options.budget // 2) if options.stride is None else options.stride
        check_count("stride", stride)
        return options._replace(stride=stride)

    @staticmethod
    def pattern(query: Tensor, key_mask: Mask, noise: Any, options: SparseTransformerOptions) -> Pattern:
        assert options.stride is not None
        size = min(options.stride, query.shape[2])
        grid = cut(query, key_mask, size)
        return Pattern(grid, window_blocks(grid), band=window_band(size, options.stride, query.device), columns=True)
