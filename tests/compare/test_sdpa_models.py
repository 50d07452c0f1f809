"""`compare` on models that call `scaled_dot_product_attention` themselves: the calls of a pass are its layers."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer
from skeinformer import compare, sketched

N, WIDTH = 40, 16
FAST: dict[str, Any] = {"budget": 6, "rounds": 1, "show": False}


class Own(nn.Module):
    """Self-attention with grouped heads, then cross-attention to a shorter text with a mask, then a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        def heads(x: Tensor) -> Tensor:
            return x.unflatten(-1, (-1, 4)).transpose(1, 2)

        q, kv, other = heads(self.q(x)), heads(self.kv(x)), heads(self.text(text))
        x = F.scaled_dot_product_attention(q, kv[:, :2], kv[:, 2:], enable_gqa=True)
        x = F.scaled_dot_product_attention(x, other, other, attn_mask=mask[:, None, None], scale=0.5)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x.transpose(1, 2).flatten(2)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    mask = torch.arange(20) < torch.tensor([[20], [15]])
    return 3 * torch.randn(2, N, WIDTH), 3 * torch.randn(2, 20, WIDTH), mask


@pytest.mark.parametrize("method", ["cluster", "skeinformer", "vmean"])
def test_the_calls_of_one_pass_are_the_layers(method: str) -> None:
    model, given = Own(), inputs()
    result = compare(model, given, method, **FAST)
    whole = [record for record in result.layers if record["head"] is None]
    assert [record["layer"] for record in whole] == ["call 0", "call 1"]
    assert [(record["n"], record["keys"], record["heads"]) for record in whole] == [(N, N, 4), (N, 20, 4)]
    assert result.left == {"call 2": "causal"}
    assert model.training
    model.eval()
    with torch.no_grad():
        exact = model(*given)
        with sketched(method, min_length=0, **({} if method == "vmean" else {"budget": 6})):
            found = model(*given)
    cosine = F.cosine_similarity(found.flatten(0, 1), exact.flatten(0, 1)).mean()
    assert result.whole["cosine"] == pytest.approx(float(cosine), rel=1e-4)


def test_errors_are_those_of_the_calls() -> None:
    model, given = Own().eval(), inputs()
    result = compare(model, given, "cluster", **FAST)
    with torch.no_grad():
        q, kv = (f(given[0]).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (model.q, model.kv))
        call = (q, kv[:, :2], kv[:, 2:])
        exact = F.scaled_dot_product_attention(*call, enable_gqa=True)
        found = skeinformer.scaled_dot_product_attention(*call, enable_gqa=True, budget=6, min_length=0)
    error = float((found - exact).norm() / exact.norm())
    assert result.layers[0]["error"] == pytest.approx(error, rel=1e-3)


def test_layers_of_torch_beside_calls() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.layer = Own(), nn.MultiheadAttention(WIDTH, 2, batch_first=True)

        def forward(self, *given: Tensor) -> Tensor:
            x = self.own(*given)
            output: Tensor = self.layer(x, x, x, need_weights=False)[0]
            return output

    result = compare(Both(), inputs(), "cluster", **FAST)
    names = [record["layer"] for record in result.layers if record["head"] is None]
    assert names == ["call 0", "call 1", "layer"]


def test_a_model_without_attention_says_so() -> None:
    with pytest.raises(ValueError, match="no attention layer of Linear would be sketched"):
        compare(nn.Linear(4, 4), torch.randn(2, 4), "cluster", **FAST)
    with pytest.raises(ValueError, match="call 0: linformer cannot stand in for a call: it has parameters"):
        compare(Own(), inputs(), "linformer", max_len=N, **FAST)
