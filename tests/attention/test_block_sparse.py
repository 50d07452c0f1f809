"""Block-sparse attention: the four patterns against transcriptions, exactness, draws, positions and memory."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.base import Attention
from skeinformer.attention.block_sparse import block_sparse_attention, cut
from skeinformer.attention.patterns import NO_BLOCK, draw_blocks
from skeinformer.attention.rows import Rows
from tests import reference_block_sparse as reference
from tests.helpers import draw, exact, generator, gradients, over_heads, random_mask, tensors, thinned

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
    "longformer-local": ("longformer", {"window": 3, "global_tokens": ()}, lambda *_: reference.longformer(3, ())),
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


@pytest.mark.parametrize("name", ["bigbird", "longformer", "sparse_transformer", "blockbert"])
def test_a_key_mask_alone_is_both_masks(name: str) -> None:
    """A token that is no key has no place in the sequence: its row is 0, and real rows do not see it."""
    q, k, v = tensors(2, 2, 40)
    mask = random_mask(2, 40)
    module = build(name, head_dim=4, budget=8)
    noise = draw(module, q, k)
    one = module(q, k, v, key_mask=mask, noise=noise)
    assert torch.equal(one, module(q, k, v, key_mask=mask, query_mask=mask, noise=noise))
