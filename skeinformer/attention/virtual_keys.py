"""Virtual keys: a weighted set of keys and values, and softmax attention over it.

Slot j of the set counts with weight exp(log_weight_j): attending to it gives

    softmax_j( s q . k_j + log_weight_j ) v_j .

A padded key has weight 0, a key that stands for c others has weight c, a union of sets is a concatenation. An empty
slot has log weight -inf and finite contents, since a NaN in it would poison the row. The log weight carries no gradient
and is float32, or float64 where the query is; None stands for weights 1. Leading dimensions are free.
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
        if self.log_weight is None:
            return self.keys.new_zeros(self.keys.shape[:-1], dtype=statistics_dtype(self.keys))
        return self.log_weight


def from_mask(key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> VirtualKeys:
    """Give real keys weight 1 and padding weight 0. The mask is (..., m), True = real, and broadcasts over heads."""
    if key_mask is None:
        return VirtualKeys(key, value, None)
    log_weight = torch.zeros(key.shape[-2], dtype=statistics_dtype(key), device=key.device).where(key_mask, -torch.inf)
    return VirtualKeys(key, value, log_weight.expand(key.shape[:-1]))


def union(first: VirtualKeys, second: VirtualKeys) -> VirtualKeys:
    """Join two sets: attending to the result is exact, nothing has to be combined afterwards."""
    keys, values = torch.cat([first.keys, second.keys], -2), torch.cat([first.values, second.values], -2)
    return VirtualKeys(keys, values, torch.cat([first.log_weights(), second.log_weights()], -1))


def attend(query: Tensor, source: VirtualKeys, scale: float) -> Tensor:
    """Compute softmax(s q k^T + log weight) v, (..., n, p_v); 0 without a live slot. Time O(n m p), memory O(n p)."""
    return fused.attend(query, *source, scale)


def attend_with_lse(query: Tensor, source: VirtualKeys, scale: float) -> tuple[Tensor, Tensor]:
    """`attend`, and log sum_j exp(s q . k_j + log_weight_j), (..., n), without gradient, 0 without a live slot."""
    return fused.attend_with_lse(query, *source, scale)
