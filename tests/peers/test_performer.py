"""performer-pytorch beside our Performer: same projection, same output, and where the peer departs from the paper."""

from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.linear import orthogonal_features
from tests.helpers import draw, map_noise, tensors

peer = pytest.importorskip("performer_pytorch.performer_pytorch", reason="performer-pytorch is not installed")
pytestmark = pytest.mark.peers

P, M = 8, 24


def shared(q: Tensor, k: Tensor, budget: int = M) -> tuple[torch.nn.Module, Any, Tensor]:
    """Our module, and one draw of features for all examples and heads, which is what the peer has."""
    module = build("performer", head_dim=P, budget=budget)
    noise = map_noise(draw(module, q[:1, :1], k[:1, :1]), lambda u: u.expand(*q.shape[:2], *u.shape[2:]))
    return module, noise, orthogonal_features(noise, torch.float32)[0, 0]


def peer_output(q: Tensor, k: Tensor, v: Tensor, W: Tensor, eps: float) -> Tensor:
    """The peer's own functions, as its FastAttention calls them; eps is added to every feature."""
    phi_q = peer.softmax_kernel(q, projection_matrix=W, is_query=True, eps=eps)
    phi_k = peer.softmax_kernel(k, projection_matrix=W, is_query=False, eps=eps)
    return peer.linear_attention(phi_q, phi_k, v)


@pytest.mark.parametrize(("n", "n_k"), [(1, 1), (33, 33), (7, 50)])
def test_same_output_without_the_constant_that_the_peer_adds(n: int, n_k: int) -> None:
    q, k, v = tensors(2, 3, n, n_k, p=P, dtype=torch.float32)
    module, noise, W = shared(q, k)
    ours, theirs = module(q, k, v, noise=noise), peer_output(q, k, v, W, eps=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_linear_transformer_is_the_peer_with_another_feature_map() -> None:
    q, k, v = tensors(2, 3, 33, 20, p=P, dtype=torch.float32)
    phi_q, phi_k = (
        peer.generalized_kernel(
            x,
            projection_matrix=None,
            kernel_fn=lambda y: torch.nn.functional.elu(y) + 1,
            kernel_epsilon=0,
            normalize_data=False,
        )
        for x in (q, k)
    )
    ours = build("linear_transformer", head_dim=P)(q, k, v)
    torch.testing.assert_close(ours, peer.linear_attention(phi_q, phi_k, v), rtol=1e-4, atol=1e-4)
