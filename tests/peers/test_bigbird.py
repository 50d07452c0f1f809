"""transformers' block-sparse Big Bird beside ours: same weights and random blocks, same output; and its defects."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skeinformer import build
from skeinformer.attention.block_sparse import block_sparse_attention
from skeinformer.attention.patterns import BigBird
from skeinformer.attention.rows import Rows
from tests.helpers import generator, lengths_mask

pytestmark = pytest.mark.peers

peer: Any = pytest.importorskip(
    "transformers.models.big_bird.modeling_big_bird", reason="transformers is not installed"
)

HEADS, P, SIZE, RANDOM = 2, 4, 4, 3
BLOCKS = 14


def make_peer(seed: int = 3) -> Any:
    """In training mode: it draws random blocks only there. It has no dropout of its own."""
    config = peer.BigBirdConfig(
        hidden_size=HEADS * P,
        num_attention_heads=HEADS,
        block_size=SIZE,
        num_random_blocks=RANDOM,
        attention_type="block_sparse",
        sep_token_id=None,
    )
    torch.manual_seed(0)
    return peer.BigBirdBlockSparseAttention(config, seed=seed).train()


def run_peer(module: Any, x: Tensor, mask: Tensor) -> Tensor:
    blocked, band, rows, columns = peer.BigBirdModel.create_masks_for_block_sparse_attn(mask.float(), SIZE)
    return module(x, band, rows, columns, blocked, blocked)[0]


def projected(module: Any, x: Tensor) -> list[Tensor]:
    """q, k, v as the peer projects them, (b, h, n, p)."""
    return [f(x).unflatten(-1, (HEADS, P)).transpose(1, 2) for f in (module.query, module.key, module.value)]


def capture_random_blocks(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """A list to which every call of the peer appends its random blocks, (h, nb - 2, r)."""
    captured: list[Tensor] = []
    original = module._bigbird_block_rand_mask_with_head

    def wrapped(**options: Any) -> Any:
        drawn = original(**options)
        captured.append(torch.from_numpy(np.stack(drawn)).long())
        return drawn

    monkeypatch.setattr(module, "_bigbird_block_rand_mask_with_head", wrapped)
    return captured


def ours(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, random: Tensor) -> Tensor:
    """Our function with these random blocks in place of drawn ones; global blocks, whose rows see all, have none."""
    method = BigBird(block_size=SIZE, num_random=RANDOM)
    noise = torch.full((*q.shape[:3], RANDOM), 0.5)
    pattern = method.pattern(q, mask[:, None], (noise,))
    blocks = torch.nn.functional.pad(random, (0, 0, 1, 1)).expand(len(q), -1, -1, -1)  # (b, h, nb, r)
    index = torch.cat([pattern.blocks.index[..., :3], blocks], -1)
    live = torch.cat([pattern.blocks.live[..., :3], torch.ones_like(blocks, dtype=torch.bool)], -1)
    pattern = pattern._replace(blocks=Rows(index, live))
    output = block_sparse_attention(q, k, v, mask[:, None], pattern, P**-0.5)
    return output.masked_fill(~mask[:, None, :, None], 0).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("short", [0, 3])
def test_same_blocks_same_output_and_gradients(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without padding, and with some in the last block; further padding is a defect below."""
    n = BLOCKS * SIZE
    module = make_peer()
    x = (2 * torch.randn(2, n, HEADS * P, generator=generator())).requires_grad_()
    mask = lengths_mask([n, n - short], n)
    captured = capture_random_blocks(module, monkeypatch)
    theirs = run_peer(module, x, mask)
    output = ours(*projected(module, x), mask, captured[0])
    torch.testing.assert_close(output, theirs, rtol=1e-4, atol=1e-4)
    weight = torch.randn(output.shape, generator=generator(1))
    (expected,) = torch.autograd.grad((theirs * weight).sum(), x)
    (gradient,) = torch.autograd.grad((output * weight).sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-4)


