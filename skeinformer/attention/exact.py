"""Softmax attention (Vaswani et al. 2017), and the mean of the values, its rank-one baseline in Chen et al. (2022)."""

from typing import ClassVar

import torch
from torch import Tensor

from skeinformer.attention.base import Attention, Call, Method, Trace
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.rows import count_real
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.checks import check_number
from skeinformer.kernels.choice import is_captured, statistics_dtype
from skeinformer.kernels.rows import narrow
from skeinformer.noise import Rand


class SoftmaxModule(Attention):
    """Softmax attention that drops weights in training only."""

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        return self.method.noise(query, key, rand) if self.training else ()

    def seed_of_call(self, call: Call) -> int | None:
        # with a seed a graph lets the method draw, which does not know whether the module is in training
        return None if is_captured() and not self.training else super().seed_of_call(call)


class Softmax(Method):
    """softmax(s Q K^T) V, on the fused kernel: time O(n^2 p), memory O(n p).

    `dropout` acts on the attention weights in training, as in the paper's Standard; it needs the n x n matrix. The
    budget is not used.
    """

    budget: int = 256
    dropout: float = 0.0
    module: ClassVar = SoftmaxModule

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= check_number("dropout", self.dropout, "at least 0 and below 1") < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Draw (b, h, n, n_k) numbers: a weight whose number is below the dropout rate is dropped."""
        return (rand(query.shape[-2], key.shape[-2]),) if self.dropout else ()

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        query, key, value, key_mask = inputs[:4]
        if not noise:
            return attend(query, from_mask(key, value, key_mask), inputs.scale), Trace()
        dtype = statistics_dtype(query)
        scores = inputs.scale * (query.to(dtype) @ key.to(dtype).mT)  # (b, h, n, n_k)
        if key_mask is not None:
            scores = scores.masked_fill(~key_mask[..., None, :], torch.finfo(dtype).min)
        weights = scores.softmax(-1).masked_fill(noise[0] < self.dropout, 0)
        # where all keys are padded the values are 0, and so is the output
        return narrow(weights @ (value.to(dtype) / (1 - self.dropout)), query.dtype), Trace()


class VMean(Method):
    """(1/m) 1 1^T V over the m real keys: every row is the mean of V. Time and memory O(n p)."""

    budget: int = 256
    takes_group: ClassVar[bool] = True

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        query, _, value, key_mask = inputs[:4]
        b, h, _, p_v = value.shape
        total = value.sum(-2, dtype=statistics_dtype(value))  # (b, h, p_v)
        count = count_real(value, key_mask).to(total.dtype).expand(b, 1, 1)
        sums = inputs.world.sum_with_gradients(torch.cat([total.flatten(1), count[..., 0]], -1))  # (b, h p_v + 1)
        mean = (sums[:, :-1] / sums[:, -1:].clamp(min=1)).view(b, h, 1, p_v)
        return mean.to(value.dtype).expand(*query.shape[:-1], -1).contiguous(), Trace()
