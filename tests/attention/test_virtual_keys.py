"""The algebra of weighted keys: union, weights as repetitions, any leading dimensions, compression."""

import math

import pytest
import torch
from torch import Tensor

from skeinformer.attention.columns import merge_columns
from skeinformer.attention.pilots import compute_pilots, log_importance
from skeinformer.attention.selection import Selection, sample_without_replacement
from skeinformer.attention.virtual_keys import VirtualKeys, attend, attend_with_normalizer, cat, from_mask
from skeinformer.kernels import fused
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.fused import attend_unfused
from tests.helpers import DTYPES, exact, generator, gradients, random_mask

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


def compress(pilot_queries: Tensor, source: VirtualKeys, d: int, u: Tensor, *, scale: float) -> VirtualKeys:
    """d + 1 slots that answer queries like the pilots almost as `source` does: lines 3 to 10 for any weighted set."""
    rows = torch.arange(pilot_queries.shape[-2]).expand(pilot_queries.shape[:-1])
    pilots = compute_pilots(pilot_queries, Selection(rows, torch.ones_like(rows, dtype=torch.bool)), source, scale)
    return merge_columns(source, sample_without_replacement(log_importance(pilots, source, scale), u, d))[1]


def plain(query: Tensor, source: VirtualKeys) -> Tensor:
    """softmax(s q k^T + log weight) v, as written."""
    scores = SCALE * query @ source.keys.mT + source.log_weight[..., None, :]
    return torch.softmax(scores, -1) @ source.values


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("p_v", [2, 4, 7])
def test_attend_is_a_weighted_softmax(leading: tuple[int, ...], p_v: int) -> None:
    query, source = rand(*leading, 5, 4, seed=9), weighted_set(*leading, m=8, p_v=p_v)
    inputs = (query, source.keys, source.values)
    expected = plain(query, source)
    expected_gradients = gradients(expected, inputs)
    with_normalizer, normalizer = attend_with_normalizer(query, source, SCALE)
    for output in (attend(query, source, SCALE), with_normalizer):
        assert output.shape == (*leading, 5, p_v)
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(gradients(output, inputs), expected_gradients, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    scores = SCALE * query @ source.keys.mT + source.log_weight[..., None, :]
    assert not normalizer.requires_grad
    torch.testing.assert_close(normalizer, scores.logsumexp(-1).detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_unfused_path_is_the_fused_path(leading: tuple[int, ...], dtype: torch.dtype) -> None:
    """Devices without the fused normalizer take it: values, gradients and normalizer agree."""
    query = rand(*leading, 5, 4, seed=9, dtype=dtype)
    source = weighted_set(*leading, m=8, p_v=3, dtype=dtype)
    inputs = (query, source.keys, source.values)
    fused, fused_normalizer = attend_with_normalizer(query, source, SCALE)
    output, normalizer = attend_unfused(query, *source, SCALE)
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    assert output.dtype == fused.dtype == dtype
    assert not normalizer.requires_grad
    torch.testing.assert_close(output, fused, **tolerance)
    torch.testing.assert_close(normalizer, fused_normalizer, rtol=tolerance["rtol"], atol=1e-5, check_dtype=False)
    for ours, theirs in zip(gradients(output, inputs), gradients(fused, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=16 * tolerance["rtol"], atol=16 * tolerance["atol"])


@pytest.mark.parametrize("path", [fused.attend_with_normalizer, attend_unfused])
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_live_slot_gives_zero(path: object, dtype: torch.dtype) -> None:
    query = rand(2, 1, 3, 4, seed=1, dtype=dtype)
    source = weighted_set(2, 1, m=5, dtype=dtype)
    log_weight = source.log_weight.clone()
    log_weight[1] = -torch.inf
    source = source._replace(log_weight=log_weight)
    output, normalizer = path(query, *source, SCALE)
    for result in (output, attend(query, source, SCALE)):
        assert (result[1] == 0).all()
        assert result[0].isfinite().all()
        for gradient in gradients(result, (query, source.keys, source.values)):
            assert (gradient[1] == 0).all()
            assert gradient.isfinite().all()
    assert (normalizer[1] == 0).all()
    assert normalizer.isfinite().all()


@pytest.mark.parametrize("path", [fused.attend_with_normalizer, attend_unfused])
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_of_1e4(path: object, dtype: torch.dtype) -> None:
    query, source = rand(1, 1, 6, 4, seed=1, dtype=dtype), weighted_set(1, 1, m=7, dtype=dtype)
    source = source._replace(keys=(source.keys.detach() * 1e4).to(dtype).clamp(-3e4, 3e4).requires_grad_())
    output, normalizer = path(query, *source, SCALE)
    assert normalizer.abs().max() > 1e4
    assert normalizer.isfinite().all()
    assert output.isfinite().all()
    assert all(x.isfinite().all() for x in gradients(output, (query, source.keys, source.values)))


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_attending_to_a_union_is_attending_to_both(leading: tuple[int, ...]) -> None:
    """The union equals both parts mixed by their normalizers, and the softmax over all slots."""
    query = rand(*leading, 5, 4, seed=9)
    first, second = weighted_set(*leading, m=6, p_v=3), weighted_set(*leading, m=9, p_v=3, seed=20)
    union = cat(first, second)
    output, normalizer = attend_with_normalizer(query, union, SCALE)
    first_output, first_normalizer = attend_with_normalizer(query, first, SCALE)
    second_output, second_normalizer = attend_with_normalizer(query, second, SCALE)
    share = torch.sigmoid(first_normalizer - second_normalizer)[..., None]
    torch.testing.assert_close(output, share * first_output + (1 - share) * second_output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(normalizer, torch.logaddexp(first_normalizer, second_normalizer), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output, plain(query, union), rtol=1e-12, atol=1e-12)


def repeated(source: VirtualKeys, times: list[int]) -> VirtualKeys:
    """The set with slot j repeated times[j], each copy of weight 1."""
    count = torch.tensor(times)
    keys, values = (x.repeat_interleave(count, -2) for x in (source.keys, source.values))
    return VirtualKeys(keys, values, torch.zeros(keys.shape[:-1], dtype=source.log_weight.dtype))


TIMES = [3, 1, 0, 2, 5, 1]


def test_a_weight_is_a_number_of_repetitions() -> None:
    query, source = rand(2, 3, 5, 4, seed=9), weighted_set(2, 3, m=6)
    source = source._replace(log_weight=torch.tensor(TIMES).double().log().expand(2, 3, 6))
    copies = repeated(source, TIMES)
    weighted, unweighted = attend(query, source, SCALE), attend(query, copies, SCALE)
    torch.testing.assert_close(weighted, unweighted, rtol=1e-12, atol=1e-12)
    inputs = (query, source.keys, source.values)
    for ours, theirs in zip(gradients(weighted, inputs), gradients(unweighted, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("leading", [(2, 3), (2, 2, 3)])
def test_from_mask_gives_padding_no_weight(leading: tuple[int, ...]) -> None:
    keys, values = rand(*leading, 7, 4, seed=0), rand(*leading, 7, 4, seed=1)
    mask = random_mask(2, 7).view(2, *[1] * (len(leading) - 1), 7)
    source = from_mask(keys, values, mask)
    assert source.log_weight.shape == (*leading, 7)
    assert torch.equal(source.log_weight == 0, mask.expand(*leading, 7))
    assert torch.equal(source.log_weight == -torch.inf, ~mask.expand(*leading, 7))
    assert (from_mask(keys, values).log_weights() == 0).all()


def test_from_mask_is_exact_attention() -> None:
    query, keys, values = (rand(2, 2, n, 4, seed=n) for n in (5, 7, 7))
    mask = random_mask(2, 7)
    torch.testing.assert_close(
        attend(query, from_mask(keys, values, mask[:, None]), SCALE), exact(query, keys, values, mask, scale=SCALE)
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_log_weight_is_float32_or_better(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    keys = rand(1, 1, 3, 4, seed=0, dtype=dtype)
    assert from_mask(keys, keys).log_weights().dtype == expected
    assert statistics_dtype(keys) == expected
    noise = torch.rand(1, 1, 3, generator=generator())
    small = compress(keys, from_mask(keys, keys), 2, noise, scale=SCALE)
    assert small.log_weight.dtype == expected
    assert small.keys.dtype == small.values.dtype == dtype


def test_log_weight_carries_no_gradient() -> None:
    query, source = rand(1, 1, 5, 4, seed=9), weighted_set(1, 1, m=6)
    log_weight = source.log_weight.clone().requires_grad_()
    source = source._replace(log_weight=log_weight)
    for output in (attend(query, source, SCALE), attend_unfused(query, *source, SCALE)[0]):
        assert torch.autograd.grad(output.sum(), log_weight, allow_unused=True)[0] is None


@pytest.mark.parametrize("leading", LEADING, ids=str)
@pytest.mark.parametrize("d", [6, 7, 20])
def test_compressing_to_all_live_slots_is_exact(leading: tuple[int, ...], d: int) -> None:
    """d >= live slots: attending to the compressed set is attending to the source, with gradients."""
    query, source = rand(*leading, 5, 4, seed=9), weighted_set(*leading, m=6, p_v=3)
    noise = torch.rand(*leading, 6, generator=generator(1))
    small = compress(query[..., :2, :].detach(), source, d, noise, scale=SCALE)
    assert small.log_weight.shape == (*leading, min(d, 6) + 1)
    assert small.keys.isfinite().all()
    assert small.values.isfinite().all()
    output, expected = attend(query, small, SCALE), plain(query, source)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    inputs = (query, source.keys, source.values)
    for ours, theirs in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_compressing_keeps_the_total_weight(leading: tuple[int, ...]) -> None:
    source = weighted_set(*leading, m=9)
    small = compress(
        rand(*leading, 3, 4, seed=5), source, 4, torch.rand(*leading, 9, generator=generator(2)), scale=SCALE
    )
    assert small.keys.shape == (*leading, 5, 4)
    torch.testing.assert_close(small.log_weight.logsumexp(-1), source.log_weight.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_compressing_an_empty_set_gives_an_empty_set() -> None:
    source = weighted_set(2, m=5)
    source = source._replace(log_weight=torch.full_like(source.log_weight, -torch.inf))
    small = compress(rand(2, 3, 4, seed=5), source, 2, torch.rand(2, 5, generator=generator(2)), scale=SCALE)
    assert (small.log_weight == -torch.inf).all()
    assert (attend(rand(2, 3, 4, seed=6), small, SCALE) == 0).all()


def every(index: Tensor) -> Selection:
    return Selection(index, torch.ones_like(index, dtype=torch.bool))


def test_a_weighted_slot_is_chosen_and_summarized_like_its_copies() -> None:
    """Eq. (5) gives a slot of weight w the norm of w equal columns added up; the stand-in weighs by w."""
    source = weighted_set(1, 1, m=6)
    weight = torch.tensor(TIMES).double()
    source = source._replace(log_weight=weight.log().expand(1, 1, 6))
    copies = repeated(source, TIMES)
    queries = rand(1, 1, 4, 4, seed=5)
    rows = torch.arange(4).expand(1, 1, 4)
    ours = log_importance(compute_pilots(queries, every(rows), source, SCALE), source, SCALE)
    theirs = log_importance(compute_pilots(queries, every(rows), copies, SCALE), copies, SCALE)
    groups = torch.arange(6).repeat_interleave(torch.tensor(TIMES))
    summed = torch.zeros(6, dtype=torch.float64).index_add(0, groups, theirs[0, 0].exp()).log()
    torch.testing.assert_close(ours[0, 0], summed, rtol=1e-12, atol=1e-12)

    chosen = torch.tensor([[[4, 0]]])
    all_copies = torch.tensor([[[j for j, group in enumerate(groups.tolist()) if group in (0, 4)]]])
    ours_rest, theirs_rest = (
        VirtualKeys(*(part.narrow(2, picked.shape[-1], 1) for part in merge_columns(x, every(picked))[1]))
        for x, picked in ((source, chosen), (copies, all_copies))
    )
    for a, b in zip(ours_rest, theirs_rest, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert math.isclose(ours_rest.log_weight.exp().item(), 1 + 2 + 1, rel_tol=1e-12)


def test_compressing_nothing_but_equal_slots_is_exact() -> None:
    """Sixteen copies of one key: whatever is chosen, the stand-in has the right key, value and weight."""
    source = VirtualKeys(*(rand(1, 1, 4, seed=x).expand(1, 16, 4) for x in (0, 1)), torch.zeros(1, 16).double())
    query = rand(1, 5, 4, seed=5)
    small = compress(query, source, 3, torch.rand(1, 16, generator=generator(2)), scale=SCALE)
    torch.testing.assert_close(attend(query, small, SCALE), plain(query, source), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(small.log_weight.exp(), torch.tensor([[1.0, 1, 1, 13]]).double())
