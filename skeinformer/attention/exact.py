"""Softmax attention (Vaswani et al. 2017), and the mean of the values, its rank-one baseline in Chen et al. (2022)."""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import Attention, Noise, default_scale
from skeinformer.attention.virtual_keys import attend, from_mask, statistics_dtype
from skeinformer.noise import Rand
from skeinformer.registry import check_number


class DropoutNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    weights: Tensor  # (b, h, n, n_k): a weight whose number is below the dropout rate is dropped


class Softmax(Attention):
    """softmax(s Q K^T) V, on the fused kernel: time O(n^2 p), memory O(n p).

    `dropout` acts on the attention weights in training, as in the paper's Standard; it needs the n x n matrix.
    """

    def __init__(
        self,
        *,
        head_dim: int,
        max_len: int | None = None,
        budget: int = 256,
        seed: int | None = None,
        dropout: float = 0.0,
        scale: float | None = None,
    ) -> None:
        super().__init__(head_dim=head_dim, max_len=max_len, budget=budget, seed=seed)
        if not 0 <= check_number("dropout", dropout, "at least 0 and below 1") < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
        self.dropout = dropout
        self.scale = scale

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        if not self.training or self.dropout == 0:
            return None
        return DropoutNoise(rand(query.shape[-2], key.shape[-2]))

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        noise: tuple[Tensor] | None,
    ) -> Tensor:
        source = from_mask(key, value, key_mask)
        scale = default_scale(query, self.scale)
        if noise is None:
            return attend(query, source, scale)
        dtype = statistics_dtype(query)
        scores = scale * (query.to(dtype) @ key.to(dtype).mT)  # (b, h, n, n_k)
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[..., None, :], torch.finfo(dtype).min)
        weights = scores.softmax(-1).masked_fill(noise[0] < self.dropout, 0)
        output = weights @ (value.to(dtype) / (1 - self.dropout))  # all keys padded: values are 0, so is the output
        return output.to(query.dtype)

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, dropout={self.dropout}"


class VMean(Attention):
    """(1/m) 1 1^T V over the m real keys: every row is the mean of V. Time and memory O(n p).

    Adaptive row normalization without any selected column; one virtual key of score 0.
    """

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_mask: Tensor | None,
        query_mask: Tensor | None,
        noise: None,
    ) -> Tensor:
        total = value.sum(-2, keepdim=True, dtype=statistics_dtype(value))  # (b, h, 1, p_v)
        count = value.shape[-2] if key_mask is None else key_mask.sum(-1)[..., None, None].clamp(min=1)
        return (total / count).to(value.dtype).expand(*query.shape[:-1], -1).contiguous()
