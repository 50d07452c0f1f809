"""Columns as a merge: the selected keys and one that stands for all others, lines 5 to 10 of Algorithm 1."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.pilots import Selection
from skeinformer.attention.virtual_keys import VirtualKeys, statistics_dtype
from skeinformer.kernels.rows import add_rows_, gather_rows, is_one_batch, plain_cpu


class ColumnMerge(NamedTuple):
    """Lines 5 to 10 as linear maps: keys [K_J'; share K_J'], values [V_J'; rest V]. The last slot may be missing."""

    columns: Tensor  # (b, h, d), J'
    share: Tensor | None  # (b, h, d) of each chosen key in their mean
    rest: Tensor | None  # (b, h, n_k) of each value in the mean of the unchosen ones

    def keys(self, key: Tensor) -> Tensor:
        chosen = gather_rows(key, self.columns)  # (b, h, d, p)
        return chosen if self.share is None else torch.cat([chosen, _weigh(self.share, chosen)], -2)

    def values(self, value: Tensor) -> Tensor:
        chosen = gather_rows(value, self.columns)
        return chosen if self.rest is None else torch.cat([chosen, _weigh(self.rest, value)], -2)

    def add_key_gradient_(self, total: Tensor, gradient: Tensor) -> None:
        if self.share is not None:
            gradient, last = gradient.tensor_split((-1,), -2)  # (b, h, d, p), (b, h, 1, p)
            gradient = gradient.addcmul(self.share[..., None].to(last.dtype), last)
        add_rows_(total, self.columns, gradient)

    def add_value_gradient_(self, total: Tensor, gradient: Tensor) -> None:
        if self.rest is not None:
            gradient, last = gradient.tensor_split((-1,), -2)
            total.addcmul_(self.rest[..., None].to(last.dtype), last)
        add_rows_(total, self.columns, gradient)


def merge_columns(source: VirtualKeys, chosen: Selection, *, with_rest: bool = True) -> tuple[ColumnMerge, VirtualKeys]:
    """The chosen slots with their weights, and with the rest one slot for all others: (b, h, d + 1, p).

    That slot has the mean chosen key (its score is log g, line 8), the mean unchosen value (v / (n - d), line 10) and
    the weight of the unchosen: m - d for a source of weights 1, 0 where everything was chosen. Time O(n p).
    """
    if source.log_weight is None and plain_cpu(source.keys):
        log_weight, share, rest = _equal_weights(source, chosen.indices, with_rest)
    else:
        log_weight, share, rest = _weights(source, chosen, with_rest)
    merge = ColumnMerge(chosen.indices, share, rest)
    return merge, VirtualKeys(merge.keys(source.keys), merge.values(source.values), log_weight)


def _weights(source: VirtualKeys, chosen: Selection, with_rest: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The log weights of the slots, and the shares of the chosen and of the rest in their means."""
    log_weights = source.log_weights()
    log_weight = log_weights.gather(-1, chosen.indices).where(chosen.live, -torch.inf)  # (b, h, d)
    if not with_rest:
        return log_weight, None, None
    largest = log_weights.amax(-1, keepdim=True).clamp(min=-1e4)  # (b, h, 1), finite where nothing is live
    rest = (log_weights - largest).exp().scatter(-1, chosen.indices, 0)  # (b, h, n_k)
    share = (log_weight - largest).exp_()  # (b, h, d)
    total, chosen_total = rest.sum(-1, keepdim=True), share.sum(-1, keepdim=True)  # (b, h, 1)
    log_weight = torch.cat([log_weight, largest + total.log()], -1)
    smallest = torch.finfo(rest.dtype).tiny
    return log_weight, share.div_(chosen_total.clamp(min=smallest)), rest.div_(total.clamp(min=smallest))


def _equal_weights(
    source: VirtualKeys, columns: Tensor, with_rest: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """`_weights` where every key weighs 1: the numbers are known."""
    *batch, d = columns.shape
    left, dtype = source.keys.shape[-2] - d, statistics_dtype(source.keys)
    log_weight = source.keys.new_zeros(*batch, d + with_rest, dtype=dtype)
    if not with_rest:
        return log_weight, None, None
    log_weight[..., -1] = math.log(left) if left else -math.inf
    rest = log_weight.new_full((*batch, d + left), 1 / max(left, 1)).scatter_(-1, columns, 0)
    return log_weight, log_weight.new_full((), 1 / d).expand(columns.shape), rest


def _weigh(weight: Tensor, x: Tensor) -> Tensor:
    """sum_i weight_i x_i, summed in the precision of the weights: (..., n), (..., n, p) -> (..., 1, p)."""
    weight, wide = weight[..., None, :], x.to(weight.dtype)
    if x.dim() == 4 and plain_cpu(x) and not is_one_batch(wide):  # a product of all examples would copy x first
        return torch.stack([weight[i] @ wide[i] for i in range(len(x))]).to(x.dtype)
    return (weight @ wide).to(x.dtype)
