"""Methods whose keys are only summed: the mean of the values, and linear attention. The exchange is that sum."""

import torch
from torch import Tensor

from skeinformer.distributed.agreement import Shares
from skeinformer.distributed.collectives import gather_over, summed


def mean_over_shares(total: Tensor, count: Tensor, shares: Shares) -> Tensor:
    """The sum of the values, (b, h, 1, p_v), over the number of real ones, (b,): those of all ranks."""
    b, h, _, p_v = total.shape
    both = torch.cat([total.reshape(b, -1), count[:, None].to(total.dtype)], -1)
    both = summed(both, shares.group)
    return both[:, :-1].view(b, h, 1, p_v) / both[:, -1].clamp(min=1)[:, None, None, None]


def features_over_shares(
    context: Tensor, log_mass: Tensor, empty: Tensor | None, shares: Shares
) -> tuple[Tensor, Tensor]:
    """u_f and c_f of `linear.read_keys` over the keys of all ranks, from those of each rank, with gradients.

    (b, h, m, p_v), (b, h, m). c = log sum_r exp(c_r), u = sum_r exp(c_r - c) u_r. empty: (b, 1, 1), where this rank has
    no key.
    """
    if empty is not None:
        log_mass = log_mass.masked_fill(empty, -torch.inf)
    (every,) = gather_over(shares.group, "feature sums", log_mass)
    largest = every.amax(0)
    largest = largest.where(largest > -torch.inf, 0)  # no rank has a key
    share = (log_mass - largest).exp()[..., None]  # (b, h, m, 1)
    sums = summed(torch.cat([share * context, share], -1), shares.group)
    mass = sums[..., -1].clamp(min=torch.finfo(sums.dtype).tiny)
    return sums[..., :-1] / mass[..., None], largest + mass.log()
