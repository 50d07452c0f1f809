"""Informer: which queries are selected, by which keys, and what they and the others get."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention import Attention, informer
from skeinformer.attention.informer import Informer, _draw_keys_32, as_bits, draw_keys
from skeinformer.noise import from_generator, from_seed
from tests.helpers import (
    LargestTensor,
    draw,
    exact,
    generator,
    gradients,
    lengths_mask,
    over_heads,
    random_mask,
    tensors,
)
from tests.reference_informer import MEASURES, prob_sparse

MASKS = {
    "none": (None, None),
    "suffix": (lengths_mask([9, 4], 9), lengths_mask([7, 3], 7)),
    "anywhere": (random_mask(2, 9, seed=1), random_mask(2, 7, seed=2)),
}
both = pytest.mark.parametrize("name", ["informer", "informer_mask"])


def make(name: str, budget: int = 3, head_dim: int = 4, **options: Any) -> Attention:
    # a factor takes the place of the budget
    return build(name, head_dim=head_dim, budget=None if options.get("factor") is not None else budget, **options)


def measure_sparsity(module: Attention, q: Tensor, k: Tensor, key_mask: Tensor | None, u: Tensor) -> Tensor:
    assert isinstance(module.method, Informer)
    return module.method.measure_sparsity(q, k, key_mask, u, 0.5)


def size(n: int, budget: int, factor: float | None) -> int:
    """U of n keys or u of n queries."""
    return min(budget if factor is None else max(math.ceil(factor * math.log(n)), 1), n) if n else 0


def samples(u: Tensor, real: list[int], count: int) -> list[list[int]]:
    """The keys drawn for each query of a head with numbers u, (n,), among the real ones."""
    m, drawn = torch.tensor([[[len(real)]]]), torch.tensor([[[count]]])
    index = draw_keys(as_bits(u[None, None]), torch.arange(count), m, drawn)[0, 0]  # (n, count)
    return [[real[j] for j in row] for row in index.tolist()]


@both
@pytest.mark.parametrize("case", MASKS)
@pytest.mark.parametrize("sparsity", list(MEASURES))
@pytest.mark.parametrize("factor", [None, 1.3])
def test_is_the_transcription(name: str, case: str, sparsity: str, factor: float | None) -> None:
    """Values and gradients for the same draws; `informer` counts and draws padding too, `informer_mask` does not."""
    key_mask, query_mask = MASKS[case]
    q, k, v = tensors(2, 2, 7, 9, p_v=5, peak=4)
    module = make(name, sparsity=sparsity, factor=factor)
    (u,) = draw(module, q, k, seed=13)  # no query ties with the last one chosen, as two do that draw one key only
    output = module(q, k, v, key_mask=key_mask, query_mask=query_mask, noise=(u,))

    def one_head(Q: Tensor, K: Tensor, V: Tensor, keys: Any, queries: Any, at: tuple[int, int]) -> Tensor:
        real = [j for j in range(9) if keys[j] or name == "informer"]
        active = size(sum(queries) if name == "informer_mask" else 7, 3, factor)
        drawn = samples(u[at], real, size(len(real), 3, factor))
        return prob_sparse(Q, K, V, drawn, active, 0.5, keys, queries, sparsity)

    expected = over_heads(one_head, q, k, v, key_mask, query_mask)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("sparsity", list(MEASURES))
def test_few_keys_are_all_drawn_once(sparsity: str) -> None:
    """With U at least the number of real keys M is that of the whole row, and no number matters."""
    q, k, _ = (x.detach() for x in tensors(2, 2, 20, 9))
    mask = lengths_mask([5, 3], 9)
    module = make("informer_mask", budget=5, sparsity=sparsity)
    u = torch.rand(2, 2, 20, generator=generator())
    M = measure_sparsity(module, q, k, mask[:, None], u)
    expected = [
        [[MEASURES[sparsity](q[i, j, t], list(k[i, j, :m]), 0.5) for t in range(20)] for j in range(2)]
        for i, m in enumerate((5, 3))
    ]
    torch.testing.assert_close(M, torch.tensor(expected, dtype=M.dtype), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("source", ["generator", "seed"])
def test_draws_are_uniform_and_independent(source: str) -> None:
    """Pairs of draws of one query, of neighbours, and of two heads: every pair of 5 keys within 4.5 standard errors."""
    n, m = 20_000, 5
    batch = (1, 2)
    rand = from_generator(batch, generator=generator(3)) if source == "generator" else from_seed(batch, 3)
    count = torch.tensor([[[m]]])
    keys = draw_keys(as_bits(rand(n)), torch.arange(4), count, count - 1)[0]  # (2, n, 4)
    assert keys.min() == 0
    assert keys.max() == m - 1
    pairs = {
        "ranks": (keys[0, :, 0], keys[0, :, 1]),
        "far ranks": (keys[0, :, 0], keys[0, :, 3]),
        "neighbours": (keys[0, :-1, 1], keys[0, 1:, 1]),
        "neighbours, next rank": (keys[0, :-1, 2], keys[0, 1:, 1]),
        "heads": (keys[0, :, 2], keys[1, :, 2]),
    }
    for first, second in pairs.values():
        frequency = torch.bincount(first * m + second, minlength=m * m) / len(first)
        share = 1 / m**2
        assert ((frequency - share).abs() <= 4.5 * math.sqrt(share * (1 - share) / len(first))).all()


def test_draws_do_not_depend_on_how_many_there_are() -> None:
    count = torch.tensor([[[100]]])
    short = draw_keys(as_bits(from_seed((1, 2), 3)(50)), torch.arange(7), count, count - 1)
    long = draw_keys(as_bits(from_seed((1, 2), 3)(80)), torch.arange(12), count, count - 1)
    assert torch.equal(short, long[:, :, :50, :7])


@pytest.mark.parametrize("m", [2, 1000, 2**31 - 1])
def test_draws_in_32_bits_are_the_same(m: int) -> None:
    number, rank, count = as_bits(torch.rand(500, generator=generator())), torch.arange(300), torch.tensor([[[m]]])
    assert number.max() > 2**31
    assert torch.equal(_draw_keys_32(number, rank, m), draw_keys(number[None, None], rank, count, count - 1)[0, 0])


@pytest.mark.parametrize("sparsity", list(MEASURES))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scores", [1, 50, 1 << 17])
def test_heads_in_parts_measure_the_same(
    sparsity: str, masked: bool, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some examples have fewer real keys than are drawn, and one has none."""
    q, k, _ = (x.detach() for x in tensors(4, 2, 40, 30))
    mask = lengths_mask([30, 11, 5, 0], 30)[:, None] if masked else None
    module = make("informer_mask", budget=9, sparsity=sparsity)
    u = torch.rand(4, 2, 40, generator=generator())
    monkeypatch.setattr(informer, "SCORES", scores)
    by_head = measure_sparsity(module, q, k, mask, u)
    with monkeypatch.context() as patch:
        patch.setattr(informer, "is_eager_cpu", lambda x: False)
        expected = measure_sparsity(module, q, k, mask, u)
    torch.testing.assert_close(by_head, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sparsity", list(MEASURES))
@pytest.mark.parametrize("factor", [None, 1.3, 20.0])
@pytest.mark.parametrize("n", [1, 9, 70])
def test_right_padding_is_harmless_with_the_mask(sparsity: str, factor: float | None, n: int) -> None:
    """U and u count real tokens, so that a factor too gives the same at every padded length."""
    q, k, v = tensors(2, 2, n)
    module = make("informer_mask", seed=4, sparsity=sparsity, factor=factor, budget=40).eval()
    expected = module(q, k, v)
    longer = [torch.nn.functional.pad(x, (0, 0, 0, 37)) for x in (q, k, v)]
    mask = lengths_mask([n, n], n + 37)
    padded = module(*longer, key_mask=mask, query_mask=mask)
    torch.testing.assert_close(padded[:, :, :n], expected, rtol=1e-12, atol=1e-12)


def test_of_equal_queries_the_first_is_chosen_at_every_length() -> None:
    """All queries alike and few keys: every M is the same, and what follows does not change the choice."""
    q, k, v = (x.detach() for x in tensors(1, 2, 64, 3))
    q = q[:, :, :1].expand(-1, -1, 64, -1)
    outputs = []
    for n in (20, 40, 64):
        output = make("informer_mask", budget=3)(
            q[:, :, :n], k, v, query_mask=lengths_mask([20], n), generator=generator()
        )
        outputs.append(output[:, :, :20])
    assert (outputs[0][:, :, 0] != outputs[0][:, :, 19]).all()
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@both
@pytest.mark.parametrize(("factor", "rows"), [(None, 7), (2.0, 8), (0.1, 1), (100.0, 50)])
def test_factor(name: str, factor: float | None, rows: int) -> None:
    """ceil(factor ln n) rows of n = 50, at least one and at most all; without a factor, budget rows."""
    q, k, v = tensors(1, 2, 50)
    output = make(name, budget=7, factor=factor)(q, k, v, generator=generator())
    is_exact = torch.isclose(output, exact(q, k, v), rtol=1e-10, atol=1e-12).all(-1)
    assert (is_exact.sum(-1) == rows).all()


@both
def test_exact_where_all_real_queries_have_a_place(name: str) -> None:
    """However few of the keys are real: a padded query comes after a real one that drew only padding."""
    q, k, v = tensors(3, 2, 30)
    key_mask, query_mask = lengths_mask([1, 2, 30], 30), lengths_mask([8, 8, 8], 30).flip(1)
    output = make(name, budget=8)(q, k, v, key_mask=key_mask, query_mask=query_mask, generator=generator())
    torch.testing.assert_close(output, exact(q, k, v, key_mask, query_mask), rtol=1e-11, atol=1e-12)


@both
def test_a_query_that_is_not_a_number_stays_visible(name: str) -> None:
    q, k, v = (x.detach() for x in tensors(1, 1, 30))
    q[0, 0, 11] = math.nan
    output = make(name, budget=2)(q, k, v, generator=generator())
    assert output[0, 0, 11].isnan().all()
    assert output[0, 0, :11].isfinite().all()


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_memory(name: str, dtype: torch.dtype) -> None:
    """Nothing is larger than the drawn keys of a 32nd part of the draws: no n x n, no n x U x p."""
    n, U, p = 700, 64, 16
    q, k, v = tensors(1, 2, n, p=p, dtype=dtype)
    mask = random_mask(1, n)
    with LargestTensor() as largest:
        output = make(name, budget=U, head_dim=p)(q, k, v, key_mask=mask, query_mask=mask, generator=generator())
        gradients(output, (q, k, v))
    assert largest.size == 2 * n * (U // 32) * p
