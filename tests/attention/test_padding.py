"""Padding, batch mates and heads: what is not part of an example's head cannot change its result."""

import math

import pytest
import torch
from torch import Tensor

from tests.helpers import (
    BOUND_TO_POSITIONS,
    HEAD_DIM,
    PATTERN_OF_THE_HEAD,
    ROWS_ARE_LEARNED,
    SELF_ATTENTION,
    SHARED_QK,
    SKETCHED,
    VARIANTS,
    clear,
    draw,
    generator,
    gradients,
    inputs_for,
    lengths_mask,
    map_inputs,
    map_noise,
    masks_for,
    random_mask,
    tensors,
)

N, N_K = 11, 13  # unlike each other and unlike every budget, so that a dimension of the noise tells what it counts

every_variant = pytest.mark.parametrize("name", VARIANTS)


def garbage(x: Tensor, mask: Tensor, content: float) -> Tensor:
    """x with other contents where the mask is False; 0 stands for random numbers of size 1e3."""
    other = torch.full_like(x, content) if content else 1e3 * torch.randn(x.shape, generator=generator(9)).to(x.dtype)
    return x.detach().where(mask[:, None, :, None], other).requires_grad_()


@every_variant
@pytest.mark.parametrize(
    ("content", "dtype"),
    [(0.0, torch.float64), (math.nan, torch.float64), (math.nan, torch.bfloat16), (math.inf, torch.float16)],
)
def test_contents_of_padding_change_nothing(name: str, content: float, dtype: torch.dtype) -> None:
    q, k, v = inputs_for(name, 3, 2, N, N_K, p_v=3, dtype=dtype)
    key_mask, query_mask = random_mask(3, k.shape[2], seed=1), random_mask(3, N, seed=2)
    if name in SHARED_QK:  # what is padding as a key and real as a query is no padding
        query_mask = key_mask
    module = VARIANTS[name].build()
    noise = draw(module, q, k)
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    expected = module(q, k, v, noise=noise, **masks)
    dirty_query = garbage(q, query_mask, content)
    dirty_key = dirty_query if k is q else garbage(k, key_mask, content)
    dirty = dirty_query, dirty_key, garbage(v, key_mask, content)
    output = module(*dirty, noise=noise, **masks)
    assert torch.equal(output, expected)
    assert (output.masked_select(~query_mask[:, None, :, None]) == 0).all()
    clean_gradients, dirty_gradients = gradients(expected, (q, k, v)), gradients(output, dirty)
    for clean, other, mask in zip(clean_gradients, dirty_gradients, (query_mask, key_mask, key_mask), strict=True):
        assert torch.equal(clean, other)
        assert (other.masked_select(~mask[:, None, :, None]) == 0).all()


def move(x: Tensor, dim: int, positions: Tensor, n: int) -> Tensor:
    """Put index i of dimension dim at positions[i] of n; what is between holds noise of its own."""
    shape = list(x.shape)
    shape[dim] = n
    filler = torch.rand(shape, generator=generator(7), dtype=x.dtype)
    return filler.index_copy(dim, positions, x)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - BOUND_TO_POSITIONS))
def test_place_of_padding_changes_nothing(name: str) -> None:
    """Real tokens in the same order with padding between them, their noise moved along."""
    q, k, v = map_inputs(torch.detach, inputs_for(name, 2, 2, N, N_K))
    # two tokens in a chunk of Reformer: as many rotations as chunks, a number that is no length either
    module = VARIANTS[name].build(budget=8 if name in SHARED_QK else 5)
    noise = draw(module, q, k)
    n, n_k = N + 6, N_K + 9
    query_at = torch.randperm(n, generator=generator(1))[:N].sort().values
    key_at = torch.randperm(n_k, generator=generator(2))[:N_K].sort().values
    if name in SELF_ATTENTION:
        n_k, key_at = n, query_at

    def move_noise(u: Tensor) -> Tensor:
        for dim in range(2, u.ndim):
            if u.shape[dim] == N:
                u = move(u, dim, query_at, n)
            elif u.shape[dim] == N_K:
                u = move(u, dim, key_at, n_k)
        return u

    moved_noise = map_noise(noise, move_noise)
    moved_query = move(q, 2, query_at, n)
    moved_key = moved_query if k is q else move(k, 2, key_at, n_k)
    if name in SHARED_QK:  # rotations belong to no token: a longer sequence has more of them, after the others
        more = draw(module, moved_query, moved_key, seed=7)[0]
        moved_noise = (torch.cat([noise[0], more[:, :, noise[0].shape[2] :]], 2),)

    query_mask, key_mask = torch.zeros(2, n, dtype=torch.bool), torch.zeros(2, n_k, dtype=torch.bool)
    query_mask[:, query_at], key_mask[:, key_at] = True, True
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    output = module(moved_query, moved_key, move(v, 2, key_at, n_k), noise=moved_noise, **masks)
    torch.testing.assert_close(output[:, :, query_at], module(q, k, v, noise=noise), rtol=1e-11, atol=1e-12)


