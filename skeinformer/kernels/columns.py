"""What chosen columns and the others weigh."""

import math

import torch
from torch import Tensor

from skeinformer.kernels.choice import fast_form, statistics_dtype


def shares_of_weights(
    keys: Tensor, log_weight: Tensor | None, columns: Tensor, live: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`column_shares` for any weights."""
    if log_weight is None:
        log_weight = keys.new_zeros(keys.shape[:-1], dtype=statistics_dtype(keys))
    chosen = log_weight.gather(-1, columns).where(live, -torch.inf)  # (b, h, d)
    largest = log_weight.amax(-1, keepdim=True).clamp(min=-1e4)  # (b, h, 1), finite where nothing is live
    rest = (log_weight - largest).exp().scatter(-1, columns, 0)  # (b, h, n)
    share = (chosen - largest).exp_()  # (b, h, d)
    total, chosen_total = rest.sum(-1, keepdim=True), share.sum(-1, keepdim=True)  # (b, h, 1)
    slots = torch.cat([chosen, largest + total.log()], -1)
    smallest = torch.finfo(rest.dtype).tiny
    return slots, share.div_(chosen_total.clamp(min=smallest)), rest.div_(total.clamp(min=smallest))


@fast_form(shares_of_weights, differentiable=True)
def column_shares(
    keys: Tensor, log_weight: Tensor | None, columns: Tensor, live: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log weights of the chosen slots and of one for the rest, shares of the chosen, and of the rest, in their means.

    (b, h, n, p), (b, h, n), (b, h, d), (b, h, d) -> (b, h, d + 1), (b, h, d), (b, h, n). Where every key weighs 1 the
    numbers are known.
    """
    if log_weight is not None:
        return shares_of_weights(keys, log_weight, columns, live)
    *batch, d = columns.shape
    left, dtype = keys.shape[-2] - d, statistics_dtype(keys)
    slots = keys.new_zeros(*batch, d + 1, dtype=dtype)
    slots[..., -1] = math.log(left) if left else -math.inf
    rest = slots.new_full((*batch, d + left), 1 / max(left, 1)).scatter_(-1, columns, 0)
    return slots, slots.new_full((), 1 / d).expand(columns.shape), rest
