"""Softmax attention with and without dropout, and the mean of the values."""

import math

import pytest
import torch

from skeinformer import build
from tests import reference
from tests.helpers import draw, exact, gradients, lengths_mask, over_heads, random_mask, tensors

MASKS = {
    "none": (None, None),
    "suffix": (lengths_mask([9, 4], 9), lengths_mask([7, 3], 7)),
    "anywhere": (random_mask(2, 9, seed=1), random_mask(2, 7, seed=2)),
    "no_key": (lengths_mask([9, 0], 9), None),
}


@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("name", ["softmax", "softmax_dropout"])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_softmax_is_the_transcription(name: str, case: str, scale: float | None) -> None:
    key_mask, query_mask = MASKS[case]
    q, k, v = tensors(2, 2, 7, 9, p_v=5, peak=4)
    output = build(name, head_dim=4, scale=scale).eval()(q, k, v, key_mask=key_mask, query_mask=query_mask)
    s = 1 / math.sqrt(4) if scale is None else scale
    expected = over_heads(
        lambda Q, K, V, keys, queries, _: reference.softmax_attention(Q, K, V, s, keys, queries),
        *(q, k, v, key_mask, query_mask),
    )
    expected_gradients = gradients(expected, (q, k, v))
    for actual in (output, exact(q, k, v, key_mask, query_mask, scale)):  # the other tests compare with the second
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
        for ours, theirs in zip(gradients(actual, (q, k, v)), expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", MASKS)
def test_vmean_is_the_transcription(case: str) -> None:
    key_mask, query_mask = MASKS[case]
    q, k, v = tensors(2, 2, 7, 9, p_v=5)
    output = build("vmean", head_dim=4)(q, k, v, key_mask=key_mask, query_mask=query_mask)
    expected = over_heads(
        lambda Q, K, V, keys, queries, _: reference.v_mean(Q, V, keys, queries), q, k, v, key_mask, query_mask
    )
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(output, (v,))[0], gradients(expected, (v,))[0], rtol=1e-12, atol=1e-12)


def test_vmean_of_large_half_precision_values_does_not_overflow() -> None:
    q, k, v = (x.detach() for x in tensors(1, 1, 50, dtype=torch.float16))
    value = torch.full_like(v, 6e4)
    output = build("vmean", head_dim=4)(q, k, value)
    assert torch.equal(output, value)


@pytest.mark.parametrize("case", MASKS)
def test_dropout_drops_and_scales_the_weights(case: str) -> None:
    """out = (B * keep / (1 - rate)) V for the weights whose number is at least the rate."""
    key_mask, query_mask = MASKS[case]
    q, k, v = tensors(2, 2, 7, 9, p_v=5)
    module = build("softmax_dropout", head_dim=4, dropout=0.4)
    noise = draw(module, q, k)
    assert noise[0].shape == (2, 2, 7, 9)
    keep = (noise[0] >= 0.4).double() / 0.6
    one = torch.eye(9, dtype=torch.float64).expand(2, 2, 9, 9)
    weights = exact(q, k, one, key_mask, query_mask)  # (b, h, n, n_k)
    output = module(q, k, v, key_mask=key_mask, query_mask=query_mask, noise=noise)
    torch.testing.assert_close(output, (weights * keep) @ v, rtol=1e-11, atol=1e-12)
    assert not torch.equal(output, module.eval()(q, k, v, key_mask=key_mask, query_mask=query_mask))


def test_no_dropout_is_the_fused_kernel_in_training() -> None:
    q, k, v = tensors(2, 2, 9)
    module = build("softmax", head_dim=4).train()
    assert draw(module, q, k) == ()
    torch.testing.assert_close(module(q, k, v), exact(q, k, v), rtol=1e-11, atol=1e-12)
