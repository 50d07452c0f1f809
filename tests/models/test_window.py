"""A window in the attention of models: self-attention is sketched, cross-attention stays exact and says why."""

import torch
from torch import nn
from torch.nn import functional as F

from skeinformer import convert, sketched


@torch.no_grad()
def test_a_scope_leaves_cross_attention_exact() -> None:
    q, k = torch.randn(1, 2, 40, 8), torch.randn(1, 2, 50, 8)
    for method, options in (("cluster_window", {}), ("cluster", {"window": 8})):
        with sketched(method, min_length=0, **options) as report:
            assert torch.equal(F.scaled_dot_product_attention(q, k, k), F.scaled_dot_product_attention(q, k, k))
            F.scaled_dot_product_attention(q, q, q)
        assert report.sketched == 1
        assert report.exact == 2


@torch.no_grad()
def test_a_converted_layer_sees_near_tokens_exactly() -> None:
    layer = nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = 4 * torch.randn(1, 300, 16)
    exact = layer(x, x, x)[0]
    errors = []
    for window in (0, 64):
        model = nn.Sequential()
        model.attention = nn.MultiheadAttention(16, 2, batch_first=True).eval()
        model.attention.load_state_dict(layer.state_dict())
        convert(model, "cluster", budget=8, window=window, min_length=0)
        errors.append((model.attention(x, x, x)[0] - exact).norm().item())
    assert errors[1] < errors[0]
