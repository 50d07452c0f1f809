"""Softmax attention (Vaswani et al. 2017), and the mean of the values, its rank-one baseline in Chen et al. (2022)."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.inputs import Inputs, Noise, default_scale
from skeinformer.attention.sharded.pilots import count_here
from skeinformer.attention.sharded.sums import mean_over_shares
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.distributed.agreement import Shares
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.ranges import narrow
from skeinformer.noise import Rand
from skeinformer.registry import check_number


class SoftmaxOptions(NamedTuple):
    """What exact attention is told beside its inputs; the budget is not used."""

    budget: int = 256
    dropout: float = 0.0
    scale: float | None = None


class DropoutNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    weights: Tensor  # (b, h, n, n_k): a weight whose number is below the dropout rate is dropped


def softmax_attention(inputs: Inputs, noise: tuple[Tensor] | None, options: SoftmaxOptions) -> tuple[Tensor, Trace]:
    """softmax(s Q K^T) V, with noise also dropout on the weights."""
    query, key, value, key_mask, _ = inputs
    scale = default_scale(query, options.scale)
    if noise is None:
        return attend(query, from_mask(key, value, key_mask), scale), Trace()
    dtype = statistics_dtype(query)
    scores = scale * (query.to(dtype) @ key.to(dtype).mT)  # (b, h, n, n_k)
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[..., None, :], torch.finfo(dtype).min)
    weights = scores.softmax(-1).masked_fill(noise[0] < options.dropout, 0)
    output = weights @ (value.to(dtype) / (1 - options.dropout))  # all keys padded: values are 0, so is the output
    return narrow(output, query.dtype), Trace()


class Softmax(Attention):
    """softmax(s Q K^T) V, on the fused kernel: time O(n^2 p), memory O(n p).

    `dropout` acts on the attention weights in training, as in the paper's Standard; it needs the n x n matrix.
    """

    Options = SoftmaxOptions
    compute = staticmethod(softmax_attention)

    @staticmethod
    def complete(options: SoftmaxOptions) -> SoftmaxOptions:
        if not 0 <= check_number("dropout", options.dropout, "at least 0 and below 1") < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {options.dropout}")
        return options

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        if not self.training or self.options.dropout == 0:
            return None
        return DropoutNoise(rand(query.shape[-2], key.shape[-2]))


def mean_of_values(inputs: Inputs, noise: None, options: Any, shares: Shares | None = None) -> tuple[Tensor, Trace]:
    """(1/m) 1 1^T V over the m real keys."""
    value, key_mask = inputs.value, inputs.key_mask
    total = value.sum(-2, keepdim=True, dtype=statistics_dtype(value))  # (b, h, 1, p_v)
    if shares is not None:  # other ranks hold values too
        mean = mean_over_shares(total, count_here(value, key_mask), shares)
    else:
        mean = total / (value.shape[-2] if key_mask is None else key_mask.sum(-1)[..., None, None].clamp(min=1))
    return mean.to(value.dtype).expand(*inputs.query.shape[:-1], -1).contiguous(), Trace()


class VMean(Attention):
    """(1/m) 1 1^T V over the m real keys: every row is the mean of V. Time and memory O(n p).

    Adaptive row normalization without any selected column; one virtual key of score 0. The budget is not used.
    """

    compute = compute_shares = staticmethod(mean_of_values)
