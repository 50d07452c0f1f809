"""Columns as a merge: the selected keys and one that stands for all others, lines 5 to 10 of Algorithm 1."""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.selection import Selection
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.kernels.clusters import weighted_row
from skeinformer.kernels.columns import column_shares
from skeinformer.kernels.merge import Virtual
from skeinformer.kernels.rows import add_rows_, gather_rows


class ColumnMerge(NamedTuple):
    """Lines 5 to 10 as linear maps: keys [K_J'; share K_J'], values [V_J'; rest V]. The last slot may be missing."""

    columns: Tensor  # (b, h, d), J'
    share: Tensor | None  # (b, h, d) of each chosen key in their mean
    rest: Tensor | None  # (b, h, n_k) of each value in the mean of the unchosen ones

    def add_gradients_(
        self, totals: tuple[Tensor | None, Tensor], key: Tensor, value: Tensor, virtual: Virtual, gradients: Virtual
    ) -> None:
        d_key, d_value = totals
        d_keys, d_values, _ = gradients
        if d_key is not None:
            if self.share is not None:
                d_keys, last = d_keys.tensor_split((-1,), -2)  # (b, h, d, p), (b, h, 1, p)
                d_keys = d_keys.addcmul(self.share[..., None].to(last.dtype), last)
            add_rows_(d_key, self.columns, d_keys.to(d_key.dtype))
        if self.rest is not None:
            d_values, last = d_values.tensor_split((-1,), -2)
            if last.dtype == d_value.dtype:
                d_value.addcmul_(self.rest[..., None].to(last.dtype), last)
            else:  # small shares and large sums meet in the wider precision
                d_value += (self.rest[..., None] * last).to(d_value.dtype)
        add_rows_(d_value, self.columns, d_values.to(d_value.dtype))


def merge_columns(source: VirtualKeys, chosen: Selection, with_rest: bool = True) -> tuple[ColumnMerge, VirtualKeys]:
    """The chosen slots with their weights, and with the rest one slot for all others: (b, h, d + 1, p).

    That slot has the mean chosen key (its score is log g, line 8), the mean unchosen value (v / (n - d), line 10) and
    the weight of the unchosen: m - d for a source of weights 1, 0 where everything was chosen. Time O(n p).
    """
    keys, values = gather_rows(source.keys, chosen.indices), gather_rows(source.values, chosen.indices)  # (b, h, d, p)
    if not with_rest:
        log_weight = source.log_weights().gather(-1, chosen.indices).where(chosen.live, -torch.inf)  # (b, h, d)
        return ColumnMerge(chosen.indices, None, None), VirtualKeys(keys, values, log_weight)
    log_weight, share, rest = column_shares(source.keys, source.log_weight, *chosen)
    keys = torch.cat([keys, weighted_row(keys, share)], -2)
    values = torch.cat([values, weighted_row(source.values, rest)], -2)
    return ColumnMerge(chosen.indices, share, rest), VirtualKeys(keys, values, log_weight)
