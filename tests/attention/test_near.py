"""The near part of the cluster sketch: against its transcription, against exact attention, on extremes."""

from typing import Any

import pytest
import torch

from skeinformer import cluster_attention
from skeinformer.kernels import near
from tests.attention.test_cluster import transcribed
from tests.helpers import exact, generator, gradients, lengths_mask, random_mask, relative_error, tensors

MASKS = {
    "none": (None, None),
    "suffix": (lengths_mask([17, 11], 17), lengths_mask([17, 11], 17)),
    "anywhere": (random_mask(2, 17, seed=5, share=0.7), random_mask(2, 17, seed=2)),
    "whole blocks": ((torch.arange(17) // 4 != 1).expand(2, 17), None),
}


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("first_order", [True, False])
@pytest.mark.parametrize(("window", "p_v"), [(1, 4), (3, 3), (4, 6), (8, 4)])
def test_values_and_gradients_are_those_of_the_transcription(
    masks: str, first_order: bool, window: int, p_v: int
) -> None:
    key_mask, query_mask = MASKS[masks]
    q, k, v = tensors(2, 2, 17, p_v=p_v, peak=2)
    options: dict[str, Any] = {"budget": 4, "num_pilots": 3, "first_order": first_order, "window": window}
    options |= {"key_mask": key_mask, "query_mask": query_mask, "generator": generator(1)}
    output, info = cluster_attention(q, k, v, return_info=True, **options)
    expected = transcribed(q, k, v, key_mask, query_mask, info, first_order, window)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("n", "window"), [(128, 64), (100, 64), (64, 64), (5, 64), (1, 1)])
@pytest.mark.parametrize("masked", [False, True])
def test_exact_where_all_keys_are_near(n: int, window: int, masked: bool) -> None:
    mask = random_mask(2, n) if masked else None
    inputs = tensors(2, 2, n)
    output = cluster_attention(*inputs, budget=3, window=window, key_mask=mask, query_mask=mask, generator=generator())
    expected = exact(*inputs, mask, mask)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(output, inputs), gradients(expected, inputs), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("masked", [False, True])
def test_exact_at_full_budget(masked: bool) -> None:
    mask = random_mask(2, 60) if masked else None
    inputs = tensors(2, 2, 60)
    output = cluster_attention(*inputs, budget=60, window=4, key_mask=mask, query_mask=mask, generator=generator())
    expected = exact(*inputs, mask, mask)
    torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(gradients(output, inputs), gradients(expected, inputs), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("sizes", [(1, 1), (40, 100), (10**4, 10**4)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_pieces_of_any_size_give_the_same(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], interleaved: bool
) -> None:
    """Heads may also lie next to each other in rows of tokens."""
    inputs, results = tensors(2, 3, 45, p=8, p_v=6), []
    for scores, held in ((near.SCORES, near.HELD), sizes):
        monkeypatch.setattr(near, "SCORES", scores)
        monkeypatch.setattr(near, "HELD", held)
        given = [x.transpose(1, 2).contiguous().transpose(1, 2) if interleaved else x for x in inputs]
        output = cluster_attention(*given, budget=6, window=4, generator=generator())
        results.append([output, *gradients(output, inputs)])
    torch.testing.assert_close(*results, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_every_precision_has_the_numbers_of_float64(dtype: torch.dtype, masked: bool) -> None:
    mask = random_mask(2, 60, seed=1) if masked else None
    options: dict[str, Any] = {"budget": 6, "window": 8, "key_mask": mask, "query_mask": mask}
    narrow = tuple(x.detach().to(dtype).requires_grad_() for x in tensors(2, 3, 60, p=8, p_v=8, peak=2))
    results = []
    for inputs in (narrow, tuple(x.detach().double().requires_grad_() for x in narrow)):
        output = cluster_attention(*inputs, generator=generator(3), **options)
        results.append([output, *gradients(output, inputs)])
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}[dtype]
    for a, b in zip(*results, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance * b.detach().abs().max().item())


@pytest.mark.parametrize("peak", [1e4, 1e-12])
@pytest.mark.parametrize("masked", [False, True])
def test_extreme_logits_are_finite(peak: float, masked: bool) -> None:
    mask = lengths_mask([70, 3], 100) if masked else None
    inputs = tensors(2, 2, 100, p=8, dtype=torch.float32, peak=peak)
    output = cluster_attention(*inputs, budget=8, window=8, key_mask=mask, query_mask=mask, generator=generator())
    assert output.isfinite().all()
    assert all(x.isfinite().all() for x in gradients(output, inputs))


def test_closer_than_the_plain_sketch_where_near_keys_matter() -> None:
    """Each token asks for the key of its own place: clusters in the space of features cannot tell it from others."""
    _, k, v = (x.detach() for x in tensors(1, 4, 512, p=16, peak=4))
    errors = [
        relative_error(cluster_attention(k, k, v, budget=16, window=window, generator=generator()), exact(k, k, v))
        for window in (0, 16)
    ]
    assert (errors[1] < 0.5 * errors[0]).all()


def test_a_window_needs_self_attention() -> None:
    with pytest.raises(ValueError, match="window=0"):
        cluster_attention(*tensors(1, 1, 8, 9), window=4)