def test_defect_evaluation_counts_the_first_block_several_times() -> None:
    """In evaluation every random block is block 0, which is global already: its keys weigh 1 + 3 times."""
    n = BLOCKS * SIZE
    module = make_peer().eval()
    x = torch.randn(1, n, HEADS * P, generator=generator())
    mask = lengths_mask([n], n)
    q, k, v = projected(module, x)
    theirs = run_peer(module, x, mask)
    once = ours(q, k, v, mask, torch.zeros(HEADS, BLOCKS - 2, RANDOM, dtype=torch.long))
    middle = slice(2 * SIZE, -2 * SIZE)
    assert (theirs - once)[:, middle].abs().max() > 0.01
    block = torch.arange(n) // SIZE
    near = (block[:, None] - block).abs() <= 1
    times = near | (block == 0) | (block == BLOCKS - 1)
    log_times = torch.where(times, 0.0, -torch.inf) + torch.where(block == 0, np.log(1 + RANDOM), 0.0)
    counted = ((q @ k.mT / P**0.5 + log_times).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(theirs[:, middle], counted[:, middle], rtol=1e-4, atol=1e-4)


def test_defect_reseeds_the_global_generator() -> None:
    """Every call in training sets numpy's global seed; ours leaves all global state alone."""
    n = BLOCKS * SIZE
    module = make_peer()
    x = torch.randn(1, n, HEADS * P, generator=generator())
    mask = lengths_mask([n], n)
    after = []
    for seed in (1, 2):
        np.random.seed(seed)
        run_peer(module, x, mask)
        after.append(np.random.rand())
    assert after[0] == after[1]
    q, k, v = projected(module, x)
    np.random.seed(1)
    before = np.random.get_state()[1].copy()
    build("bigbird", head_dim=P, block_size=SIZE)(q, k, v)
    assert (np.random.get_state()[1] == before).all()


def test_defect_draws_the_same_blocks_at_every_call_and_only_from_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The seed is that of the layer; and of 30 blocks only the first 2 r + 5 = 11 are ever drawn."""
    n = 30 * SIZE
    module = make_peer()
    x = torch.randn(1, n, HEADS * P, generator=generator())
    captured = capture_random_blocks(module, monkeypatch)
    for _ in range(2):
        run_peer(module, x, lengths_mask([n], n))
    assert torch.equal(captured[0], captured[1])
    assert captured[0].max() < 2 * RANDOM + 5


@pytest.mark.parametrize("blocks", [1, 2, 5, 7, 9, 11])
def test_defect_needs_a_minimum_of_blocks(blocks: int) -> None:
    """Below 12 blocks of 3 random ones most lengths fail in training; ours takes any."""
    n = blocks * SIZE
    module = make_peer()
    x = torch.randn(1, n, HEADS * P, generator=generator())
    with pytest.raises((ValueError, RuntimeError)):
        run_peer(module, x, lengths_mask([n], n))
    q, k, v = projected(module, x)
    assert build("bigbird", head_dim=P, block_size=SIZE)(q, k, v).isfinite().all()


def test_defect_needs_a_multiple_of_the_block_size() -> None:
    n = BLOCKS * SIZE + 1
    module = make_peer()
    x = torch.randn(1, n, HEADS * P, generator=generator())
    with pytest.raises(ValueError, match="must be multiple of block size"):
        run_peer(module, x, lengths_mask([n], n))
    assert build("bigbird", head_dim=P, block_size=SIZE)(*projected(module, x)).isfinite().all()


def test_defect_the_last_global_block_may_be_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right padding by two blocks changes the peer's rows: its last block is then padding, ours the last real one."""
    n = BLOCKS * SIZE
    module = make_peer()
    x = torch.randn(1, n, HEADS * P, generator=generator())
    longer = torch.nn.functional.pad(x, (0, 0, 0, 2 * SIZE))
    captured = capture_random_blocks(module, monkeypatch)
    short = run_peer(module, x, lengths_mask([n], n))
    padded = run_peer(module, longer, lengths_mask([n], n + 2 * SIZE))[:, :n]
    assert torch.equal(captured[0], captured[1][:, : BLOCKS - 2])  # the draws are not the reason
    assert (padded - short).abs().max() > 0.01
    mask = lengths_mask([n], n + 2 * SIZE)
    same = ours(*projected(module, longer), mask, captured[1])[:, :n]
    torch.testing.assert_close(same, ours(*projected(module, x), mask[:, :n], captured[0]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(same, short, rtol=1e-4, atol=1e-4)
