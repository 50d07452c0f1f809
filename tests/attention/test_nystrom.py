"""Nystromformer: the transcription, landmarks, the pseudo-inverse, exactness per example, the convolution."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.nystrom import iterative_pinv, segment
from skeinformer.sketch.base import scatter_sum
from tests import reference_nystrom as reference
from tests.helpers import (
    DTYPES,
    dense_exact,
    exact,
    generator,
    gradients,
    lengths_mask,
    over_heads,
    random_mask,
    relative_error,
    tensors,
)

MASKS = {
    "none": (None, None),
    "keys": (lengths_mask([9, 5], 9), None),
    "queries": (None, lengths_mask([7, 2], 7)),
    "anywhere": (random_mask(2, 9, seed=1, share=0.7), random_mask(2, 7, seed=2)),
    "nothing real": (lengths_mask([9, 0], 9), lengths_mask([0, 7], 7)),
}
every_mask = pytest.mark.parametrize("case", MASKS)


@every_mask
@pytest.mark.parametrize(
    ("num_landmarks", "iterations", "scale"), [(1, 6, None), (2, 6, 0.3), (3, 6, None), (5, 4, None), (8, 2, None)]
)
def test_values_and_gradients(case: str, num_landmarks: int, iterations: int, scale: float | None) -> None:
    """Cross-attention of 7 queries on 9 keys: no segment length divides anything."""
    key_mask, query_mask = MASKS[case]
    q, k, v = tensors(2, 2, 7, 9, p_v=3, peak=6)
    expected = over_heads(
        lambda Q, K, V, keys, queries, _: reference.nystrom_attention(
            Q, K, V, num_landmarks, iterations, 0.5 if scale is None else scale, keys, queries
        ),
        q,
        k,
        v,
        key_mask,
        query_mask,
    )
    module = build("nystromformer", head_dim=4, budget=num_landmarks, pinv_iterations=iterations, scale=scale)
    output = module(q, k, v, key_mask=key_mask, query_mask=query_mask)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("n", [1, 2, 7, 12, 13, 50])
@pytest.mark.parametrize("size", [1, 3, 12, 20])
def test_segments_are_as_equal_as_can_be(n: int, size: int) -> None:
    x = torch.randn(1, 1, n, 2, generator=generator())
    at, weight, live, own = segment(x, None, size)
    index = at[0, 0, :, 0]
    assert index.tolist() == sorted(index.tolist())
    counts = torch.bincount(index, minlength=size)
    assert len(counts) == size
    assert torch.equal(counts > 0, live[0, 0])
    assert counts.max() - counts.min() <= 1
    assert int((counts > 0).sum()) == min(n, size)
    assert bool(own) == (n <= size)
    means = scatter_sum(x, at, weight, size)[0, 0]
    for c in range(size):
        mean = x[0, 0, index == c].mean(0) if counts[c] else torch.zeros(2)
        torch.testing.assert_close(means[c], mean)


def test_pseudo_inverse_of_nothing_is_nothing() -> None:
    A = torch.zeros(2, 1, 4, 4, requires_grad=True)
    Z = iterative_pinv(A, 6)
    assert (Z == 0).all()
    (gradient,) = torch.autograd.grad((0 * Z).sum(), A)
    assert (gradient == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_landmarks", [12, 13, 29, 30, 64])
def test_exact_where_an_example_has_no_more_keys_than_landmarks(dtype: torch.dtype, num_landmarks: int) -> None:
    """Of examples with 30, 12 and 0 real keys those that fit are exact, whatever the inverse makes of them."""
    q, k, v = tensors(3, 2, 70, 30, p=8, dtype=dtype, peak=3)
    key_mask = lengths_mask([30, 12, 0], 30)[:, torch.randperm(30, generator=generator())]
    module = build("nystromformer", head_dim=8, budget=num_landmarks, pinv_iterations=1)
    output = module(q, k, v, key_mask=key_mask)
    tolerance = 20 * torch.finfo(dtype).eps
    truth = dense_exact(q[:2], k[:2], v[:2], key_mask[:2])
    torch.testing.assert_close(output[1].double(), truth[1], rtol=tolerance, atol=tolerance)
    assert (output[2] == 0).all()
    fits = num_landmarks >= 30
    assert torch.allclose(output[0].double(), truth[0], rtol=tolerance, atol=tolerance) == fits
    assert all(gradient.isfinite().all() for gradient in gradients(output, (q, k, v)))


def test_error_falls_with_the_landmarks_on_a_smooth_sequence() -> None:
    """Queries and keys that change slowly along the sequence, which is what means of segments assume."""
    n, p = 512, 4
    time = torch.linspace(0, 1, n, dtype=torch.float64)[:, None]
    frequency = torch.arange(1, p + 1)
    q, k, v = (
        3 * torch.cos(2 * math.pi * time * frequency + phase * frequency).expand(1, 1, n, p)
        for phase in (0.0, 0.5, 1.0)
    )
    truth = dense_exact(q, k, v)
    errors = [
        relative_error(build("nystromformer", head_dim=p, budget=L)(q, k, v), truth).item() for L in (4, 8, 16, 32, 64)
    ]
    assert all(later < 0.7 * earlier for earlier, later in itertools.pairwise(errors))
    assert errors[-1] < 0.002


def test_more_iterations_bring_rows_nearer_to_one() -> None:
    """Rows of F Z B sum to one when Z is the inverse: A has row sums one, so has A^-1."""
    q, k, _ = (x.detach() for x in tensors(1, 2, 40, peak=9))
    ones = torch.ones(1, 2, 40, 1, dtype=torch.float64)
    off = [
        (build("nystromformer", head_dim=4, budget=8, pinv_iterations=count)(q, k, ones) - 1).abs().max().item()
        for count in (2, 6, 30)
    ]
    assert off[0] > off[1] > off[2]
    assert off[2] < 1e-8
    assert off[1] > 1e-3  # the paper's six


def with_conv(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(1)
    return build("nystromformer", head_dim=4, budget=4, conv_kernel=5, num_heads=2).to(dtype)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n", [1, 3, 9])
def test_convolution_is_added(n: int, masked: bool) -> None:
    q, k, v = tensors(2, 2, n, p_v=3)
    mask = random_mask(2, n, seed=4) if masked else None
    module, plain = with_conv(), build("nystromformer", head_dim=4, budget=4)
    weight: Tensor = module.conv.weight  # type: ignore[union-attr,assignment]
    assert weight.shape == (2, 1, 5, 1)
    residual = over_heads(
        lambda Q, K, V, keys, queries, at: torch.where(
            torch.tensor(queries)[:, None],
            reference.depthwise_convolution(V, weight[at[1], 0, :, 0], keys),
            V.new_zeros(()),
        ),
        q,
        k,
        v,
        mask,
        mask,
    )
    output = module(q, k, v, key_mask=mask, query_mask=mask)
    expected = plain(q, k, v, key_mask=mask, query_mask=mask) + residual
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    inputs = (q, k, v, weight)
    for ours, theirs in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
def test_convolution_in_every_precision(dtype: torch.dtype) -> None:
    """Weights stay float32; inputs of another precision come back in theirs."""
    q, k, v = tensors(2, 2, 9, dtype=dtype)
    module = with_conv(torch.float32)
    mask = lengths_mask([9, 0], 9)
    output = module(q, k, v, key_mask=mask, query_mask=mask)
    assert output.dtype == dtype
    assert (output[1] == 0).all()
    tolerance = 50 * torch.finfo(torch.float32 if dtype == torch.float64 else dtype).eps
    expected = with_conv()(q.double(), k.double(), v.double(), key_mask=mask, query_mask=mask)
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)
    for gradient in gradients(output, (q, k, v, module.conv.weight)):  # type: ignore[union-attr]
        assert gradient.isfinite().all()


def test_errors_of_the_convolution() -> None:
    with pytest.raises(ValueError, match="conv_kernel needs num_heads"):
        build("nystromformer", head_dim=4, conv_kernel=3)
    with pytest.raises(ValueError, match="num_heads"):
        build("nystromformer", head_dim=4, conv_kernel=3, num_heads=0)
    with pytest.raises(ValueError, match="num_heads=2 is for the convolution"):
        build("nystromformer", head_dim=4, num_heads=2)
    q, k, v = tensors(1, 3, 5, 7)
    with pytest.raises(ValueError, match="query has 3 heads"):
        with_conv()(q, k, v)
    with pytest.raises(ValueError, match="5 queries and 7 keys"):
        with_conv()(q[:, :2], k[:, :2], v[:, :2])


@pytest.mark.parametrize("masked", [False, True])
def test_few_queries_are_their_own_landmarks(masked: bool) -> None:
    """Cross-attention of at most as many real queries as landmarks is exact: their rows of B V are the answer."""
    q, k, v = tensors(2, 2, 12, 50, peak=4)
    query_mask = lengths_mask([5, 3], 12) if masked else None
    budget = 5 if masked else 12
    output = build("nystromformer", head_dim=4, budget=budget)(q, k, v, query_mask=query_mask)
    torch.testing.assert_close(output, exact(q, k, v, None, query_mask), rtol=1e-10, atol=1e-12)


def test_heads_without_a_convolution_are_not_silently_dropped() -> None:
    with pytest.raises(ValueError, match="num_heads=2 is for the convolution; give conv_kernel too"):
        build("nystromformer", head_dim=4, num_heads=2)
