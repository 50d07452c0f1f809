"""Linformer: attention over d learned combinations of the keys and of the values (Wang et al. 2020).

The reduced form in Chen et al. (2022), section 3: softmax((s Q K^T) S) S^T V with S an n x d matrix. As the score of a
combination of keys is the combination of their scores, it is softmax attention over d virtual keys S^T K of weight 1.
It is not the sketch D^-1 A S S^T V, where S comes after the exponential: that one is `Sketched`.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.ranges import narrow


class LinformerOptions(NamedTuple):
    """What Linformer is told beside its inputs."""

    budget: int = 256
    share_kv: bool = True
    scale: float | None = None


class Linformer(Attention):
    """softmax(s Q (E K)^T) F V with learned E and F of d = `budget` rows, for up to `max_len` keys.

    Wang et al. (2020), section 4. E and F serve all heads (headwise sharing), and with `share_kv` one matrix is both
    (key-value sharing), as in Chen et al. (2022). They start as Johnson-Lindenstrauss maps, independent N(0, 1/d), and
    are stored transposed, one row for each position. A sequence of n keys uses the first n rows, so a token's place
    matters and left padding is not right padding. Padded keys add nothing to any combination, but the softmax is always
    over all d combinations, and what they give to the real keys does not sum to one.
    Time O((n + n_k) d p), memory O((n + n_k + d) p) beside the max_len x d parameters.
    """

    key_projection: nn.Parameter  # E^T, (max_len, d)
    value_projection: nn.Parameter | None  # F^T, (max_len, d); None where it is E^T

    Options = LinformerOptions

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        if self.max_len is None:
            raise ValueError(
                "Linformer has parameters for each position: give it max_len, the longest sequence; got None"
            )
        shape = (self.max_len, self.budget)
        self.key_projection = nn.Parameter(torch.empty(shape))
        own = None if self.options.share_kv else nn.Parameter(torch.empty(shape))
        self.register_parameter("value_projection", own)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw E and F anew from torch's global state: N(0, 1/d), so that E[E^T E] = I."""
        for projection in self.parameters():
            nn.init.normal_(projection, std=self.budget**-0.5)

    def attend(self, inputs: Inputs, noise: None) -> tuple[Tensor, Trace]:
        query, key, value, _, _ = inputs
        n = key.shape[-2]
        if n > len(self.key_projection):
            raise ValueError(
                f"got {n} keys, but this Linformer was built with max_len={self.max_len}; give it a larger one"
            )
        value_projection = self.key_projection if self.value_projection is None else self.value_projection
        scale = default_scale(query, self.options.scale)
        output = projected_attention(query, key, value, self.key_projection[:n], value_projection[:n], scale)
        return output, Trace()


def projected_attention(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    value: Tensor,  # (b, h, n_k, p_v)
    key_projection: Tensor,  # (n_k, d)
    value_projection: Tensor,  # (n_k, d)
    scale: float,
) -> Tensor:
    """softmax(s Q (E K)^T) F V for E and F given transposed, (b, h, n, p_v). Padded keys and values must be 0.

    Without a real key E K and F V are 0, and so is the result. Time O((n + n_k) d p), no n x d matrix.
    """
    dtype = statistics_dtype(query)  # sums of n_k keys overflow half precision
    keys = key_projection.to(dtype).mT @ key.to(dtype)  # (b, h, d, p)
    values = value_projection.to(dtype).mT @ value.to(dtype)  # (b, h, d, p_v)
    return narrow(attend(query.to(dtype), from_mask(keys, values), scale), query.dtype)
