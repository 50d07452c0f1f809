"""The algebra of weighted keys: a union, weights as repetitions, any leading dimensions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.virtual_keys import VirtualKeys, attend, attend_with_lse, from_mask, union
from skeinformer.kernels import fused
from skeinformer.kernels.choice import statistics_dtype
from tests.helpers import DTYPES, generator, gradients, random_mask

SCALE = 0.6
LEADING = [(), (3,), (2, 3), (2, 3, 2), (2, 1, 3, 2, 1)]


def rand(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=torch.float64).to(dtype).requires_grad_()


def weighted_set(
    *leading: int, m: int, p: int = 4, p_v: int = 4, seed: int = 0, dtype: torch.dtype = torch.float64
) -> VirtualKeys:
    """Random keys, values and log weights, one slot in four empty, the first never."""
    log_weight = rand(*leading, m, seed=seed + 2).detach()
    empty = (torch.rand(log_weight.shape, generator=generator(seed + 3)) < 0.25) & (torch.arange(m) > 0)
    log_weight = log_weight.masked_fill(empty, -torch.inf)
    return VirtualKeys(
        rand(*leading, m, p, seed=seed, dtype=dtype),
        rand(*leading, m, p_v, seed=seed + 1, dtype=dtype),
        log_weight.to(torch.float64 if dtype == torch.float64 else torch.float32),
    )


def plain(query: Tensor, source: VirtualKeys) -> Tensor:
    """softmax(s q k^T + log weight) v, as written."""
    scores = SCALE * query @ source.keys.mT + source.log_weights()[..., None, :]
    return torch.softmax(scores, -1) @ source.values


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("p_v", [2, 4, 7])
def test_attend_is_a_weighted_softmax(leading: tuple[int, ...], p_v: int) -> None:
    query, source = rand(*leading, 5, 4, seed=9), weighted_set(*leading, m=8, p_v=p_v)
    inputs = (query, source.keys, source.values)
    expected = plain(query, source)
    expected_gradients = gradients(expected, inputs)
    with_lse, lse = attend_with_lse(query, source, SCALE)
    for output in (attend(query, source, SCALE), with_lse):
        assert output.shape == (*leading, 5, p_v)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(gradients(output, inputs), expected_gradients, rtol=1e-11, atol=1e-12)
    scores = SCALE * query @ source.keys.mT + source.log_weights()[..., None, :]
    assert not lse.requires_grad
    torch.testing.assert_close(lse, scores.logsumexp(-1).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unfused_path_is_the_fused_path(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    """Devices without the logs of row sums take it: values, gradients and logs agree."""
    query = rand(*leading, 5, 4, seed=9, dtype=dtype)
    source = weighted_set(*leading, m=8, p_v=3, dtype=dtype)
    inputs, eps = (query, source.keys, source.values), torch.finfo(dtype).eps
    expected, expected_lse = attend_with_lse(query, source, SCALE)
    output, lse = fused.attend_unfused(query, *source, SCALE)
    assert output.dtype == expected.dtype == dtype
    assert not lse.requires_grad
    torch.testing.assert_close(output, expected, rtol=8 * eps, atol=8 * eps)
    torch.testing.assert_close(lse, expected_lse, rtol=8 * eps, atol=1e-5, check_dtype=False)
    torch.testing.assert_close(gradients(output, inputs), gradients(expected, inputs), rtol=128 * eps, atol=128 * eps)


@pytest.mark.parametrize("path", [fused.attend_with_lse, fused.attend_unfused])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_live_slot_gives_zero(path: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    query = rand(2, 1, 3, 4, seed=1, dtype=dtype)
    source = weighted_set(2, 1, m=5, dtype=dtype)
    log_weight = source.log_weights().clone()
    log_weight[1] = -torch.inf
    source = source._replace(log_weight=log_weight)
    output, lse = path(query, *source, SCALE)
    for result in (output, attend(query, source, SCALE)):
        assert (result[1] == 0).all()
        assert result[0].isfinite().all()
        for gradient in gradients(result, (query, source.keys, source.values)):
            assert (gradient[1] == 0).all()
            assert gradient.isfinite().all()
    assert (lse[1] == 0).all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("path", [fused.attend_with_lse, fused.attend_unfused])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_1e4(path: Callable[..., tuple[Tensor, Tensor]], dtype: torch.dtype) -> None:
    query, source = rand(1, 1, 6, 4, seed=1, dtype=dtype), weighted_set(1, 1, m=7, dtype=dtype)
    source = source._replace(keys=(source.keys.detach() * 1e4).to(dtype).clamp(-3e4, 3e4).requires_grad_())
    output, lse = path(query, *source, SCALE)
    assert lse.abs().max() > 1e4
    assert lse.isfinite().all()
    assert output.isfinite().all()
    assert all(x.isfinite().all() for x in gradients(output, (query, source.keys, source.values)))


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_attending_to_a_union_is_attending_to_both(leading: tuple[int, ...]) -> None:
    """The union equals both parts mixed by their sums, and the softmax over all slots."""
    query = rand(*leading, 5, 4, seed=9)
    first, second = weighted_set(*leading, m=6, p_v=3), weighted_set(*leading, m=9, p_v=3, seed=20)
    both = union(first, second)
    output, lse = attend_with_lse(query, both, SCALE)
    first_output, first_lse = attend_with_lse(query, first, SCALE)
    second_output, second_lse = attend_with_lse(query, second, SCALE)
    share = torch.sigmoid(first_lse - second_lse)[..., None]
    torch.testing.assert_close(output, share * first_output + (1 - share) * second_output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logaddexp(first_lse, second_lse), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output, plain(query, both), rtol=1e-12, atol=1e-12)


def repeated(source: VirtualKeys, times: list[int]) -> VirtualKeys:
    """The set with slot j repeated times[j], each copy of weight 1."""
    count = torch.tensor(times)
    keys, values = (x.repeat_interleave(count, -2) for x in (source.keys, source.values))
    return VirtualKeys(keys, values, torch.zeros(keys.shape[:-1], dtype=source.log_weights().dtype))


def test_a_weight_is_a_number_of_repetitions() -> None:
    query, source, times = rand(2, 3, 5, 4, seed=9), weighted_set(2, 3, m=6), [3, 1, 0, 2, 5, 1]
    source = source._replace(log_weight=torch.tensor(times).double().log().expand(2, 3, 6))
    copies = repeated(source, times)
    weighted, unweighted = attend(query, source, SCALE), attend(query, copies, SCALE)
    torch.testing.assert_close(weighted, unweighted, rtol=1e-12, atol=1e-12)
    inputs = (query, source.keys, source.values)
    torch.testing.assert_close(gradients(weighted, inputs), gradients(unweighted, inputs), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("leading", [(2, 3), (2, 2, 3)])
def test_from_mask_gives_padding_no_weight(leading: tuple[int, ...]) -> None:
    keys, values = rand(*leading, 7, 4, seed=0), rand(*leading, 7, 4, seed=1)
    mask = random_mask(2, 7).view(2, *[1] * (len(leading) - 1), 7)
    source = from_mask(keys, values, mask)
    assert source.log_weights().shape == (*leading, 7)
    assert torch.equal(source.log_weights() == 0, mask.expand(*leading, 7))
    assert torch.equal(source.log_weights() == -torch.inf, ~mask.expand(*leading, 7))
    assert (from_mask(keys, values).log_weights() == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_weight_is_float32_or_better(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    keys = rand(1, 1, 3, 4, seed=0, dtype=dtype)
    assert from_mask(keys, keys).log_weights().dtype == expected
    assert statistics_dtype(keys) == expected


def test_log_weight_carries_no_gradient() -> None:
    query, source = rand(1, 1, 5, 4, seed=9), weighted_set(1, 1, m=6)
    log_weight = source.log_weights().clone().requires_grad_()
    source = source._replace(log_weight=log_weight)
    for output in (attend(query, source, SCALE), fused.attend_unfused(query, *source, SCALE)[0]):
        assert torch.autograd.grad(output.sum(), log_weight, allow_unused=True)[0] is None


def test_no_mask_means_no_mask_for_the_kernel() -> None:
    """A mask of zeros costs time, and on a GPU the flash kernel."""
    query, keys, values = (rand(2, 2, n, 4, seed=n) for n in (5, 7, 7))
    assert from_mask(keys, values).log_weight is None
    expected = torch.nn.functional.scaled_dot_product_attention(query, keys, values)
    assert torch.equal(build("softmax", head_dim=4)(query, keys, values), expected)
