"""Block-sparse attention: the four patterns against transcriptions, exactness, draws, positions and memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skeinformer import build
from skeinformer.attention.base import Attention
from skeinformer.attention.block_sparse import block_sparse_attention, cut
from skeinformer.attention.patterns import NO_BLOCK, draw_blocks
from skeinformer.attention.rows import Rows
from tests import reference_block_sparse as reference
from tests.helpers import (
    copies,
    dense_exact,
    draw,
    exact,
    generator,
    gradients,
    lengths_mask,
    map_noise,
    over_heads,
    random_mask,
    tensors,
    thinned,
)

METHODS = ["bigbird", "longformer", "sparse_transformer", "blockbert"]
SCALE = 0.5  # 1/sqrt(4)
Sees = Callable[[Any, list[bool], list[bool], tuple[int, int]], reference.Sees]


def bigbird(size: int) -> Sees:
    """Random blocks by the numbers of the first token of a block, whose position is among the real keys."""

    def sees(noise: Any, keys: list[bool], queries: list[bool], at: tuple[int, int]) -> reference.Sees:
        order = sorted(range(len(keys)), key=lambda t: (not keys[t], not (keys[t] or queries[t]), t))

        def random(block: int, count: int) -> set[int]:
            return reference.draw_random_blocks(noise[0][at][order[block * size]].tolist(), block, count)

        return reference.bigbird(size, random)

    return sees


def blockbert(num_blocks: int | None, budget: int, shifts: tuple[int, ...]) -> Sees:
    def sees(noise: Any, keys: list[bool], queries: list[bool], at: tuple[int, int]) -> reference.Sees:
        real = sum(key or query for key, query in zip(keys, queries, strict=True))
        parts = max(1, math.ceil(real / budget)) if num_blocks is None else num_blocks
        return reference.blockbert(max(1, math.ceil(real / parts)), shifts[at[1] % len(shifts)])

    return sees


CASES: dict[str, tuple[str, dict[str, Any], Sees]] = {
    "bigbird-1": ("bigbird", {"budget": 5}, bigbird(1)),
    "bigbird-2": ("bigbird", {"budget": 8, "num_random": 2}, bigbird(2)),
    "bigbird-3": ("bigbird", {"block_size": 3, "num_random": 1}, bigbird(3)),
    "longformer": ("longformer", {"budget": 4}, lambda *_: reference.longformer(2, (0,))),
    "longformer-global": (
        "longformer",
        {"window": 1, "global_tokens": (5, 2, 40)},
        lambda *_: reference.longformer(1, (2, 5, 40)),
    ),
    "longformer-local": (
        "longformer",
        {"window": 3, "global_tokens": ()},
        lambda *_: reference.longformer(3, ()),
    ),
    "sparse_transformer-2": ("sparse_transformer", {"budget": 4}, lambda *_: reference.sparse_transformer(2)),
    "sparse_transformer-3": ("sparse_transformer", {"stride": 3}, lambda *_: reference.sparse_transformer(3)),
    "blockbert-budget": ("blockbert", {"budget": 5}, blockbert(None, 5, (0, 1))),
    "blockbert-num_blocks": ("blockbert", {"num_blocks": 3, "shifts": (2, -1, 0)}, blockbert(3, 0, (2, -1, 0))),
    "blockbert-many": ("blockbert", {"num_blocks": 8}, blockbert(8, 0, (0, 1))),
}


def masks_of(kind: str, n: int) -> tuple[Tensor | None, Tensor | None]:
    key_mask = random_mask(2, n, seed=n, share=0.8)
    return {"none": (None, None), "both": (key_mask, key_mask), "unlike": (key_mask, random_mask(2, n, seed=3))}[kind]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("n", "kind"), thinned([1, 3, 13], ["none", "both", "unlike"], of=3))
def test_values_and_gradients_are_those_of_the_transcription(case: str, n: int, kind: str) -> None:
    name, options, sees = CASES[case]
    q, k, v = tensors(2, 3, n, p_v=3)
    key_mask, query_mask = masks_of(kind, n)
    module = build(name, head_dim=4, **options)
    noise = draw(module, q, k)
    output = module(q, k, v, key_mask=key_mask, query_mask=query_mask, noise=noise)

    def one_head(Q: Tensor, K: Tensor, V: Tensor, keys: list[bool], queries: list[bool], at: tuple[int, int]) -> Tensor:
        rows = [key and query for key, query in zip(keys, queries, strict=True)]  # a token that is no key has none
        return reference.sparse_attention(Q, K, V, SCALE, keys, rows, sees(noise, keys, keys, at))

    expected = over_heads(one_head, q, k, v, key_mask, query_mask)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


COVERING: dict[str, tuple[str, dict[str, Any]]] = {
    "bigbird": ("bigbird", {"budget": 9}),
    "bigbird at 7 blocks": ("bigbird", {"block_size": 2}),
    "bigbird of one block": ("bigbird", {"block_size": 50}),
    "longformer": ("longformer", {"budget": 26}),
    "longformer of global tokens": ("longformer", {"window": 1, "global_tokens": tuple(range(13))}),
    "sparse_transformer": ("sparse_transformer", {"budget": 26}),
    "sparse_transformer of stride 1": ("sparse_transformer", {"stride": 1}),
    "blockbert": ("blockbert", {"budget": 13}),
    "blockbert of one block": ("blockbert", {"num_blocks": 1}),
}


@pytest.mark.parametrize("case", COVERING)
@pytest.mark.parametrize("masked", [False, True])
def test_exact_where_the_pattern_covers_everything(case: str, masked: bool) -> None:
    name, options = COVERING[case]
    q, k, v = tensors(2, 2, 13, peak=3)
    mask = random_mask(2, 13) if masked else None
    output = build(name, head_dim=4, **options)(q, k, v, key_mask=mask, query_mask=mask, generator=generator())
    expected = exact(q, k, v, mask, mask)
    torch.testing.assert_close(output, expected, rtol=1e-11, atol=1e-12)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


def test_a_block_listed_twice_counts_once() -> None:
    q, k, v = tensors(1, 2, 8)
    pattern = cut(q, None, 2)
    once = torch.tensor([[0, 2, 3], [1, 0, 2], [2, 1, 3], [3, 0, 1]])[None, None]  # (1, 1, nb, k)
    twice = torch.cat([once, once.flip(-1), once[..., :1]], -1)
    dead = torch.ones_like(once, dtype=torch.bool)
    dead[..., 0] = False
    scale = {"key_mask": None, "scale": SCALE}

    def attention(index: Tensor, live: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, pattern=pattern._replace(blocks=Rows(index, live)), **scale)

    expected = attention(once, torch.ones_like(once, dtype=torch.bool))
    torch.testing.assert_close(attention(twice, torch.ones_like(twice, dtype=torch.bool)), expected)
    torch.testing.assert_close(attention(twice[..., 3:], torch.ones_like(twice[..., 3:], dtype=torch.bool)), expected)
    # a dead entry does not hide a live one of the same block
    hidden = attention(torch.cat([once, once], -1), torch.cat([dead, ~dead], -1))
    torch.testing.assert_close(hidden, expected)


def test_a_global_token_in_a_listed_block_counts_once() -> None:
    """Against the dense softmax: token 1 is in every window here and global too."""
    q, k, v = tensors(1, 1, 4)
    output = build("longformer", head_dim=4, window=3, global_tokens=(1,))(q, k, v)
    torch.testing.assert_close(output, dense_exact(q, k, v), rtol=1e-12, atol=1e-12)


def weights_of(module: Attention, n: int, h: int = 1, **options: Any) -> Tensor:
    """The attention matrix: the output for V = I, (1, h, n, n)."""
    q, k, _ = (x.detach() for x in tensors(1, h, n, dtype=torch.float32))
    return module(q, k, torch.eye(n).expand(1, h, n, n), **options)


@pytest.mark.parametrize(
    ("name", "rows", "keys"),
    [
        ("bigbird", range(128, 896), 8 * 64),
        ("bigbird", range(64, 128), 7 * 64),  # a neighbour is global
        ("bigbird", range(64), 1024),
        ("bigbird", range(960, 1024), 1024),
        ("longformer", range(129, 896), 258),
        ("longformer", range(1), 1024),
        ("sparse_transformer", range(128, 896), 257 + 1024 // 128 - 3),
        ("blockbert", range(1024), 256),
    ],
)
def test_visited_keys_at_a_budget_of_256(name: str, rows: range, keys: int) -> None:
    """What the docstrings promise, for 1024 tokens."""
    seen = (weights_of(build(name, head_dim=4), 1024, generator=generator()) > 0).sum(-1).flatten()
    assert (seen[rows.start : rows.stop] == keys).all()


def test_window_is_of_tokens_not_of_blocks() -> None:
    seen = weights_of(build("longformer", head_dim=4, window=3, global_tokens=()), 20)[0, 0] > 0
    distance = (torch.arange(20)[:, None] - torch.arange(20)).abs()
    assert torch.equal(seen, distance <= 3)


def test_global_tokens_are_positions_among_real_tokens() -> None:
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[0, :6] = False
    mask[0, 9] = False
    module = build("longformer", head_dim=4, window=1, global_tokens=(0, 3))
    seen = weights_of(module, 20, key_mask=mask, query_mask=mask)[0, 0] > 0
    real = mask[0].nonzero()[:, 0]
    for token in (6, 10):
        assert seen[real, token].all()
        assert torch.equal(seen[token], mask[0])
    assert seen[10:].sum(-1).max() == mask.sum()
    assert seen[15].nonzero()[:, 0].tolist() == [6, 10, 14, 15, 16]
    assert seen[8].nonzero()[:, 0].tolist() == [6, 7, 8, 10]  # 10 is its neighbour, as 9 is padding


def test_shifts_alternate_over_heads() -> None:
    seen = weights_of(build("blockbert", head_dim=4, num_blocks=4, shifts=(0, 1, 2)), 8, h=4)[0] > 0
    block = torch.arange(8) // 2
    for head, shift in enumerate([0, 1, 2, 0]):
        assert torch.equal(seen[head], (block[:, None] + shift) % 4 == block)


def test_random_blocks_are_distinct_free_and_uniform() -> None:
    """Every free block is drawn equally often, within 4 standard errors; none that is taken, none twice."""
    draws, count, taken = 4000, 9, [0, 3, 4, 5, 8, 8, NO_BLOCK]
    u = torch.rand(draws, 1, 1, 3, generator=generator())
    drawn = draw_blocks(u, torch.tensor(taken).expand(draws, 1, 1, -1), torch.full((draws, 1), count))
    assert drawn.live.all()
    often = torch.nn.functional.one_hot(drawn.index[:, 0, 0], count).sum(1)  # (draws, count)
    assert often.max() == 1
    assert often[:, [0, 3, 4, 5, 8]].sum() == 0
    share, free = 3 / 4, often[:, [1, 2, 6, 7]].double()
    assert ((free.mean(0) - share).abs() <= 4 * math.sqrt(share * (1 - share) / draws)).all()
    pairs = free.mT @ free / draws  # of any two free blocks, both are drawn with probability 1/2
    assert ((pairs[~torch.eye(4, dtype=torch.bool)] - 0.5).abs() <= 4 * math.sqrt(0.25 / draws)).all()


@pytest.mark.parametrize(("count", "live"), [(0, 0), (1, 0), (5, 0), (6, 1), (7, 2), (8, 3), (20, 3)])
def test_random_blocks_where_few_are_free(count: int, live: int) -> None:
    taken = torch.tensor([c if c < count else NO_BLOCK for c in (0, 1, 2, 3, 4)]).expand(50, 2, 4, -1)
    drawn = draw_blocks(torch.rand(50, 2, 4, 3, generator=generator()), taken, torch.full((50, 1), count))
    assert (drawn.live.sum(-1) == live).all()
    assert (drawn.index[drawn.live] >= 5).all()
    assert (drawn.index >= 0).all()
    assert (drawn.index < max(1, count)).all()


def test_bigbird_draws_for_each_head_and_block() -> None:
    seen = weights_of(build("bigbird", head_dim=4, block_size=1), 60, h=3, generator=generator())[0] > 0
    random = seen.clone()
    for offset in (-1, 0, 1):
        random.diagonal(offset, 1, 2).fill_(False)
    random[:, :, [0, 59]] = False
    rows = random[:, 2:-2]
    assert (rows.sum(-1) == 3).all()
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[1], rows[2])
    assert len({tuple(row) for row in rows[0].nonzero()[:, 1].view(-1, 3).tolist()}) > 50


def test_bigbird_ends_with_the_last_real_block() -> None:
    """With right padding the last global block is the last one that holds a token, and no block of padding is seen."""
    mask = lengths_mask([33], 80)
    module = build("bigbird", head_dim=4, block_size=4, seed=1).eval()
    weights = weights_of(module, 80, key_mask=mask, query_mask=mask)[0, 0]
    assert (weights[:33, 32] > 0).all()
    assert (weights[32, :33] > 0).all()
    assert (weights[:, 33:] == 0).all()
    q, k, v = (x.detach() for x in tensors(1, 1, 80, dtype=torch.float32))
    padded = module(q, k, v, key_mask=mask, query_mask=mask)[:, :, :33]
    torch.testing.assert_close(padded, module(q[:, :, :33], k[:, :, :33], v[:, :, :33]))


@pytest.mark.parametrize("name", METHODS)
def test_left_and_inner_padding_are_as_none(name: str) -> None:
    """Real tokens keep their neighbours: the result is that of the sequence without padding, the noise moved along."""
    q, k, v = (x.detach() for x in tensors(2, 2, 17))
    module = build(name, head_dim=4, budget=6)
    noise = draw(module, q, k)
    at = torch.cat([torch.arange(5, 12), torch.arange(20, 30)])
    mask = torch.zeros(2, 40, dtype=torch.bool)
    mask[:, at] = True

    def spread(x: Tensor) -> Tensor:
        return torch.rand(*x.shape[:2], 40, x.shape[3]).to(x.dtype).index_copy(2, at, x)

    moved = {"noise": map_noise(noise, spread), "key_mask": mask, "query_mask": mask}
    output = module(spread(q), spread(k), spread(v), **moved)
    torch.testing.assert_close(output[:, :, at], module(q, k, v, noise=noise), rtol=1e-11, atol=1e-12)


class LargestTensor(TorchDispatchMode):
    """Records the largest number of elements that any operation returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple) else (result,):
            if isinstance(x, Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return result


@pytest.mark.parametrize("name", [*METHODS, "reformer"])
@pytest.mark.parametrize("masked", [False, True])
def test_memory_is_not_quadratic(name: str, masked: bool) -> None:
    """Doubling the sequence doubles the largest tensor; for the strided pattern, n (3 stride + n / stride) scores."""
    largest = []
    for n in (1024, 2048):
        q, k, v = tensors(1, 1, n, p=2, dtype=torch.float32)
        mask = lengths_mask([n - 3], n) if masked else None
        module = build(name, head_dim=2, budget=32)
        with LargestTensor() as record:
            module(q, q if name == "reformer" else k, v, key_mask=mask, query_mask=mask).sum().backward()
        largest.append(record.largest)
    if name == "sparse_transformer":
        assert largest == [1024 * (48 + 64), 2048 * (48 + 128)]
    else:
        assert largest[1] <= 2 * largest[0]
        assert largest[1] < 2048 * 200


@pytest.mark.parametrize("name", METHODS)
def test_lengths_must_be_equal(name: str) -> None:
    q, k, v = tensors(1, 1, 5, 7)
    with pytest.raises(ValueError, match=r"query has 5 tokens and key 7, but \w+ needs the same number"):
        build(name, head_dim=4)(q, k, v)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bigbird", {"block_size": 0}, "block_size must be at least 1, got 0"),
        ("bigbird", {"num_random": 0}, "num_random must be at least 1, got 0"),
        ("longformer", {"window": 0}, "window must be at least 1, got 0"),
        ("longformer", {"global_tokens": (0, -1)}, r"global_tokens must be positions, .* got \(0, -1\)"),
        ("longformer", {"global_tokens": (True,)}, "global_tokens must be positions"),
        ("sparse_transformer", {"stride": 0}, "stride must be at least 1, got 0"),
        ("blockbert", {"num_blocks": 0}, "num_blocks must be at least 1, got 0"),
        ("blockbert", {"shifts": ()}, "shifts must be integers, one or more, got"),
        ("blockbert", {"shifts": (0, 0.5)}, "shifts must be integers"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(name, head_dim=4, **options)


def test_global_generators_are_never_seeded() -> None:
    q, k, v = tensors(1, 2, 40)
    module = build("bigbird", head_dim=4, budget=8, seed=2)
    torch.manual_seed(1)
    before = torch.initial_seed(), torch.get_rng_state()
    module.eval()(q, k, v)
    module.train()(q, k, v, generator=generator())
    assert torch.initial_seed() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_more_random_blocks_are_nearer() -> None:
    """The mean error over draws falls with each random block, within 3 standard errors of the differences."""
    draws = 100
    q, k, v = (copies(x, draws) for x in tensors(1, 1, 40, dtype=torch.float32))
    truth = dense_exact(q, k, v)
    errors = []
    for num_random in (1, 4, 12):
        module = build("bigbird", head_dim=4, block_size=2, num_random=num_random)
        output = module(q, k, v, generator=generator(num_random))
        errors.append((output - truth).norm(dim=(-2, -1))[:, 0])
    for more, fewer in zip(errors[1:], errors[:-1], strict=True):
        standard_error = math.sqrt((more.var() + fewer.var()) / draws)
        assert more.mean() < fewer.mean() - 3 * standard_error


@pytest.mark.parametrize("name", ["bigbird", "longformer", "sparse_transformer", "blockbert"])
def test_a_key_mask_alone_is_both_masks(name: str) -> None:
    """A token that is no key has no place in the sequence: its row is 0, and real rows do not see it."""
    q, k, v = tensors(2, 2, 40)
    mask = random_mask(2, 40)
    module = build(name, head_dim=4, budget=8)
    noise = draw(module, q, k)
    one = module(q, k, v, key_mask=mask, noise=noise)
    assert torch.equal(one, module(q, k, v, key_mask=mask, query_mask=mask, noise=noise))
