"""Nystromformer: softmax attention through landmarks, Xiong et al. (2021).

With L landmarks, the means of L consecutive segments of the real queries (Q~) and of the real keys (K~),

    out = F A^+ (B V),   F = softmax(s Q K~^T),   A = softmax(s Q~ K~^T),   B = softmax(s Q~ K^T).

That is attention of Q over L virtual keys K~ with the values A^+ (B V), and B V is attention as well: two calls of the
fused kernel around an L x L matrix.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.inputs import Inputs, default_scale
from skeinformer.attention.virtual_keys import attend, from_mask
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.ranges import narrow
from skeinformer.kernels.rows import gather_rows
from skeinformer.registry import check_count
from skeinformer.sketch.base import scatter_sum


class Segments(NamedTuple):
    """L runs of consecutive real tokens, as equal as can be."""

    of_token: Tensor  # (b, 1, n, 1), in [0, L)
    weight: Tensor  # (b, 1, n, 1), 1 / size of its segment; 0 for padding
    live: Tensor  # (b, 1, L), which segments hold a token
    whole: Tensor  # (b, 1, 1), whether every real token has a segment of its own

    def means(self, x: Tensor) -> Tensor:
        """(b, h, n, p) -> (b, h, L, p), zero where a segment is empty."""
        return scatter_sum(x, self.of_token, self.weight, self.live.shape[-1])


class NystromOptions(NamedTuple):
    """What Nystromformer is told beside its inputs."""

    budget: int = 256
    pinv_iterations: int = 6
    conv_kernel: int | None = None
    num_heads: int | None = None
    scale: float | None = None


class Nystromformer(Attention):
    """softmax(s Q K~^T) A^+ softmax(s Q~ K^T) V of Xiong et al. (2021), `budget` landmarks.

    Exact for an example of at most that many real keys, or real queries. Otherwise rows sum to one only as far as the
    pseudo-inverse is one: `pinv_iterations` steps approach it, and the error they leave can exceed that of the
    landmarks. `conv_kernel` adds to the output a learned convolution of V along the sequence, one filter for each of
    `num_heads` heads. Padding counts as zeros, and queries and keys must then be equally many.
    Time O(n L p + L^3), memory O((n + L) p + L^2).
    """

    Options = NystromOptions

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        kernel, heads = self.options.conv_kernel, self.options.num_heads
        self.conv = None if kernel is None else depthwise_conv(kernel, heads)

    @staticmethod
    def complete(options: NystromOptions) -> NystromOptions:
        check_count("pinv_iterations", options.pinv_iterations)
        if options.conv_kernel is None and options.num_heads is not None:
            raise ValueError(
                f"num_heads={options.num_heads} is for the convolution; give conv_kernel too, or leave it out"
            )
        return options

    def check(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        if self.conv is None or not all(isinstance(x, Tensor) and x.dim() == 4 for x in (query, key)):
            return
        if query.shape[1] != self.conv.groups:
            raise ValueError(
                f"query has {query.shape[1]} heads, but the convolution was built with num_heads={self.conv.groups}"
            )
        if query.shape[2] != key.shape[2]:
            raise ValueError(
                f"{query.shape[2]} queries and {key.shape[2]} keys: the convolution of the values is added to the "
                "queries' rows and needs as many of each; build without conv_kernel for cross-attention"
            )

    def attend(self, inputs: Inputs, noise: None) -> tuple[Tensor, Trace]:
        query, key, value, key_mask, query_mask = inputs
        scale, size, iterations = default_scale(query, self.options.scale), self.budget, self.options.pinv_iterations
        if min(query.shape[-2], key.shape[-2]) <= size:  # the landmarks of one side are its tokens
            output = attend(query, from_mask(key, value, key_mask), scale)
        else:
            output = nystrom_attention(query, key, value, key_mask, query_mask, size, iterations, scale)
        if self.conv is None:
            return output, Trace()
        wide = statistics_dtype(value)
        weight, padding = self.conv.weight.to(wide), self.conv.padding
        residual = F.conv2d(value.to(wide), weight, padding=padding, groups=self.conv.groups)  # (b, h, n, p_v)
        return narrow(output.to(wide) + residual, query.dtype), Trace()


def depthwise_conv(conv_kernel: int, num_heads: int | None) -> nn.Conv2d:
    """One filter along the sequence for each head, without bias."""
    check_count("conv_kernel", conv_kernel)
    if conv_kernel % 2 == 0:
        raise ValueError(f"conv_kernel must be odd, so that it is centred on a token, got {conv_kernel}")
    if num_heads is None:
        raise ValueError("conv_kernel needs num_heads: the convolution has one filter for each head")
    check_count("num_heads", num_heads)
    padding = (conv_kernel // 2, 0)
    return nn.Conv2d(num_heads, num_heads, (conv_kernel, 1), padding=padding, groups=num_heads, bias=False)


def nystrom_attention(
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h, n_k, p)
    value: Tensor,  # (b, h, n_k, p_v)
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    num_landmarks: int,
    pinv_iterations: int,
    scale: float,
) -> Tensor:
    """F A^+ (B V) of Xiong et al. (2021), over the real tokens: (b, h, n, p_v).

    Half precision is computed in float32 throughout: A^+ multiplies rounding errors. Where an example's real keys are
    at most as many as landmarks they are the landmarks, F is softmax attention itself and A^+ B the identity: the
    virtual values are then V, not what an inverse of finite accuracy makes of it.
    """
    given, dtype = query.dtype, statistics_dtype(query)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    query_segments = segment(query, query_mask, num_landmarks)
    key_segments = segment(key, key_mask, num_landmarks)
    landmark_query, landmark_key = query_segments.means(query), key_segments.means(key)  # (b, h, L, p)
    A = landmark_scores(landmark_query, landmark_key, query_segments.live, key_segments.live, scale)  # (b, h, L, L)
    BV = attend(landmark_query, from_mask(key, value, key_mask), scale)  # (b, h, L, p_v)
    virtual_value = iterative_pinv(A, pinv_iterations) @ BV  # (b, h, L, p_v)
    virtual_value = torch.where(key_segments.whole[..., None], key_segments.means(value), virtual_value)
    output = attend(query, from_mask(landmark_key, virtual_value, key_segments.live), scale)
    if query_mask is not None:  # where the real queries are the landmarks, their rows of B V are the answer
        own = gather_rows(BV, query_segments.of_token[..., 0].expand(query.shape[:-1]))  # (b, h, n, p_v)
        output = torch.where(query_segments.whole[..., None], own, output)
    return narrow(output, given)


def segment(x: Tensor, mask: Tensor | None, size: int) -> Segments:
    """Token of rank r among m real ones belongs to segment floor(r L / m). O(n).

    Fewer tokens than segments: each has its own, and the others are empty.
    """
    real = torch.ones(1, 1, x.shape[-2], dtype=torch.bool, device=x.device) if mask is None else mask
    count = real.sum(-1, keepdim=True)  # (b, 1, 1)
    rank = real.cumsum(-1) - 1
    index = (rank * size // count.clamp(min=1)).clamp(0, size - 1)  # (b, 1, n)
    members = x.new_zeros(*real.shape[:-1], size).scatter_add(-1, index, real.to(x.dtype))  # (b, 1, L)
    weight = real / members.gather(-1, index).clamp(min=1)
    return Segments(index[..., None], weight[..., None], members > 0, count <= size)


def landmark_scores(query: Tensor, key: Tensor, query_live: Tensor, key_live: Tensor, scale: float) -> Tensor:
    """A = softmax(s Q~ K~^T), (b, h, L, L), with zero rows and columns for empty landmarks.

    A pseudo-inverse has zeros where its matrix has them, so that empty landmarks have no effect.
    """
    scores = scale * (query @ key.mT)
    scores = scores.masked_fill(~key_live[..., None, :], torch.finfo(scores.dtype).min)
    return scores.softmax(-1) * (query_live[..., :, None] & key_live[..., None, :])


def iterative_pinv(A: Tensor, iterations: int) -> Tensor:
    """Z -> A^+ by Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4, of third order, from A^T / (|A|_1 |A|_inf).

    The iteration that Xiong et al. (2021) take from Razavi et al. (2014). The norms are those of each matrix, never a
    maximum over the batch: an example's result does not depend on its mates. An iteration multiplies what is small in
    A Z by 13/4, so that six invert singular values down to about 0.03 sqrt(|A|_1). Where A is singular, rounding errors
    grow at the same rate: in float32 more than a dozen iterations are not safe. O(L^3) an iteration.
    """
    norm = A.abs().sum(-2).amax(-1) * A.abs().sum(-1).amax(-1)  # (...)
    Z = A.mT / norm.where(norm > 0, 1.0)[..., None, None]
    identity = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    for _ in range(iterations):
        AZ = A @ Z
        Z = 0.25 * Z @ (13 * identity - AZ @ (15 * identity - AZ @ (7 * identity - AZ)))
    return Z
