"""transformers' Longformer beside ours: same weights, same output, and what it demands of lengths."""

from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from tests.helpers import generator, lengths_mask

pytestmark = pytest.mark.peers

peer: Any = pytest.importorskip(
    "transformers.models.longformer.modeling_longformer", reason="transformers is not installed"
)

HEADS, P, WINDOW, N = 2, 4, 3, 24


def make_peer(shared: bool = True) -> Any:
    """Its global projections are set to the local ones where `shared`: ours has one set."""
    config = peer.LongformerConfig(
        hidden_size=HEADS * P,
        num_attention_heads=HEADS,
        attention_window=[2 * WINDOW],
        num_hidden_layers=1,
        attention_probs_dropout_prob=0.0,
        sep_token_id=None,
    )
    torch.manual_seed(0)
    module = peer.LongformerSelfAttention(config, layer_id=0)
    if shared:
        for name in ("query", "key", "value"):
            getattr(module, f"{name}_global").load_state_dict(getattr(module, name).state_dict())
    return module


def run_peer(module: Any, x: Tensor, mask: Tensor, global_tokens: tuple[int, ...]) -> Tensor:
    """Its mask is 0 for a local token, positive for a global one, negative for padding."""
    is_global = torch.zeros_like(mask)
    is_global[:, list(global_tokens)] = True
    is_global &= mask
    kind = torch.where(mask, 0.0, -1e4).masked_fill(is_global, 1e4)
    return module(
        x,
        attention_mask=kind,
        is_index_masked=~mask,
        is_index_global_attn=is_global,
        is_global_attn=bool(is_global.any()),
    )[0]


def projected(module: Any, x: Tensor) -> list[Tensor]:
    return [f(x).unflatten(-1, (HEADS, P)).transpose(1, 2) for f in (module.query, module.key, module.value)]


def ours(module: Any, x: Tensor, mask: Tensor, global_tokens: tuple[int, ...]) -> Tensor:
    attention = build("longformer", head_dim=P, window=WINDOW, global_tokens=global_tokens)
    return attention(*projected(module, x), key_mask=mask, query_mask=mask).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("global_tokens", [(), (0,), (0, 7, 8, 20)])
@pytest.mark.parametrize("lengths", [[N, N], [N, 15]])
def test_same_weights_same_output_and_gradients(global_tokens: tuple[int, ...], lengths: list[int]) -> None:
    module = make_peer()
    x = (3 * torch.randn(2, N, HEADS * P, generator=generator())).requires_grad_()
    mask = lengths_mask(lengths, N)
    theirs = run_peer(module, x, mask, global_tokens) * mask[..., None]
    output = ours(module, x, mask, global_tokens)
    torch.testing.assert_close(output, theirs, rtol=1e-4, atol=1e-4)
    weight = torch.randn(output.shape, generator=generator(1))
    (expected,) = torch.autograd.grad((theirs * weight).sum(), x)
    (gradient,) = torch.autograd.grad((output * weight).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)