@every_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_example_alone_is_the_example_in_its_batch(name: str, dtype: torch.dtype) -> None:
    q, k, v = inputs_for(name, 3, 2, N, N_K, dtype=dtype)
    key_mask, query_mask = lengths_mask([k.shape[2], 2, 7], k.shape[2]), lengths_mask([N, 1, 6], N)
    module = VARIANTS[name].build()
    noise = draw(module, q, k)
    together = module(q, k, v, key_mask=key_mask, query_mask=query_mask, noise=noise)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for i in range(3):
        at = slice(i, i + 1)
        alone = module(
            *map_inputs(lambda x, at=at: x[at], (q, k, v)),
            key_mask=key_mask[at],
            query_mask=query_mask[at],
            noise=map_noise(noise, lambda u, at=at: u[at]),
        )
        torch.testing.assert_close(alone, together[at], rtol=tolerance, atol=tolerance)


@every_variant
def test_heads_are_independent(name: str) -> None:
    q, k, v = inputs_for(name, 2, 4, N, N_K)
    mask = random_mask(2, k.shape[2])
    module = VARIANTS[name].build()
    noise = draw(module, q, k)
    order = torch.tensor([2, 3, 0, 1] if name in PATTERN_OF_THE_HEAD else [2, 0, 3, 1])
    inputs = map_inputs(lambda x: x[:, order], (q, k, v))
    shuffled = module(*inputs, key_mask=mask, noise=map_noise(noise, lambda u: u[:, order]))
    expected = module(q, k, v, key_mask=mask, noise=noise)[:, order]
    torch.testing.assert_close(shuffled, expected, rtol=1e-12, atol=1e-12)


@every_variant
@pytest.mark.parametrize(
    ("which", "content", "dtype"),
    [(0, math.nan, torch.float32), (1, math.inf, torch.float16), (2, math.nan, torch.float16)],
)
def test_a_broken_example_leaves_its_batch_mates_alone(
    name: str, which: int, content: float, dtype: torch.dtype
) -> None:
    inputs = inputs_for(name, 3, 2, N, N_K, dtype=dtype)
    broken = map_inputs(lambda x: x.detach().clone(), inputs)
    broken[which][1, 0, 4, 2] = content
    broken_inputs = tuple(x.requires_grad_() for x in broken)
    module = VARIANTS[name].build()
    noise = draw(module, inputs[0], inputs[1])
    expected, output = module(*inputs, noise=noise), module(*broken_inputs, noise=noise)
    mates = [0, 2]
    assert torch.equal(output[mates], expected[mates])
    for clean, other in zip(gradients(expected, inputs), gradients(output, broken_inputs), strict=True):
        assert torch.equal(clean[mates], other[mates])


@every_variant
def test_a_fully_padded_example_is_zero(name: str) -> None:
    """No real key, no real query, or neither: exact zeros and zero gradients, and nothing for the others."""
    q, k, v = inputs_for(name, 4, 2, N, N_K)
    key_mask, query_mask = torch.ones(4, k.shape[2], dtype=torch.bool), torch.ones(4, N, dtype=torch.bool)
    key_mask[[0, 2]] = False
    query_mask[[1, 2]] = False
    module = VARIANTS[name].build()
    noise = draw(module, q, k)
    output = module(q, k, v, key_mask=key_mask, query_mask=query_mask, noise=noise)
    assert (output[:3] == 0).all()
    for gradient in gradients(output, (q, k, v)):
        assert (gradient[:3] == 0).all()
        assert gradient[3].isfinite().all()
    alone = module(*map_inputs(lambda x: x[3:], (q, k, v)), noise=map_noise(noise, lambda u: u[3:]))
    torch.testing.assert_close(output[3:], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - SKETCHED - ROWS_ARE_LEARNED - {"softmax_dropout"}))
def test_a_single_real_key_is_returned(name: str) -> None:
    """Attention to one token is its value. Sketches and projections rescale it; dropout in training may drop it."""
    q, k, v = inputs_for(name, 2, 2, N, N_K, p_v=3)
    last = k.shape[2] - 1
    key_mask = torch.zeros(2, last + 1, dtype=torch.bool)
    key_mask[0, 5], key_mask[1, last] = True, True
    masks = masks_for(name, key_mask)
    output = VARIANTS[name].build()(q, k, v, generator=generator(), **masks)
    expected = clear(torch.stack([v[0, :, 5], v[1, :, last]])[:, :, None].expand_as(output), masks["query_mask"])
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)


@every_variant
def test_all_true_masks_are_no_masks(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, N, N_K)
    module = VARIANTS[name].build()
    noise = draw(module, q, k)
    masks = {"key_mask": torch.ones(2, k.shape[2], dtype=torch.bool), "query_mask": torch.ones(2, N, dtype=torch.bool)}
    masked = module(q, k, v, noise=noise, **masks)
    torch.testing.assert_close(masked, module(q, k, v, noise=noise), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_left_padding_longer_than_a_block_of_the_kernel(dtype: torch.dtype) -> None:
    """The fused kernel works in blocks of keys: whole blocks of padding before the first real key give no NaN."""
    q, k, v = tensors(1, 1, 3, 1500, dtype=dtype)
    key_mask = torch.arange(1500)[None] >= 1490
    module = VARIANTS["skeinformer"].build(budget=32)
    output = module(q, k, v, key_mask=key_mask, generator=generator())
    real = slice(1490, None)
    expected = module(q, k[:, :, real], v[:, :, real], generator=generator())
    tolerance = 10 * torch.finfo(dtype).eps
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance)
    assert output.shape == (1, 1, 3, HEAD_DIM)
