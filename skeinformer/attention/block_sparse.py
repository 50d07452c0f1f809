"""Block-sparse attention: every block of queries sees a few blocks of keys; `patterns.py` has four uses.

Blocks are cut after padding is taken out: position i is the i-th real token, and padding changes nothing wherever it
lies. A token whose key is padding has no place in the pattern, and its row is 0, also where `query_mask` is True.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.attention.base import Method, Trace
from skeinformer.attention.inputs import Inputs, Noise, clear_padding
from skeinformer.attention.rows import Rows
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask, union
from skeinformer.checks import check_count
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.fused import attend_where


class Pattern(NamedTuple):
    """n tokens in nb blocks of B slots, and who sees whom."""

    token: Tensor  # (b, nb, B) the token in each slot; any token where the slot is empty
    live: Tensor  # (b, nb, B) whether the slot holds a real key
    slot: Tensor  # (b, n) where each token is, block * B + offset
    used: Tensor  # (b, 1) how many blocks hold a real key: the first ones
    blocks: Rows  # (b, h or 1, nb, k) key blocks that a query block sees; one listed twice counts once
    everywhere: Rows | None = None  # (b, g) slots of tokens that all queries see and that see all keys
    band: Tensor | None = None  # (B, k B) which keys of its blocks a query sees, where heads share the blocks
    columns: bool = False  # whether a query also sees the slots of its offset in all blocks but its own and neighbours


class BlockSparse(Method):
    """Self-attention by a pattern over the real keys of one sequence: a method writes `pattern`."""

    budget: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.size_options:
            if (size := getattr(self, name)) is not None:
                check_count(name, size)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if (n := query.shape[2]) != (n_k := key.shape[2]):
            needs = f"{type(self).__name__} needs the same number: one sequence"
            raise ValueError(f"query has {n} tokens and key {n_k}, but {needs}")

    def pattern(self, query: Tensor, key_mask: Tensor | None, noise: Noise) -> Pattern:
        """Return who sees whom; the mask is (b, 1, n)."""
        raise TypeError(f"{type(self).__name__} is no pattern: it does not define `pattern`")

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        pattern = self.pattern(inputs.query, inputs.key_mask, noise)
        output = block_sparse_attention(*inputs[:4], pattern, inputs.scale)
        return clear_padding(output, inputs.key_mask), Trace()


def cut(query: Tensor, key_mask: Tensor | None, size: int, length: Tensor | None = None, blocks: int = 1) -> Pattern:
    """Put tokens in blocks of `size` slots, `length` of them used, real keys first; a block sees both neighbours."""
    b, _, n, _ = query.shape
    num_blocks = max(-(-n // size), blocks)
    position = torch.arange(n, device=query.device).expand(b, n)
    order, place, m = position, position, position.new_full((b, 1), n)
    if key_mask is not None:
        order, m = torch.argsort((~key_mask[:, 0]).long(), stable=True), key_mask.sum(-1)  # (b, n), (b, 1)
        place = order.argsort()
    length = m.new_full((b, 1), size) if length is None else length
    block, offset = torch.arange(num_blocks, device=query.device)[:, None], torch.arange(size, device=query.device)
    at = block * length[..., None] + offset  # (b, nb, B)
    live = (offset < length[..., None]) & (at < m[..., None])
    token = order.gather(1, at.clamp(max=n - 1).flatten(1)).view_as(at)
    slot = (place // length * size + place % length).clamp(max=num_blocks * size - 1)
    used = -(-m // length)
    window = block + torch.arange(-1, 2, device=query.device)  # (nb, 3)
    seen = (window >= 0) & (window < used[..., None])  # (b, nb, 3)
    return Pattern(token, live, slot, used, Rows((window % num_blocks).expand_as(seen)[:, None], seen[:, None]))


def cut_window(query: Tensor, key_mask: Tensor | None, reach: int) -> Pattern:
    """Put tokens in blocks, with a band in which each query sees the `reach` positions on each side."""
    position = torch.arange(3 * (size := min(reach, query.shape[2])), device=query.device)
    band = (position[size : 2 * size, None] - position).abs() <= reach  # (B, 3 B)
    return cut(query, key_mask, size)._replace(band=band)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[i, j, index[i, j]] for example i and head j: (b, h, n, ...), (b, h or 1, *k) -> (b, h, *k, ...)."""
    b, h, n = x.shape[:3]  # one index_select is many times faster than a gather with an expanded index
    flat = index + n * torch.arange(b * h, device=x.device).view(b, h, *(1,) * (index.dim() - 2))  # (b, h, *k)
    return x.flatten(0, 2).index_select(0, flat.flatten()).view(*flat.shape, *x.shape[3:])


