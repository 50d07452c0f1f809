"""Second derivatives in models: right numbers, or an error that says what to do, and what it says works."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import skeinformer

Run = Callable[[Tensor], Tensor]


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).double()


def converted(method: str, **options: Any) -> Run:
    model = encoder()
    skeinformer.convert(model, method, **options)
    return model


def by_hand(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None])


RUNS: dict[str, Run] = {
    "converted": converted("cluster", budget=5, min_length=0),
    "converted by a method without a gradient of its own": converted("performer", budget=5, min_length=0),
    "converted, exact by its length": converted("cluster"),
    "converted to exact": converted("softmax"),
    "sketched": skeinformer.sketched("cluster", budget=5, min_length=0)(by_hand),
    "sketched, exact by its length": skeinformer.sketched()(by_hand),
    "function": lambda x: skeinformer.scaled_dot_product_attention(*[x[:, None]] * 3, budget=5, min_length=0),
}


def penalty(run: Run, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    return first.square().sum()


@pytest.mark.parametrize("name", RUNS)
def test_the_error_says_what_to_do(name: str) -> None:
    x = torch.randn(1, 24, 8, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"create_graph=False, or use exact attention .*SDPBackend\.MATH"):
        penalty(RUNS[name], x)
    RUNS[name](x).square().sum().backward()


@pytest.mark.parametrize(
    "name", ["converted, exact by its length", "converted to exact", "sketched, exact by its length"]
)
def test_exact_attention_on_the_plain_kernel_has_them(name: str) -> None:
    x = torch.randn(1, 24, 8, dtype=torch.float64)
    step, direction = 1e-6, torch.randn_like(x)
    with sdpa_kernel(SDPBackend.MATH):
        leaf = x.clone().requires_grad_()
        (second,) = torch.autograd.grad(penalty(RUNS[name], leaf), leaf)
        moved = [penalty(RUNS[name], (x + sign * step * direction).requires_grad_()).item() for sign in (1, -1)]
    assert float((second * direction).sum()) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-5)


def test_hessian_vector_products_raise_too() -> None:
    x = torch.randn(1, 24, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="create_graph=False"):
        torch.autograd.functional.hvp(lambda x: RUNS["sketched"](x).square().sum(), x, x)
