"""performer-pytorch beside our Performer: same projection, same output, and where the peer departs from the paper."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.linear import orthogonal_features
from tests.helpers import dense_exact, draw, generator, lengths_mask, map_noise, relative_error, tensors

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


def test_fast_attention_is_those_functions() -> None:
    """The module as its users call it, with its default eps = 1e-4."""
    q, k, v = (x.detach() for x in tensors(2, 3, 33, p=P, dtype=torch.float32))
    _, _, W = shared(q, k)
    attention = peer.FastAttention(P, nb_features=M)
    attention.projection_matrix.copy_(W)
    torch.testing.assert_close(attention(q, k, v), peer_output(q, k, v, W, eps=1e-4), rtol=1e-5, atol=1e-5)


def test_departure_the_constant_pulls_towards_the_mean_of_the_values() -> None:
    """eps = 1e-4 beside features that underflow: at logits of a few dozen the peer returns V-mean, which ours does not.

    Its stabilizer is the maximum of w . k, not of w . k - |k|^2 / 2: all features of keys of large norm vanish.
    """
    distance_to_mean, disagreement = [], []
    for peak in (0.1, 1.0, 60.0):
        q, k, v = (x.detach() for x in tensors(1, 2, 40, p=P, dtype=torch.float32, peak=peak))
        module, noise, W = shared(q, k)
        ours, theirs = module(q, k, v, noise=noise), peer_output(q, k, v, W, eps=1e-4)
        mean = v.mean(-2, keepdim=True).expand_as(v)
        distance_to_mean.append((relative_error(theirs, mean).mean().item(), relative_error(ours, mean).mean().item()))
        disagreement.append(relative_error(theirs, ours).mean().item())
    assert disagreement[0] < 5e-3
    assert disagreement[0] < disagreement[1] < disagreement[2]
    assert distance_to_mean[2][0] < 1e-2
    assert distance_to_mean[2][1] > 1


def test_defect_zero_over_zero_without_the_constant() -> None:
    """With eps = 0 the same underflow is 0 / 0; ours is a softmax and stays a convex combination."""
    q, k, v = (x.detach() for x in tensors(1, 1, 20, p=P, dtype=torch.float32, peak=2e3))
    module, noise, W = shared(q, k)
    assert peer_output(q, k, v, W, eps=0).isnan().any()
    output = module(q, k, v, noise=noise)
    assert (output <= v.amax(-2, keepdim=True) + 1e-5).all()
    assert (output >= v.amin(-2, keepdim=True) - 1e-5).all()


def test_defect_padded_keys_stay_in_the_denominator() -> None:
    """The peer's layer zeroes padded values and leaves their keys: more padding, smaller output."""
    layer = peer.SelfAttention(dim=16, heads=2, dim_head=P, nb_features=M).eval()
    layer.to_out = torch.nn.Identity()
    x = torch.randn(1, 12, 16, generator=generator(1))
    alone = layer(x)
    longer = torch.nn.functional.pad(x, (0, 0, 0, 36))
    padded = layer(longer, mask=lengths_mask([12], 48))[:, :12]
    assert padded.norm() < 0.5 * alone.norm()

    q, k, v = (x.detach() for x in tensors(1, 2, 12, p=P, dtype=torch.float32))
    module, noise, _ = shared(q, k)
    longer_inputs = [torch.nn.functional.pad(x, (0, 0, 0, 36)) for x in (q, k, v)]
    masked = module(*longer_inputs, key_mask=lengths_mask([12], 48), noise=noise)[:, :, :12]
    torch.testing.assert_close(masked, module(q, k, v, noise=noise))


def kernel_errors(projections: Tensor, q: Tensor, k: Tensor) -> tuple[float, float]:
    """Mean of phi(q) . phi(k) - exp(q . k) over draws (draws, m, p) of the projection, and its standard error."""
    estimate = ((projections @ (q + k)) - (q @ q + k @ k) / 2).exp().mean(-1) - torch.exp(q @ k)
    return estimate.mean().item(), estimate.std().item() / math.sqrt(len(estimate))


def test_defect_directions_are_not_uniform() -> None:
    """Q of a bare QR has a first entry that is never positive, so the peer's estimate of the kernel is biased."""
    draws, p = 4000, 2
    torch.manual_seed(3)
    theirs = torch.stack([peer.gaussian_orthogonal_random_matrix(p, p) for _ in range(draws)]).double()
    module = build("performer", head_dim=p, budget=p)
    q, k = torch.tensor([0.6, 0.0]).double(), torch.tensor([0.5, 0.1]).double()
    rows = torch.empty(draws, 1, 1, p)
    ours = orthogonal_features(draw(module, rows, rows, seed=3), torch.float64)[:, 0]
    assert (theirs[:, 0, 0] <= 0).all()
    assert abs((ours[:, 0, 0] <= 0).double().mean() - 0.5) <= 4 * 0.5 / math.sqrt(draws)
    bias, standard_error = kernel_errors(theirs, q, k)
    assert abs(bias) > 8 * standard_error
    bias, standard_error = kernel_errors(ours, q, k)
    assert abs(bias) <= 4 * standard_error


def test_both_converge_to_softmax_attention() -> None:
    """1/sqrt(p), not 1/p: with many features both are near exact attention at moderate logits."""
    q, k, v = (x.detach() for x in tensors(1, 2, 30, p=P, dtype=torch.float32, peak=0.3))
    module, noise, W = shared(q, k, budget=4096)
    truth = dense_exact(q, k, v)
    mean_error = relative_error(v.mean(-2, keepdim=True).expand_as(v), truth).max()
    for output in (module(q, k, v, noise=noise), peer_output(q, k, v, W, eps=0)):
        assert relative_error(output, truth).max() < 0.2 * mean_error
