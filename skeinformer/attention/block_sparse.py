"""Block-sparse attention: every block of queries sees a few blocks of keys. One function, four patterns.

    BigBird            Zaheer et al. (2020)   the own block, both neighbours, random blocks, the first and the last one
    Longformer         Beltagy et al. (2020)  a window of tokens on each side, and global tokens
    SparseTransformer  Child et al. (2019)    a window of tokens on each side, and every stride-th token
    BlockBert          Qiu et al. (2020)      one block, chosen for each head by a permutation of the blocks

Blocks are cut after padding is taken out: real keys stand first, in their order, then the tokens that are no keys. So
position i is the i-th real token, no block is all padding, and padding changes nothing wherever it lies. These are
patterns over one sequence: a token whose key is padding has no place in it, and its row is 0, whatever `query_mask`
says.
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.inputs import Inputs, clear_padding, default_scale
from skeinformer.attention.selection import Selection
from skeinformer.attention.virtual_keys import VirtualKeys, attend, cat, from_mask
from skeinformer.kernels.choice import exporting, statistics_dtype
from skeinformer.kernels.fused import attend_where

Mask = Tensor | None


class Grid(NamedTuple):
    """n tokens in nb blocks of B slots."""

    token: Tensor  # (b, nb, B) the token in each slot; any token where the slot is empty
    live: Tensor  # (b, nb, B) whether the slot holds a real key
    slot: Tensor  # (b, n) where each token is, block * B + offset
    used: Tensor  # (b, 1) how many blocks hold a real key: the first ones


class Pattern(NamedTuple):
    """Who sees whom."""

    grid: Grid
    blocks: Selection  # (b, h or 1, nb, k) key blocks that a query block sees; one listed twice counts once
    everywhere: Selection | None = None  # (b, g) slots of tokens that all queries see and that see all keys
    band: Tensor | None = None  # (B, k B) which keys of its blocks a query sees, where heads share the blocks
    columns: bool = False  # beside `window_blocks` a query sees the slots of its offset in all other blocks


def cut(query: Tensor, key_mask: Mask, size: int, length: Tensor | None = None, num_blocks: int = 1) -> Grid:
    """Tokens in blocks of `size` slots, real keys first; with `length` (b, 1), only so many slots of each are used."""
    b, _, n, _ = query.shape
    num_blocks = max(-(-n // size), num_blocks)
    position = torch.arange(n, device=query.device).expand(b, n)
    order, place, m = position, position, position.new_full((b, 1), n)
    if key_mask is not None:
        order = torch.argsort((~key_mask[:, 0]).long(), stable=True)  # (b, n)
        place = order.argsort()
        m = key_mask.sum(-1)  # (b, 1)
    length = m.new_full((b, 1), size) if length is None else length
    block = torch.arange(num_blocks, device=query.device)[:, None]
    offset = torch.arange(size, device=query.device)
    at = block * length[..., None] + offset  # (b, nb, B)
    live = (offset < length[..., None]) & (at < m[..., None])
    token = order.gather(1, at.clamp(max=n - 1).flatten(1)).view_as(at)
    slot = (place // length * size + place % length).clamp(max=num_blocks * size - 1)
    return Grid(token, live, slot, -(-m // length))


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[i, j, index[i, j]] for example i and head j: (b, h, n, ...), (b, h or 1, *k) -> (b, h, *k, ...).

    One index_select over the rows of all heads, many times faster than a gather with an expanded index. To flatten
    them is not for every length, says torch.export: there it is an index.
    """
    b, h, n = x.shape[:3]
    if exporting():
        head = torch.arange(h, device=x.device).view(h, *(1,) * (index.dim() - 2))
        return x[torch.arange(b, device=x.device).view(b, *(1,) * (index.dim() - 1)), head, index]
    first = n * torch.arange(b * h, device=x.device).view(b, h, *(1,) * (index.dim() - 2))
    flat = index + first  # (b, h, *k)
    return x.flatten(0, 2).index_select(0, flat.flatten()).view(*flat.shape, *x.shape[3:])


def numbers(values: Iterable[int], device: torch.device) -> Tensor:
    """A few integers as a tensor, filled in on the device: a copy of a list would make the host wait for it."""
    return torch.stack([torch.full((), value, device=device) for value in values])


def block_sparse_attention(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n, p)
    value: Tensor,  # (b, h, n, p_v)
    key_mask: Mask,
    pattern: Pattern,
    scale: float,
) -> Tensor:
    """softmax(s Q K^T) V over the keys that the pattern lets each query see, each counted once: (b, h, n, p_v).

    Time O(n (k B + g) p), memory O(n (k + g / B) p); the mask of a band is O(n (k B + g)), shared by the heads. Columns
    add O(n nb p) to the time, and O(n (k B + nb)) scores for each head to the memory.
    """
    grid, blocks, everywhere, band, columns = pattern
    live = grid.live
    if everywhere is not None:  # listed blocks do not count them again; an empty place marks a slot after the last
        slots = everywhere.indices.where(everywhere.live, live[0].numel())
        live = live & F.pad(torch.ones_like(live).flatten(1), (0, 1)).scatter(1, slots, False)[:, :-1].view_as(live)
    queries, keys, values = (take(x, grid.token[:, None]) for x in (query, key, value))  # (b, h, nb, B, p)
    source = slots_of_blocks(keys, values, live, blocks)
    if everywhere is not None:
        token = grid.token.flatten(1).gather(1, everywhere.indices)[:, None]  # (b, 1, g)
        shared = from_mask(take(key, token), take(value, token), everywhere.live[:, None])
        parts = (shared.keys, shared.values, shared.log_weights())
        shape = (*source.keys.shape[:3], -1)  # (b, h, nb)
        source = cat(source, VirtualKeys(*(x[:, :, None].expand(*shape, *x.shape[3:]) for x in parts)))
    if band is None:
        output = attend(queries, source, scale)  # (b, h, nb, B, p_v)
    elif columns:
        output = _attend_columns(queries, keys, values, live, source, band, scale)
    else:
        output = _attend_band(queries, source, band, scale)
    output = take(output.flatten(2, 3), grid.slot[:, None])  # (b, h, n, p_v)
    if everywhere is None:
        return output
    rows = attend(take(query, token), from_mask(key, value, key_mask), scale)  # (b, h, g, p_v)
    # an empty place of the list writes to a row after the last, which is cut off
    row = token.where(everywhere.live[:, None], query.shape[2])[..., None].expand_as(rows)
    return F.pad(output, (0, 0, 0, 1)).scatter(2, row, rows)[:, :, :-1]


