"""Linformer: its formula, its projections as parameters, and its unreduced form, D^-1 A S S^T V with Gaussian S."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skeinformer import build
from skeinformer.attention.linformer import LinformerModule
from tests.helpers import copies, draw, exact, generator, gradients, lengths_mask, over_heads, random_mask, tensors
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


def identity(n: int) -> LinformerModule:
    module = make(max_len=n, budget=n)
    with torch.no_grad():
        module.key_projection.copy_(torch.eye(n))
    return module


def test_identity_projection_is_exact_attention() -> None:
    q, k, v = tensors(2, 2, 7, 9, p_v=5, peak=4)
    output, expected = identity(9)(q, k, v), exact(q, k, v)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


def test_a_combination_of_no_real_key_is_a_zero_and_still_counts() -> None:
    """The softmax is over all d combinations: with the identity, padding takes part as a zero key of value zero."""
    q, k, v = tensors(2, 2, 7, 9)
    mask = random_mask(2, 9, seed=1)
    output = identity(9)(q, k, v, key_mask=mask)
    hidden = ~mask[:, None, :, None]
    torch.testing.assert_close(output, exact(q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)))
    assert not torch.allclose(output, exact(q, k, v, mask))


def test_projections_are_parameters() -> None:
    shared, separate = make(), make(share_kv=False)
    assert {name: tuple(x.shape) for name, x in shared.named_parameters()} == {"key_projection": (12, 5)}
    assert set(separate.state_dict()) == {"key_projection", "value_projection"}
    assert not torch.equal(separate.key_projection, separate.value_projection)  # type: ignore[arg-type]
    twin = make(share_kv=False)
    twin.load_state_dict(separate.state_dict())
    q, k, v = tensors(2, 2, 7, 9)
    assert torch.equal(twin(q, k, v), separate(q, k, v))
    with pytest.raises(RuntimeError, match="value_projection"):
        shared.load_state_dict(separate.state_dict())


def test_projections_learn() -> None:
    """Gradient steps on the projections alone bring the output nearer to exact attention."""
    q, k, v = (x.detach() for x in tensors(4, 2, 12, peak=4))
    truth = exact(q, k, v)
    torch.manual_seed(0)
    module = make(budget=6)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.03)
    losses = []
    for _ in range(60):
        loss = (module(q, k, v) - truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


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


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made, views of `known` tensors aside."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.size = 0
        self.known = {x.untyped_storage().data_ptr() for x in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.known:
                self.size = max(self.size, x.untyped_storage().nbytes() // x.element_size())
        return result


def test_no_n_by_d_matrix() -> None:
    """Beside the parameters nothing is larger than the queries, forward and backward."""
    q, k, v = tensors(1, 2, 600, p=16, dtype=torch.float32)
    module = build("linformer", head_dim=16, max_len=600, budget=300).requires_grad_(False)
    with Largest(*module.parameters()) as largest:
        gradients(module(q, k, v), (q, k, v))
    assert largest.size == q.numel()


def test_unreduced_form_is_the_sketch_with_a_gaussian() -> None:
    q, k, v = tensors(2, 2, 9)
    module = build("linformer_jlt", head_dim=4, budget=5)
    noise = draw(module, q, k)
    assert torch.equal(
        module(q, k, v, noise=noise), build("sketched", head_dim=4, budget=5, sketch="gaussian")(q, k, v, noise=noise)
    )


@pytest.mark.parametrize("masked", [False, True])
def test_unreduced_form_is_unbiased(masked: bool) -> None:
    """The mean over draws is exact attention within 4 standard errors."""
    draws = 4000
    q, k, v = (copies(x, draws) for x in tensors(1, 1, 5, p=2, seed=1))
    mask = copies(torch.tensor([[True, True, False, True, True]]), draws) if masked else None
    output = build("linformer_jlt", head_dim=2, budget=4)(
        q, k, v, key_mask=mask, query_mask=mask, generator=generator(2)
    )
    one = None if mask is None else mask[:1]
    error = output.mean(0) - exact(q[:1], k[:1], v[:1], one, one)[0]
    assert (error.abs() <= 4 * output.std(0) / math.sqrt(draws) + 1e-12).all()
