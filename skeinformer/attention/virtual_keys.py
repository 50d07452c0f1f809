"""Virtual keys: a weighted set of keys and values, and softmax attention over it.

Slot j of the set counts with weight exp(log_weight_j): attending to it gives

    softmax_j( s q . k_j + log_weight_j ) v_j .

A padded key has weight 0, a key that stands for c others has weight c, a union of sets is a concatenation. The
contract: an empty slot has log weight -inf and finite contents (a NaN in it would poison the row); the log weight
carries no gradient (one that does takes the kernel that stores the n x m matrix) and is float32, or float64 where the
query is; None stands for weights 1, so that the kernel is spared a mask of zeros; keys and values carry gradients to
everything they were made from. Leading dimensions are free.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels import fused
from skeinformer.kernels.choice import statistics_dtype


class VirtualKeys(NamedTuple):
    """m weighted slots."""

    keys: Tensor  # (..., m, p)
    values: Tensor  # (..., m, p_v)
    log_weight: Tensor | None  # (..., m), None where all weights are 1

    def log_weights(self) -> Tensor:
        """The log weights as a tensor, (..., m)."""
        if self.log_weight is None:
            return self.keys.new_zeros(self.keys.shape[:-1], dtype=statistics_dtype(self.keys))
        return self.log_weight


def from_mask(key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> VirtualKeys:
    """Real keys weigh 1, padding 0. The mask is (..., m), True = real, and broadcasts over heads."""
    if key_mask is None:
        return VirtualKeys(key, value, None)
    log_weight = torch.zeros(key.shape[-2], dtype=statistics_dtype(key), device=key.device).where(key_mask, -torch.inf)
    return VirtualKeys(key, value, log_weight.expand(key.shape[:-1]))


def cat(first: VirtualKeys, second: VirtualKeys) -> VirtualKeys:
    """The union of two sets: attending to it is exact, nothing has to be merged afterwards."""
    return VirtualKeys(
        torch.cat([first.keys, second.keys], -2),
        torch.cat([first.values, second.values], -2),
        torch.cat([first.log_weights(), second.log_weights()], -1),
    )


def attend(query: Tensor, source: VirtualKeys, scale: float) -> Tensor:
    """softmax(s q k^T + log weight) v, (..., n, p_v). No live slot gives 0. Time O(n m p), memory O(n p)."""
    return fused.attend(query, *source, scale)


def attend_with_normalizer(query: Tensor, source: VirtualKeys, scale: float) -> tuple[Tensor, Tensor]:
    """`attend`, and log sum_j exp(s q . k_j + log_weight_j), (..., n), without gradient and 0 where no slot is live."""
    return fused.attend_with_normalizer(query, *source, scale)
