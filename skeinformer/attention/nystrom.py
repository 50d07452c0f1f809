"""Nystromformer: softmax attention through landmarks, Xiong et al. (2021)."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skeinformer.attention.base import Attention, Method, Trace
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.checks import check_count
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import gather_rows, narrow
from skeinformer.sketch.base import scatter_sum


class NystromModule(Attention):
    method: "Nystromformer"

    def __init__(self, method: "Nystromformer", **arguments: Any) -> None:
        super().__init__(method, **arguments)
        self.conv = None
        if (size := method.conv_kernel) is not None and (heads := method.num_heads) is not None:
            self.conv = nn.Conv2d(heads, heads, (size, 1), padding=(size // 2, 0), groups=heads, bias=False)

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        super().check(query, key, value)
        if self.conv is None:
            return
        if query.shape[1] != self.conv.groups:
            heads = self.conv.groups
            raise ValueError(f"query has {query.shape[1]} heads, but the convolution was built with num_heads={heads}")
        if (n := query.shape[2]) != (n_k := key.shape[2]):
            raise ValueError(f"{n} queries and {n_k} keys: the convolution of the values is added to the queries' rows")

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        output, trace = self.method.attend(inputs, noise)
        if self.conv is None:
            return output, trace
        dtype = statistics_dtype(inputs.value)
        weight, padding, groups = self.conv.weight.to(dtype), self.conv.padding, self.conv.groups
        residual = F.conv2d(inputs.value.to(dtype), weight, padding=padding, groups=groups)  # (b, h, n, p_v)
        return narrow(output.to(dtype) + residual, output.dtype), trace


class Nystromformer(Method):
    """softmax(s Q K~^T) A^+ (B V), A = softmax(s Q~ K~^T), B = softmax(s Q~ K^T), with `budget` landmarks.

    Xiong et al. (2021). Landmarks are the means of consecutive segments of the real queries (Q~) and of the real keys
    (K~). Exact for an example of at most `budget` real keys, or real queries. Otherwise rows sum to one only as far as
    the pseudo-inverse is one: `pinv_iterations` steps approach it. `conv_kernel` adds to the output a learned
    convolution of V along the sequence, one filter for each of `num_heads` heads. Padding counts as zeros there, and
    queries and keys must be equally many. Time O(n L p + L^3), memory O((n + L) p + L^2) for L landmarks.
    """

    budget: int = 256
    pinv_iterations: int = 6
    conv_kernel: int | None = None
    num_heads: int | None = None
    module: ClassVar = NystromModule

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("pinv_iterations", self.pinv_iterations)
        if self.conv_kernel is None:
            if self.num_heads is not None:
                raise ValueError(f"num_heads={self.num_heads} is for the convolution; give conv_kernel too")
            return
        check_count("conv_kernel", self.conv_kernel)
        if self.conv_kernel % 2 == 0:
            raise ValueError(f"conv_kernel must be odd, so that it is centred on a token, got {self.conv_kernel}")
        if self.num_heads is None:
            raise ValueError("conv_kernel needs num_heads: the convolution has one filter for each head")
        check_count("num_heads", self.num_heads)

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        """Compute F A^+ (B V) over the real tokens, in float32 or better: A^+ multiplies rounding errors."""
        query, key, value, key_mask, query_mask, scale = inputs[:6]
        L, original, dtype = self.budget, query.dtype, statistics_dtype(query)
        if min(query.shape[-2], key.shape[-2]) <= L:  # the landmarks of one side are its tokens
            return attend(query, from_mask(key, value, key_mask), scale), Trace()
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        query_index, query_weight, query_live, few_queries = segment(query, query_mask, L)
        key_index, key_weight, key_live, few_keys = segment(key, key_mask, L)
        landmark_query = scatter_sum(query, query_index, query_weight, L)  # (b, h, L, p)
        landmark_key = scatter_sum(key, key_index, key_weight, L)  # (b, h, L, p)
        A = landmark_scores(landmark_query, landmark_key, query_live, key_live, scale)  # (b, h, L, L)
        BV = attend(landmark_query, from_mask(key, value, key_mask), scale)  # (b, h, L, p_v)
        virtual_value = iterative_pinv(A, self.pinv_iterations) @ BV  # (b, h, L, p_v)
        # where the real keys are the landmarks, F is softmax attention itself and A^+ B the identity
        own_value = scatter_sum(value, key_index, key_weight, L)
        virtual_value = torch.where(few_keys[..., None], own_value, virtual_value)
        output = attend(query, from_mask(landmark_key, virtual_value, key_live), scale)
        if query_mask is not None:  # where the real queries are the landmarks, their rows of B V are the answer
            own_row = gather_rows(BV, query_index[..., 0].expand(query.shape[:-1]))  # (b, h, n, p_v)
            output = torch.where(few_queries[..., None], own_row, output)
        return narrow(output, original), Trace()


def segment(x: Tensor, mask: Tensor | None, size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Divide the real tokens into `size` consecutive segments: rank r of m is in floor(r size / m).

    Returns each token's segment and its weight in the mean, (b, 1, n, 1), which segments hold a token, (b, 1, size),
    and whether each real token has a segment of its own, (b, 1, 1).
    """
    real = torch.ones(1, 1, x.shape[-2], dtype=torch.bool, device=x.device) if mask is None else mask
    count = real.sum(-1, keepdim=True)  # (b, 1, 1)
    rank = real.cumsum(-1) - 1
    index = (rank * size // count.clamp(min=1)).clamp(0, size - 1)  # (b, 1, n)
    members = x.new_zeros(*real.shape[:-1], size).scatter_add(-1, index, real.to(x.dtype))  # (b, 1, size)
    weight = real / members.gather(-1, index).clamp(min=1)
    return index[..., None], weight[..., None], members > 0, count <= size


def landmark_scores(query: Tensor, key: Tensor, query_live: Tensor, key_live: Tensor, scale: float) -> Tensor:
    """A = softmax(s Q~ K~^T), (b, h, L, L); rows and columns of empty landmarks are 0, as in a pseudo-inverse."""
    scores = scale * (query @ key.mT)
    scores = scores.masked_fill(~key_live[..., None, :], torch.finfo(scores.dtype).min)
    return scores.softmax(-1) * (query_live[..., :, None] & key_live[..., None, :])


def iterative_pinv(A: Tensor, iterations: int) -> Tensor:
    """Z -> A^+ by Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from A^T / (|A|_1 |A|_inf), Razavi et al. (2014).

    Six steps invert singular values down to about 0.03 sqrt(|A|_1). Where A is singular, rounding errors grow.
    """
    norm = A.abs().sum(-2).amax(-1) * A.abs().sum(-1).amax(-1)  # (...), of each example its own
    Z = A.mT / norm.where(norm > 0, 1.0)[..., None, None]
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(iterations):
        AZ = A @ Z
        Z = 0.25 * Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ)))
    return Z
