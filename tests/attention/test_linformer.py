"""Linformer: its formula, its projections as parameters, and its unreduced form, D^-1 A S S^T V with Gaussian S."""

import math
from typing import Any

import pytest
import torch

from skeinformer import build
from skeinformer.attention.linformer import LinformerModule
from tests.helpers import LargestTensor, draw, gradients, lengths_mask, over_heads, random_mask, tensors
from tests.reference_linformer import linformer

MASKS = {
    "none": (None, None),
    "suffix": (lengths_mask([9, 4], 9), lengths_mask([7, 3], 7)),
    "anywhere": (random_mask(2, 9, seed=1), random_mask(2, 7, seed=2)),
}


def make(max_len: int = 12, budget: int = 5, **options: Any) -> LinformerModule:
    module = build("linformer", head_dim=4, max_len=max_len, budget=budget, **options)
    assert isinstance(module, LinformerModule)
    return module.double()


@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("share_kv", [True, False])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_is_the_transcription(case: str, share_kv: bool, scale: float | None) -> None:
    """Values and gradients, those of the projections too, on fewer keys than max_len."""
    key_mask, query_mask = MASKS[case]
    q, k, v = tensors(2, 2, 7, 9, p_v=5, peak=2)
    module = make(share_kv=share_kv, scale=scale)
    output = module(q, k, v, key_mask=key_mask, query_mask=query_mask)
    E = module.key_projection
    F = E if module.value_projection is None else module.value_projection
    expected = over_heads(
        lambda Q, K, V, keys, queries, _: linformer(
            Q, K, V, E[:9].mT, F[:9].mT, 0.5 if scale is None else scale, keys, queries
        ),
        q,
        k,
        v,
        key_mask,
        query_mask,
    )
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    inputs = (q, k, v, *module.parameters())
    assert len(inputs) == (4 if share_kv else 5)
    actual = gradients(output, inputs)
    for ours, theirs in zip(actual, gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert all((x[9:] == 0).all() for x in actual[3:])  # positions that the sequence does not reach


@pytest.mark.parametrize("share_kv", [True, False])
def test_start_is_a_johnson_lindenstrauss_map(share_kv: bool) -> None:
    """Entries N(0, 1/d): S S^T is I within 4.5 standard errors, sqrt(2/d) on and 1/sqrt(d) off the diagonal."""
    torch.manual_seed(1)
    d = 4000
    for S in make(max_len=8, budget=d, share_kv=share_kv).parameters():
        error = (S @ S.mT - torch.eye(8)).abs()
        bound = 4.5 * math.sqrt(1 / d) * (1 + (math.sqrt(2) - 1) * torch.eye(8))
        assert (error <= bound).all()


def test_too_many_keys() -> None:
    q, k, v = tensors(1, 1, 20, 13)
    with pytest.raises(ValueError, match="got 13 keys, but this Linformer was built with max_len=12"):
        make()(q, k, v)
    assert make()(q, k[:, :, :12], v[:, :, :12]).shape == (1, 1, 20, 4)  # queries may be more


def test_keys_and_values_share_one_projection_by_default() -> None:
    assert [(name, tuple(x.shape)) for name, x in make().named_parameters()] == [("key_projection", (12, 5))]


def test_max_len_is_needed() -> None:
    with pytest.raises(ValueError, match="give it max_len, the longest sequence; got None"):
        build("linformer", head_dim=4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16])
def test_half_precision_sums_do_not_overflow(dtype: torch.dtype, parameters: torch.dtype) -> None:
    """Combinations of 2000 keys of size 1e4 are beyond float16."""
    q, k, v = tensors(1, 2, 3, 2000, dtype=dtype)
    k = (1e4 * k.detach()).requires_grad_()
    torch.manual_seed(0)
    module = build("linformer", head_dim=4, max_len=2000, budget=8).to(parameters)
    assert isinstance(module, LinformerModule)
    assert (module.key_projection.double().mT @ k.double()).abs().max() > torch.finfo(torch.float16).max
    output = module(q, k, v)
    assert output.dtype == dtype
    assert output.isfinite().all()
    assert all(x.isfinite().all() for x in gradients(output, (q, k, v)))


def test_no_n_by_d_matrix() -> None:
    """Beside the parameters nothing is larger than the queries, forward and backward."""
    q, k, v = tensors(1, 2, 600, p=16, dtype=torch.float32)
    module = build("linformer", head_dim=16, max_len=600, budget=300).requires_grad_(False)
    with LargestTensor() as largest:
        gradients(module(q, k, v), (q, k, v))
    assert largest.size == q.numel()


def test_unreduced_form_is_the_sketch_with_a_gaussian() -> None:
    q, k, v = tensors(2, 2, 9)
    module = build("linformer_jlt", head_dim=4, budget=5)
    noise = draw(module, q, k)
    assert torch.equal(
        module(q, k, v, noise=noise), build("sketched", head_dim=4, budget=5, sketch="gaussian")(q, k, v, noise=noise)
    )