def block_sparse_attention(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, pattern: Pattern, scale: float
) -> Tensor:
    """softmax(s Q K^T) V over the keys that the pattern lets each query see, each counted once: (b, h, n, p_v).

    Time O(n (k B + g) p), memory O(n (k + g / B) p), and O(n (k B + g)) for the mask of a band. Columns add O(n nb p)
    to the time, and O(n (k B + nb)) scores for each head to the memory.
    """
    token, live, slot, _, blocks, everywhere, band, columns = pattern
    if everywhere is not None:
        listed, is_global = everywhere.index, everywhere.is_live()
        # listed blocks do not count them again; an empty place of the list marks a slot after the last
        slots = listed.where(is_global, live[0].numel())
        live = live & F.pad(torch.ones_like(live).flatten(1), (0, 1)).scatter(1, slots, False)[:, :-1].view_as(live)
    queries, keys, values = (take(x, token[:, None]) for x in (query, key, value))  # (b, h, nb, B, p)
    source = slots_of_blocks(keys, values, live, blocks)
    if everywhere is not None:
        index = token.flatten(1).gather(1, listed)[:, None]  # (b, 1, g)
        shared = from_mask(take(key, index), take(value, index), is_global[:, None])
        parts = (x[:, :, None] for x in (shared.keys, shared.values, shared.log_weights()))
        source = union(source, VirtualKeys(*(x.expand(*source.keys.shape[:3], *x.shape[3:]) for x in parts)))
    if band is None:
        output = attend(queries, source, scale)  # (b, h, nb, B, p_v)
    elif columns:
        output = _attend_columns(queries, keys, values, live, source, band, scale)
    else:
        output = _attend_band(queries, source, band, scale)
    output = take(output.flatten(2, 3), slot[:, None])  # (b, h, n, p_v)
    if everywhere is None:
        return output
    rows = attend(take(query, index), from_mask(key, value, key_mask), scale)  # (b, h, g, p_v)
    # an empty place of the list writes to a row after the last, which is cut off
    row = index.where(is_global[:, None], query.shape[2])[..., None].expand_as(rows)
    return F.pad(output, (0, 0, 0, 1)).scatter(2, row, rows)[:, :, :-1]


def slots_of_blocks(key: Tensor, value: Tensor, live: Tensor, blocks: Rows) -> VirtualKeys:
    """Return the slots of the listed blocks, (b, h, nb, k B, p), of weight 1 where live, (b, nb, B)."""
    index, listed = blocks.index, blocks.is_live()  # (b, h or 1, nb, k)
    same = index[..., :, None] == index[..., None, :]  # (b, h or 1, nb, k, k)
    first = listed & ~(same & listed[..., None, :]).tril(-1).any(-1)  # not listed before
    seen = take(live[:, None].expand(-1, index.shape[1], -1, -1), index) & first[..., None]  # (b, h or 1, nb, k, B)
    return from_mask(take(key, index).flatten(3, 4), take(value, index).flatten(3, 4), seen.flatten(3))


def _attend_band(query: Tensor, source: VirtualKeys, band: Tensor, scale: float) -> Tensor:
    """Attend on (b, h, nb) blocks with a mask for each query of a block, the same for all heads."""
    extra = source.keys.shape[-2] - band.shape[-1]
    mask = (source.log_weights()[:, :1, :, None] == 0) & F.pad(band, (0, extra), value=True)  # (b, 1, nb, B, m)
    q, k, v, mask = (x.transpose(1, 2).flatten(0, 1) for x in (query, *source[:2], mask))  # (b nb, h or 1, ...)
    output = attend_where(q, k, v, mask, scale)
    return output.reshape(len(query), -1, *output.shape[1:]).transpose(1, 2)  # (b, h, nb, B, p_v)


def _attend_columns(
    query: Tensor, key: Tensor, value: Tensor, live: Tensor, near: VirtualKeys, band: Tensor, scale: float
) -> Tensor:
    """Attend to the listed keys within the band, and to slots of equal offset in blocks that are not listed."""
    # slots of equal offset are the columns of a table whose rows are the blocks; one softmax over both parts
    dtype, original = statistics_dtype(query), query.dtype
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
    return (output + far.transpose(2, 3)).to(original)
