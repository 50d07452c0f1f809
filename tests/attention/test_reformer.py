"""LSH attention: hashes, sorting, what a token finds, and the merge of rounds, against a transcription of the paper."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention import Attention, reformer
from skeinformer.attention.reformer import COLUMNS, Reformer, hash_tokens, num_buckets, num_columns
from skeinformer.noise import normal
from tests import reference_reformer as reference
from tests.helpers import draw, generator, gradients, lengths_mask, over_heads, random_mask, tensors, thinned

SCALE = 0.5  # 1/sqrt(4)


def method_of(module: Attention) -> Reformer:
    assert isinstance(module.method, Reformer)
    return module.method


def buckets_of(tokens: Tensor, R: Tensor, m: int, chunk_size: int) -> list[list[int]]:
    """Of (n, p) tokens in every round, by rotations (columns, rounds, p): 2 m / C buckets, or one for two chunks."""
    count = 1 if m <= 2 * chunk_size else 2 * math.ceil(m / chunk_size)
    rounds = range(R.shape[1])
    if count == 1:
        return [[0] * len(tokens) for _ in rounds]
    return [[reference.lsh_hash(x, R[: count // 2, r].T) for x in tokens.detach()] for r in rounds]


def expected_output(
    q: Tensor, v: Tensor, rotations: Tensor, chunk_size: int, key_mask: Any, query_mask: Any, **options: bool
) -> Tensor:
    def one_head(Q: Tensor, K: Tensor, V: Tensor, keys: list[bool], queries: list[bool], at: tuple[int, int]) -> Tensor:
        buckets = buckets_of(Q, rotations[at], sum(keys), chunk_size)
        found = reference.find(buckets, keys, queries, chunk_size, **options)
        return reference.shared_attention(Q, V, SCALE, keys, queries, found)

    return over_heads(one_head, q, q, v, key_mask, query_mask)


@pytest.mark.parametrize(("num_hashes", "chunk_size"), [(1, 1), (1, 4), (2, 2), (3, 3), (2, 5)])
@pytest.mark.parametrize(
    ("across_buckets", "count_duplicates", "kind"),
    thinned([False, True], [False, True], ["none", "both", "unlike"], of=3),
)
def test_values_and_gradients_are_those_of_the_transcription(
    num_hashes: int, chunk_size: int, across_buckets: bool, count_duplicates: bool, kind: str
) -> None:
    n = 14
    q, _, v = tensors(1, 2, n, p_v=3)
    key_mask = None if kind == "none" else random_mask(1, n, share=0.8)
    query_mask = random_mask(1, n, seed=3) if kind == "unlike" else key_mask
    options = {"across_buckets": across_buckets, "count_duplicates": count_duplicates}
    module = build("reformer", head_dim=4, num_hashes=num_hashes, chunk_size=chunk_size, **options)
    noise = draw(module, q, q)
    output = module(q, q, v, key_mask=key_mask, query_mask=query_mask, noise=noise)
    expected = expected_output(
        q,
        v,
        normal(noise[0]).double(),
        chunk_size,
        key_mask,
        query_mask,
        across_buckets=across_buckets,
        duplicates=count_duplicates,
    )
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    for ours, theirs in zip(gradients(output, (q, v)), gradients(expected, (q, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"across_buckets": True}, {"across_buckets": True, "count_duplicates": True}])
@pytest.mark.parametrize("num_hashes", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
def test_the_fused_kernel_and_single_operations_agree(
    options: dict[str, bool], num_hashes: int, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients; also in float32 for tokens that find no other in any round, each with 1/r of its weight."""
    q, _, v = tensors(2, 2, 50, p_v=6, dtype=torch.float32)
    mask = random_mask(2, 50) if masked else None
    module = build("reformer", head_dim=4, num_hashes=num_hashes, chunk_size=4, **options)
    results = []
    for fused in (True, False):
        with monkeypatch.context() as patch:
            if not fused:
                patch.setattr(reformer, "is_eager_cpu", lambda x: False)
            output = module(q, q, v, key_mask=mask, query_mask=mask, noise=draw(module, q, q))
        results.append((output, *gradients(output, (q, v))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def full_attention(q: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """All of shared-QK attention, by the transcription."""
    return over_heads(
        lambda Q, K, V, keys, queries, at: reference.shared_attention(Q, V, SCALE, keys, queries), q, q, v, mask, mask
    )


@pytest.mark.parametrize(
    ("num_hashes", "n", "masked", "count_duplicates"),
    thinned([1, 2, 3], [1, 2, 9, 12], [False, True], [False, True], of=3),
)
def test_two_chunks_that_hold_everything_are_exact(
    num_hashes: int, n: int, masked: bool, count_duplicates: bool
) -> None:
    """Every round finds every key, so that duplicates weigh all keys alike."""
    q, _, v = tensors(2, 2, n, peak=4)
    mask = random_mask(2, n) if masked else None
    module = build(
        "reformer", head_dim=4, budget=12 * num_hashes, num_hashes=num_hashes, count_duplicates=count_duplicates
    )
    assert method_of(module).chunk == 6
    output = module(q, q, v, key_mask=mask, query_mask=mask, generator=generator())
    expected = full_attention(q, v, mask)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    for ours, theirs in zip(gradients(output, (q, v)), gradients(expected, (q, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def weights_of(n: int, seed: int = 0, **options: Any) -> Tensor:
    """The attention matrix: the output for V = I, (1, 1, n, n)."""
    q = tensors(1, 1, n, seed=seed)[0].detach()
    return build("reformer", head_dim=4, **options)(q, q, torch.eye(n).double()[None, None], generator=generator())


def test_visited_keys_at_a_budget_of_256() -> None:
    module = build("reformer", head_dim=4)
    assert (method_of(module).num_hashes, method_of(module).chunk) == (2, 64)
    seen = weights_of(1024, across_buckets=True, num_hashes=1, chunk_size=64)[0, 0] > 0
    assert (seen.sum(-1) == 127).all()  # two chunks without the token itself
    both = weights_of(1024, across_buckets=True)[0, 0] > 0
    assert (both.sum(-1) <= 254).all()
    assert both.sum(-1).double().mean() > 200


def test_many_buckets_are_pairs_of_hashes() -> None:
    """Beyond 2 COLUMNS: bucket = first + buckets of the first * second, each hash with columns of its own."""
    m, chunk_size = 1000, 10  # 200 buckets are asked for
    q = tensors(1, 1, m)[0].detach()
    first, second = num_buckets(torch.tensor([[m]]), chunk_size)
    assert first == second == 16
    R = torch.randn(1, 1, num_columns(m, chunk_size), 2, 4, generator=generator(), dtype=torch.float64)
    buckets = hash_tokens(q, R, torch.tensor([[m]]), chunk_size)
    assert buckets.max() < 16 * 16
    for r, t in itertools.product(range(2), range(0, m, 41)):
        one = reference.lsh_hash(q[0, 0, t], R[0, 0, :8, r].T)
        two = reference.lsh_hash(q[0, 0, t], R[0, 0, 8:16, r].T)
        assert buckets[0, 0, r, t] == one + 16 * two


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_numbers_of_buckets(chunk_size: int) -> None:
    for m in [0, 1, 2, 3, 13, 14, 15, 64, 65, 128, 129, 448, 449, 1000, 4096, 5000, 16384, 100_000]:
        first, second = (int(count) for count in num_buckets(torch.tensor(m), chunk_size))
        asked = 2 * math.ceil(m / chunk_size)
        if m <= 2 * chunk_size:
            assert (first, second) == (1, 1)
            continue
        assert first % 2 == 0
        assert min(asked, COLUMNS**2) <= first * second <= asked + 4 * math.sqrt(asked) + 4
        assert (second == 1) == (asked <= 2 * COLUMNS)
        needed = first // 2 + (second // 2 if second > 1 else 0)
        for n in (m, m + 1, 2 * m):  # also where padding makes the sequence longer
            assert COLUMNS >= num_columns(n, chunk_size) >= needed


@pytest.mark.parametrize(("n", "longer"), [(20, 50), (100, 300), (400, 900)])
def test_right_padding_changes_nothing(n: int, longer: int) -> None:
    """Also where the padded length asks for pairs of hashes and the real one does not, or both do."""
    q, _, v = (x.detach() for x in tensors(1, 2, longer))
    module = build("reformer", head_dim=4, chunk_size=2, seed=3).eval()
    mask = lengths_mask([n], longer)
    padded = module(q, q, v, key_mask=mask, query_mask=mask)
    short = q[:, :, :n].clone()
    torch.testing.assert_close(padded[:, :, :n], module(short, short, v[:, :, :n]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_zero_vectors_have_finite_gradients(dtype: torch.dtype) -> None:
    """A black pixel may have the query 0: its key is 0, not 0/0."""
    q, _, v = tensors(1, 1, 20, dtype=dtype)
    q = q.detach().index_fill(2, torch.tensor([3, 4, 11]), 0).requires_grad_()
    output = build("reformer", head_dim=4, chunk_size=2)(q, q, v, generator=generator())
    assert output.isfinite().all()
    assert all(gradient.isfinite().all() for gradient in gradients(output, (q, v)))


def test_query_must_be_key() -> None:
    q, k, v = tensors(1, 1, 6)
    for other in (k, q.clone(), q[..., :4, :]):
        with pytest.raises(ValueError, match="tie the two projections"):
            build("reformer", head_dim=4)(q, other, v[..., : other.shape[2], :])


def test_two_views_of_the_same_queries_are_one_tensor() -> None:
    x = torch.randn(2, 6, 2, 4, generator=generator())
    module = build("reformer", head_dim=4)
    q = x.transpose(1, 2)
    output = module(q, x.transpose(1, 2), q, generator=generator())
    assert torch.equal(output, module(q, q, q, generator=generator()))
    stacked = torch.randn(2, 2, 2, 4, generator=generator())
    with pytest.raises(ValueError, match="tie"):
        module(stacked[:, :1], stacked[:, 1:], stacked[:, 1:])
