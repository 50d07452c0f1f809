"""The near part of a sketch: a query sees the keys of its own block and of both neighbouring blocks exactly.

`kernels/near.py` computes it for the tokens at hand. Blocks are cut by position in the whole sequence. Where ranks
share it, the tokens of two blocks at each end of every share go to all ranks, and each takes what its own blocks see.
Gradients go back in the same way. The size of both exchanges does not depend on the length of the sequence.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.inputs import Inputs
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.distributed.world import Ranks
from skeinformer.kernels.choice import all_true
from skeinformer.kernels.near import Blocks, Means, Tokens, attend_near, attend_near_backward
from skeinformer.kernels.rows import LOWEST, batches


class Near(NamedTuple):
    """What the near part adds to a sketch."""

    window: int  # w
    output: Tensor  # (b, h, n, p_v), attention to near keys and far means, and the linear term
    center: Tensor | None  # (b, h, 1, p): the linear term is (Q - center) times the slope; None without it
    cluster: Tensor  # (b, h, n), of each token
    share: Tensor  # (b, h, n), of each token in the mean of its cluster
    neighbors: tuple[Tensor, ...] = ()  # keys, values, clusters, shares, masks of tokens before these, and after them

    def tokens(self, inputs: Inputs) -> list[Tokens]:
        """Return the tokens that the blocks of this rank see: with other ranks, those before and after its own."""
        own = Tokens(inputs.key, inputs.value, self.cluster, self.share, self._removed(inputs.key_mask))
        if not self.neighbors:
            return [own]
        before, after = (
            Tokens(key, value, cluster, share, self._removed(mask))
            for key, value, cluster, share, mask in (self.neighbors[:5], self.neighbors[5:])
        )
        return [before, own, after]

    def plus_linear(self, query: Tensor, slope: Tensor, center: Tensor, constant: Tensor) -> "Near":
        """Add the linear term Q G - constant to the output, in place."""
        for output, q, g in batches(self.output, query.to(slope.dtype), slope):
            output.baddbmm_(q, g)
        self.output.sub_(constant)
        return self._replace(center=center)

    def _removed(self, mask: Tensor | None) -> Tensor | None:
        if mask is None or all_true(mask):
            return None
        removed = torch.zeros(mask.shape, dtype=self.share.dtype, device=mask.device).masked_fill_(~mask, LOWEST)
        return removed.expand(*self.share.shape[:2], -1)

    def blocks(self, inputs: Inputs) -> Blocks:
        """Return where these tokens lie in blocks of the whole sequence."""
        w, offset, before = self.window, inputs.world.query_start % self.window, 0
        if self.neighbors:
            before = self.neighbors[0].shape[2]
        return Blocks(w, -(-(offset + inputs.query.shape[2]) // w), w + offset - before, w + offset)


def attend(inputs: Inputs, means: VirtualKeys, window: int, cluster: Tensor, share: Tensor) -> Near:
    """Attend to near keys and far means; the precision is that of the means."""
    near = Near(window, share, None, cluster, share)
    if isinstance(inputs.world, Ranks):
        near = near._replace(neighbors=exchange_neighbors(inputs, inputs.world, near))
    all_means = Means(means.keys, means.values, means.log_weights())
    output = attend_near(inputs.query, near.tokens(inputs), all_means, near.blocks(inputs), inputs.scale)
    return near._replace(output=output)


def attend_backward(
    inputs: Inputs, means: VirtualKeys, near: Near, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, mean keys and mean values from that of `attend`'s output."""
    all_means, blocks = Means(means.keys, means.values, means.log_weights()), near.blocks(inputs)
    d_query, d_tokens, d_means = attend_near_backward(
        gradient, inputs.query, near.tokens(inputs), all_means, blocks, inputs.scale
    )
    if isinstance(inputs.world, Ranks):
        d_key, d_value = return_gradients(inputs.world, near.window, *d_tokens)
    else:
        d_key, d_value = d_tokens[0]
    return d_query, d_key, d_value, d_means[0], d_means[1]


def exchange_neighbors(inputs: Inputs, world: Ranks, near: Near) -> tuple[Tensor, ...]:
    """Return keys, values, clusters, shares and masks of the tokens that the blocks see before this rank's, and after.

    One exchange.
    """
    size, lengths = 2 * near.window, [min(length, 2 * near.window) for length in world.keys]
    mask = inputs.key_mask
    if mask is None:
        mask = torch.ones_like(near.cluster[:, :1], dtype=torch.bool)
    ends = []
    for x in (inputs.key, inputs.value, near.cluster, near.share, mask):
        missing = [0] * (2 * (x.dim() - 3)) + [max(size - x.shape[2], 0)]
        ends += [
            F.pad(x[:, :, -size:], (*missing[:-1], missing[-1], 0)),
            F.pad(x[:, :, :size], (*missing[:-1], 0, missing[-1])),
        ]
    gathered = world.gather("neighbors", *ends)
    offset, places = world.key_start % near.window, near.blocks(inputs).num_blocks * near.window
    wanted = near.window + offset, near.window + places - offset - inputs.query.shape[2]
    before, after = [], []
    for last, first in zip(gathered[::2], gathered[1::2], strict=True):
        earlier = [last[r][:, :, size - lengths[r] :] for r in range(world.rank)]
        later = [first[r][:, :, : lengths[r]] for r in range(world.rank + 1, world.size)]
        before.append(torch.cat([last[0][:, :, :0], *earlier], 2)[:, :, -wanted[0] :])
        after.append(torch.cat([first[0][:, :, :0], *later], 2)[:, :, : wanted[1]])
    return *before, *after


def return_gradients(
    world: Ranks, window: int, before: Sequence[Tensor], own: Sequence[Tensor], after: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Add to the gradients of this rank's keys and values those that other ranks have for them. One exchange."""
    size, ends = 2 * window, []
    for x, y in zip(before, after, strict=True):
        ends += [F.pad(x, (0, 0, size - x.shape[2], 0)), F.pad(y, (0, 0, 0, size - y.shape[2]))]
    gathered = world.gather("gradients of neighbors", *ends)
    start, stop = world.key_start, world.key_start + world.keys[world.rank]
    for total, of_earlier, of_later in zip(own, gathered[::2], gathered[1::2], strict=True):
        for rank in range(world.size):
            first = sum(world.keys[:rank])
            for part, at in ((of_earlier[rank], first - size), (of_later[rank], first + world.keys[rank])):
                begin, end = max(start, at), min(stop, at + size)
                if rank != world.rank and begin < end:
                    total[:, :, begin - start : end - start] += part[:, :, begin - at : end - at]
    return own[0], own[1]