def slots_of_blocks(key: Tensor, value: Tensor, live: Tensor, blocks: Selection) -> VirtualKeys:
    """The slots of the listed blocks, of weight 1 where live: (b, h, nb, B, p), (b, nb, B) -> (b, h, nb, k B, p)."""
    index = blocks.indices  # (b, h or 1, nb, k)
    same = index[..., :, None] == index[..., None, :]  # (b, h or 1, nb, k, k)
    again = (same & blocks.live[..., None, :]).tril(-1).any(-1)  # listed before
    seen = take(live[:, None].expand(-1, index.shape[1], -1, -1), index)  # (b, h or 1, nb, k, B)
    seen = seen & (blocks.live & ~again)[..., None]
    return from_mask(take(key, index).flatten(3, 4), take(value, index).flatten(3, 4), seen.flatten(3))


def _attend_band(query: Tensor, source: VirtualKeys, band: Tensor, scale: float) -> Tensor:
    """`attend` on (b, h, nb) blocks with a mask for each query of a block, the same for all heads."""
    extra = source.keys.shape[-2] - band.shape[-1]
    mask = (source.log_weights()[:, :1, :, None] == 0) & F.pad(band, (0, extra), value=True)  # (b, 1, nb, B, m)
    q, k, v, mask = (x.transpose(1, 2).flatten(0, 1) for x in (query, *source[:2], mask))  # (b nb, h or 1, ...)
    output = attend_where(q, k, v, mask, scale)
    return output.reshape(len(query), -1, *output.shape[1:]).transpose(1, 2)  # (b, h, nb, B, p_v)


def _attend_columns(
    query: Tensor, key: Tensor, value: Tensor, live: Tensor, near: VirtualKeys, band: Tensor, scale: float
) -> Tensor:
    """Attention to the listed keys within the band, and to the slots of equal offset in blocks that are not listed.

    Blocks (b, h, nb, B, p) are the rows of a table, slots of equal offset its columns. One softmax over both parts; the
    scores are formed, in float32 or better.
    """
    dtype, given = statistics_dtype(query), query.dtype
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    near_seen = band & (near.log_weights()[:, :1, :, None] == 0)  # (b, 1, nb, B, 3 B)
    row = torch.arange(query.shape[2], device=query.device)
    far_seen = ((row[:, None, None] - row).abs() > 1) & live.mT[:, None, None]  # (b, 1, nb, B, nb)
    seen = torch.cat([near_seen, far_seen], -1)  # (b, 1, nb, B, 3 B + nb)
    columns = query.transpose(2, 3) @ key.transpose(2, 3).mT  # (b, h, B, nb, nb)
    scores = scale * torch.cat([query @ near.keys.to(dtype).mT, columns.transpose(2, 3)], -1)
    weights = scores.masked_fill(~seen, torch.finfo(dtype).min).softmax(-1).masked_fill(~seen, 0)
    output = weights[..., : -len(row)] @ near.values.to(dtype)  # (b, h, nb, B, p_v)
    far = weights[..., -len(row) :].transpose(2, 3) @ value.transpose(2, 3)  # (b, h, B, nb, p_v)
    return (output + far.transpose(2, 3)).to(given)


def window_blocks(grid: Grid) -> Selection:
    """The block before each block, itself and the block after: (b, 1, nb, 3)."""
    index = torch.arange(-1, grid.token.shape[1] + 1, device=grid.token.device).unfold(0, 3, 1)  # (nb, 3)
    live = (index >= 0) & (index < grid.used[..., None])  # (b, nb, 3)
    return Selection((index % index.shape[0]).expand_as(live)[:, None], live[:, None])


def window_band(size: int, reach: int, device: torch.device) -> Tensor:
    """Which keys of `window_blocks` are at most `reach` positions away: (B, 3 B)."""
    query, key = torch.arange(size, 2 * size, device=device), torch.arange(3 * size, device=device)
    return (query[:, None] - key).abs() <= reach


class BlockSparse(Attention):
    """Self-attention by a pattern over the real keys of one sequence: a method writes `pattern`.

    The row of a token whose key is padding is 0.
    """

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"query has {query.shape[2]} tokens and key {key.shape[2]}, but {type(self).__name__} needs the same "
                "number: its pattern is over the positions of one sequence; use another method for cross-attention"
            )

    @staticmethod
    @abstractmethod
    def pattern(query: Tensor, key_mask: Mask, noise: Any, options: Any) -> Pattern:
        """Who sees whom, for a mask (b, 1, n) or None."""

    @classmethod
    def compute(cls, inputs: Inputs, noise: Any, options: Any) -> tuple[Tensor, Trace]:
        query, key, value, key_mask, _ = inputs
        pattern = cls.pattern(query, key_mask, noise, options)
        output = block_sparse_attention(query, key, value, key_mask, pattern, default_scale(query, options.scale))
        return clear_padding(output, key_mask), Trace()
