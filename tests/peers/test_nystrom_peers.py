"""nystrom-attention and transformers' Nystromformer beside ours: same weights, same output, and their defects."""

from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention import Attention
from tests.helpers import generator

pytestmark = pytest.mark.peers

P = 8
LANDMARKS = 6
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def split(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, P)).transpose(1, 2)  # (b, h, n, p)


def merge(x: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)  # (b, n, h * p)


def tokens(b: int, n: int, heads: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(b, n, heads * P, generator=generator(seed))


def ours(heads: int, conv: Tensor | None = None) -> Attention:
    """With the peer's convolution weights, (h, 1, kernel, 1), where it has them."""
    if conv is None:
        return build("nystromformer", head_dim=P, budget=LANDMARKS)
    module = build("nystromformer", head_dim=P, budget=LANDMARKS, conv_kernel=conv.shape[2], num_heads=heads)
    module.load_state_dict({"conv.weight": conv})
    return module


def lucidrains(heads: int, conv_kernel: int | None = None, scale: float = 1.0) -> Any:
    """nystrom-attention's layer without its output projection; queries and keys multiplied to make A less uniform."""
    package = pytest.importorskip("nystrom_attention", reason="nystrom-attention is not installed")
    options = {} if conv_kernel is None else {"residual_conv_kernel": conv_kernel}
    layer = package.NystromAttention(
        heads * P, dim_head=P, heads=heads, num_landmarks=LANDMARKS, residual=conv_kernel is not None, **options
    )
    layer.to_out = torch.nn.Identity()
    with torch.no_grad():
        layer.to_qkv.weight[: 2 * heads * P] *= scale
    return layer


def beside(layer: Any, x: Tensor, **masks: Tensor) -> Tensor:
    """Ours with the weights of nystrom-attention's layer."""
    q, k, v = (split(y, layer.heads) for y in layer.to_qkv(x).chunk(3, -1))
    conv = layer.res_conv.weight if layer.residual else None
    return merge(ours(layer.heads, conv)(q, k, v, **masks))


@pytest.mark.parametrize("n", [6, 12, 30, 48])
@pytest.mark.parametrize("conv_kernel", [None, 5])
def test_nystrom_attention_of_one_matrix(n: int, conv_kernel: int | None) -> None:
    """One example, one head, a length that the landmarks divide: the published formula."""
    layer, x = lucidrains(1, conv_kernel, scale=3.0), tokens(1, n, 1)
    if n == LANDMARKS:  # ours is exact; the peer's six iterations are not, so give it more
        layer.pinv_iterations = 25
        layer, x = layer.double(), x.double()
    torch.testing.assert_close(beside(layer, x), layer(x), **TOLERANCE)
