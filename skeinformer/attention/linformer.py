"""Linformer: attention over d learned combinations of the keys and of the values (Wang et al. 2020)."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from skeinformer.attention.base import Attention, Method, Trace
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import narrow


class LinformerModule(Attention):
    method: "Linformer"
    key_projection: nn.Parameter  # E^T, (max_len, d)
    value_projection: nn.Parameter | None  # F^T, (max_len, d); None where it is E^T

    def __init__(self, method: "Linformer", **arguments: Any) -> None:
        super().__init__(method, **arguments)
        if self.max_len is None:
            raise ValueError("Linformer has a row for each position: give it max_len, the longest sequence; got None")
        self.key_projection = nn.Parameter(torch.empty(self.max_len, method.budget))
        own = None if method.share_kv else nn.Parameter(torch.empty_like(self.key_projection))
        self.register_parameter("value_projection", own)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw E and F from torch's global state: N(0, 1/d), so that E[E^T E] = I."""
        for projection in self.parameters():
            nn.init.normal_(projection, std=self.method.budget**-0.5)

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        query, key, value = inputs[:3]
        n = key.shape[-2]
        if n > len(self.key_projection):
            raise ValueError(f"got {n} keys, but this Linformer was built with max_len={self.max_len}")
        dtype = statistics_dtype(query)  # sums of n_k keys overflow half precision
        value_projection = self.key_projection if self.value_projection is None else self.value_projection
        # padded keys and values are 0 and add nothing; without a real key the result is 0
        keys = self.key_projection[:n].to(dtype).mT @ key.to(dtype)  # (b, h, d, p)
        values = value_projection[:n].to(dtype).mT @ value.to(dtype)  # (b, h, d, p_v)
        return narrow(attend(query.to(dtype), from_mask(keys, values), inputs.scale), query.dtype), Trace()


class Linformer(Method):
    """softmax(s Q (E K)^T) F V with learned E and F of d = `budget` rows, for up to `max_len` keys.

    Wang et al. (2020), section 4: attention over d virtual keys, not the sketch D^-1 A S S^T V of "sketched". E and F
    serve all heads, and with `share_kv` one matrix is both, as in Chen et al. (2022). They start as independent N(0,
    1/d). A sequence of n keys uses their first n columns, so a token's place matters and left padding is not right
    padding. Padded keys add nothing to any combination, but the softmax is always over all d combinations, and what
    they give to the real keys does not sum to one. Time O((n + n_k) d p), memory O((n + n_k + d) p) and the max_len x d
    parameters.
    """

    budget: int = 256
    share_kv: bool = True
    module: ClassVar = LinformerModule
