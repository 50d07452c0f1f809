"""Beside the package linformer: the same weights give the same output; where it departs from the paper is shown."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.linformer import LinformerModule
from tests.helpers import generator, lengths_mask

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


def test_its_share_kv_makes_the_values_the_keys() -> None:
    """The paper shares E = F between keys and values; the peer drops the value layer too, and attends to keys."""
    theirs = peer(share_kv=True)
    assert not hasattr(theirs, "to_v")
    x = torch.randn(2, LENGTH, DIM, generator=generator())
    module = twin(theirs, share_kv=True)
    torch.testing.assert_close(ours(theirs, x, x, theirs.to_k, module), theirs(x), rtol=1e-4, atol=1e-4)


def test_its_start_is_no_johnson_lindenstrauss_map() -> None:
    """Uniform in +-1/sqrt(d) has variance 1/(3d): S S^T is a third of the identity. Ours has variance 1/d."""
    torch.manual_seed(0)
    length, d = 8, 4000
    theirs = peer_package.LinformerSelfAttention(dim=DIM, seq_len=length, k=d, heads=HEADS)
    module = build("linformer", head_dim=8, max_len=length, budget=d)
    assert isinstance(module, LinformerModule)
    for S, expected, fourth in ((theirs.proj_k, 1 / 3, 1 / 5), (module.key_projection, 1.0, 3.0)):
        bound = 4.5 * math.sqrt((fourth - expected**2) / d)  # of a mean of d squares times d, by their fourth moment
        assert ((S @ S.mT).diagonal() - expected).abs().max() <= bound


def test_it_takes_a_mask_and_ignores_it() -> None:
    theirs = peer()
    x = torch.randn(2, LENGTH, DIM, generator=generator())
    mask = lengths_mask([LENGTH, 9], LENGTH)
    other = torch.where(mask[..., None], x, 5.0)
    assert torch.equal(theirs(x, mask=mask), theirs(x))
    assert not torch.allclose(theirs(x, mask=mask)[1, :9], theirs(other, mask=mask)[1, :9], atol=0.01)
    module = twin(theirs, share_kv=False)
    masks = {"key_mask": mask, "query_mask": mask}
    first, second = (ours(theirs, y, y, theirs.to_v, module, **masks) for y in (x, other))
    assert torch.equal(first, second)
    alone = x[1:, :9]
    torch.testing.assert_close(first[1:, :9], ours(theirs, alone, alone, theirs.to_v, module), rtol=1e-5, atol=1e-5)
