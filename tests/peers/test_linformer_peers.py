"""Beside the package linformer: the same weights give the same output; where it departs from the paper is shown."""

from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.linformer import LinformerModule
from tests.helpers import generator

peer_package = pytest.importorskip("linformer")
pytestmark = pytest.mark.peers

DIM, HEADS, LENGTH, K = 32, 4, 24, 10


def peer(**options: Any) -> Any:
    torch.manual_seed(3)
    return peer_package.LinformerSelfAttention(dim=DIM, seq_len=LENGTH, k=K, heads=HEADS, **options)


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (b, h, n, p)


def ours(theirs: Any, x: Tensor, context: Tensor, values: Any, module: LinformerModule, **masks: Tensor) -> Tensor:
    """Our attention between the peer's linear layers."""
    q, k, v = split(theirs.to_q(x)), split(theirs.to_k(context)), split(values(context))
    output = module(q, k, v, **masks)
    return theirs.to_out(output.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


def twin(theirs: Any, share_kv: bool) -> LinformerModule:
    module = build("linformer", head_dim=DIM // HEADS, max_len=LENGTH, budget=K, share_kv=share_kv)
    assert isinstance(module, LinformerModule)
    with torch.no_grad():
        module.key_projection.copy_(theirs.proj_k)
        if module.value_projection is not None:
            module.value_projection.copy_(theirs.proj_v)
    return module


@pytest.mark.parametrize("n", [1, 7, LENGTH])
@pytest.mark.parametrize("cross", [False, True])
def test_agrees(n: int, cross: bool) -> None:
    """Output, and gradients of the input and of both projections; sequences up to the longest."""
    theirs = peer()
    module = twin(theirs, share_kv=False)
    x = torch.randn(2, 13 if cross else n, DIM, generator=generator()).requires_grad_()
    context = torch.randn(2, n, DIM, generator=generator(1)) if cross else x
    expected = theirs(x, context=context if cross else None)
    output = ours(theirs, x, context, theirs.to_v, module)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn(output.shape, generator=generator(2))
    found = torch.autograd.grad((output * weight).sum(), (x, *module.parameters()))
    known = torch.autograd.grad((expected * weight).sum(), (x, theirs.proj_k, theirs.proj_v))
    for a, b in zip(found, known, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_agrees_with_one_projection() -> None:
    theirs = peer()
    with torch.no_grad():
        theirs.proj_v.copy_(theirs.proj_k)
    x = torch.randn(2, LENGTH, DIM, generator=generator())
    output = ours(theirs, x, x, theirs.to_v, twin(theirs, share_kv=True))
    torch.testing.assert_close(output, theirs(x), rtol=1e-4, atol=1e-4)
