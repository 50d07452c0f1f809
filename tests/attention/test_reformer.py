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
from tests.helpers import copies, draw, generator, gradients, lengths_mask, over_heads, random_mask, tensors, thinned

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


@pytest.mark.parametrize("masked", [False, True])
def test_gradcheck_of_the_merge(masked: bool) -> None:
    """Three rounds that find different keys: the weights of the rounds have gradients too."""
    q, _, v = tensors(1, 2, 7, p=2, p_v=3, seed=3)
    mask = torch.tensor([[True, False, True, True, True, True, True]]) if masked else None
    module = build("reformer", head_dim=2, num_hashes=3, chunk_size=1)
    noise = draw(module, q, q)
    assert torch.autograd.gradcheck(lambda q, v: module(q, q, v, noise=noise, key_mask=mask, query_mask=mask), (q, v))


def weights_of(n: int, seed: int = 0, **options: Any) -> Tensor:
    """The attention matrix: the output for V = I, (1, 1, n, n)."""
    q = tensors(1, 1, n, seed=seed)[0].detach()
    return build("reformer", head_dim=4, **options)(q, q, torch.eye(n).double()[None, None], generator=generator())


@pytest.mark.parametrize("num_hashes", [1, 4])
def test_a_token_attends_to_itself_only_where_it_finds_no_other(num_hashes: int) -> None:
    weights = weights_of(40, num_hashes=num_hashes, chunk_size=2)[0, 0]
    others = weights.masked_fill(torch.eye(40, dtype=torch.bool), 0).sum(-1)
    alone = others == 0
    torch.testing.assert_close(weights.sum(-1), torch.ones(40).double(), rtol=1e-12, atol=1e-12)
    assert torch.equal(weights.diagonal()[alone], torch.ones(int(alone.sum())).double())
    assert (weights.diagonal()[~alone] == 0).all()
    assert alone.any() == (num_hashes == 1)  # both happen here


def test_duplicates_count_once_by_default() -> None:
    """Of the keys that a query finds, the ratio of two weights is that of the full attention, whatever the rounds."""
    q = tensors(1, 1, 30)[0].detach()[0, 0]
    scores = SCALE * q @ (q / q.norm(dim=-1, keepdim=True)).mT
    once = weights_of(30, num_hashes=4, chunk_size=3)[0, 0]
    multiple = weights_of(30, num_hashes=4, chunk_size=3, count_duplicates=True)[0, 0]
    seen = (once > 0) & ~torch.eye(30, dtype=torch.bool)
    assert torch.equal(seen, (multiple > 0) & ~torch.eye(30, dtype=torch.bool))
    expected = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    rows = seen.any(-1)
    torch.testing.assert_close(once[rows], expected[rows], rtol=1e-10, atol=1e-12)
    ratio = (multiple / expected)[seen]
    assert (ratio > 1.01).any()


def test_visited_keys_at_a_budget_of_256() -> None:
    module = build("reformer", head_dim=4)
    assert (method_of(module).num_hashes, method_of(module).chunk) == (2, 64)
    seen = weights_of(1024, across_buckets=True, num_hashes=1, chunk_size=64)[0, 0] > 0
    assert (seen.sum(-1) == 127).all()  # two chunks without the token itself
    both = weights_of(1024, across_buckets=True)[0, 0] > 0
    assert (both.sum(-1) <= 254).all()
    assert both.sum(-1).double().mean() > 200


@pytest.mark.parametrize("columns", [3, 5, 8])
def test_hash_is_that_of_the_paper(columns: int) -> None:
    q = tensors(2, 2, 20)[0].detach()
    R = torch.randn(2, 2, columns, 3, 4, generator=generator(), dtype=torch.float64)
    buckets = hash_tokens(q, R, torch.full((2, 1), 100), math.ceil(100 / columns))
    for i, j, r, t in itertools.product(range(2), range(2), range(3), range(20)):
        assert buckets[i, j, r, t] == reference.lsh_hash(q[i, j, t], R[i, j, :, r].T)


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


def test_near_tokens_share_buckets_more_often() -> None:
    """The property that the hash is for: collisions fall as the angle grows, by more than 4 standard errors."""
    draws, p = 2000, 8
    x = torch.zeros(1, 1, 4, p, dtype=torch.float64)
    for t, angle in enumerate((0.0, 0.2, 0.8, 2.0)):
        x[..., t, 0], x[..., t, 1] = math.cos(angle), math.sin(angle)
    R = torch.randn(1, 1, 4, draws, p, generator=generator(), dtype=torch.float64)
    buckets = hash_tokens(x, R, torch.tensor([[100]]), 25)[0, 0]  # (draws, 4)
    rates = (buckets[:, 1:] == buckets[:, :1]).double().mean(0)
    standard_error = math.sqrt(0.25 / draws)
    assert rates[0] > rates[1] + 4 * standard_error
    assert rates[1] > rates[2] + 4 * standard_error


def test_more_hashes_are_nearer_to_full_attention() -> None:
    """At equal chunks the mean error over draws falls with the rounds, by more than 3 standard errors."""
    draws = 60
    q, _, v = (copies(x, draws) for x in tensors(1, 1, 40, peak=4))
    truth = full_attention(q[:1], v[:1])
    errors = []
    for num_hashes in (1, 4, 16):
        module = build("reformer", head_dim=4, num_hashes=num_hashes, chunk_size=4)
        errors.append((module(q, q, v, generator=generator(num_hashes)) - truth).norm(dim=(-2, -1))[:, 0])
    for more, fewer in itertools.pairwise(reversed(errors)):
        assert more.mean() < fewer.mean() - 3 * math.sqrt((more.var() + fewer.var()) / draws)


@pytest.mark.parametrize(("n", "longer"), [(20, 50), (100, 300), (400, 900)])
def test_right_padding_changes_nothing(n: int, longer: int) -> None:
    """Also where the padded length asks for pairs of hashes and the real one does not, or both do."""
    q, _, v = (x.detach() for x in tensors(1, 2, longer))
    module = build("reformer", head_dim=4, chunk_size=2, seed=3).eval()
    mask = lengths_mask([n], longer)
    padded = module(q, q, v, key_mask=mask, query_mask=mask)
    short = q[:, :, :n].clone()
    torch.testing.assert_close(padded[:, :, :n], module(short, short, v[:, :, :n]), rtol=1e-11, atol=1e-12)


def test_place_of_padding_changes_nothing() -> None:
    q, _, v = (x.detach() for x in tensors(2, 2, 17))
    module = build("reformer", head_dim=4, chunk_size=2, seed=3).eval()
    at = torch.cat([torch.arange(5, 12), torch.arange(20, 30)])
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[:, at] = True
    spread_q, spread_v = (torch.rand(2, 2, 40, 4).double().index_copy(2, at, x) for x in (q, v))
    output = module(spread_q, spread_q, spread_v, key_mask=mask, query_mask=mask)
    torch.testing.assert_close(output[:, :, at], module(q, q, v), rtol=1e-11, atol=1e-12)


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
    module = build("reformer", head_dim=4)
    for other in (k, q.clone(), q[..., :4, :]):
        with pytest.raises(ValueError, match=r"Reformer shares queries and keys.*tie the two projections"):
            module(q, other, v[..., : other.shape[2], :])
    source = generator(1)
    before = source.get_state()
    with pytest.raises(ValueError, match="tie the two projections"):
        module(q, k, v, generator=source)
    assert torch.equal(source.get_state(), before)


def test_two_views_of_the_same_queries_are_one_tensor() -> None:
    x = torch.randn(2, 6, 2, 4, generator=generator())
    module = build("reformer", head_dim=4)
    q = x.transpose(1, 2)
    output = module(q, x.transpose(1, 2), q, generator=generator())
    assert torch.equal(output, module(q, q, q, generator=generator()))
    stacked = torch.randn(2, 2, 2, 4, generator=generator())
    with pytest.raises(ValueError, match="tie"):
        module(stacked[:, :1], stacked[:, 1:], stacked[:, 1:])


def test_compiles_in_one_graph_with_gradients() -> None:
    torch._dynamo.reset()
    q, _, v = tensors(2, 2, 12, dtype=torch.float32)
    module = build("reformer", head_dim=4, chunk_size=2)
    noise = draw(module, q, q)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for mask in (random_mask(2, 12), lengths_mask([12, 3], 12), torch.zeros(2, 12, dtype=torch.bool)):
        masks = {"key_mask": mask, "query_mask": mask}
        output, expected = compiled(q, q, v, noise=noise, **masks), module(q, q, v, noise=noise, **masks)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        for ours, theirs in zip(gradients(output, (q, v)), gradients(expected, (q, v)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


@pytest.mark.parametrize("option", ["num_hashes", "chunk_size"])
def test_wrong_options(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be at least 1, got 0"):
        build("reformer", head_dim=4, **{option: 0})
