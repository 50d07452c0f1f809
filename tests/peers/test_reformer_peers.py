"""reformer-pytorch and transformers' LSH attention beside ours: same buckets, same output; and where they depart."""

from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer.attention.inputs import Inputs
from skeinformer.attention.reformer import Reformer, hash_tokens
from tests.helpers import generator, lengths_mask

pytestmark = pytest.mark.peers

P, N, CHUNK = 8, 48, 4
TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def lsh_attention(
    q: Tensor, v: Tensor, mask: Tensor | None, buckets: Tensor, chunk_size: int, scale: float, **options: bool
) -> Tensor:
    """Our attention in these buckets."""
    return Reformer(chunk_size=chunk_size, **options).attend_in_buckets(Inputs(q, q, v, mask, mask, scale), buckets)


def inputs(b: int, h: int, n: int = N) -> tuple[Tensor, Tensor]:
    source = generator(4)
    return 2 * torch.randn(b, h, n, P, generator=source), torch.randn(b, h, n, P, generator=source)


def first_chunk(buckets: Tensor, size: int = CHUNK) -> Tensor:
    """Tokens that are in the first chunk of some round: (b, h, r, n) -> (b, h, n)."""
    place = torch.argsort(buckets, dim=-1, stable=True).argsort(-1)
    return (place < size).any(2)


class TestReformerPytorch:
    peer: Any

    @pytest.fixture(autouse=True)
    def _peer(self) -> None:
        self.peer = pytest.importorskip("reformer_pytorch", reason="reformer-pytorch is not installed")

    def run(self, q: Tensor, v: Tensor, num_hashes: int, mask: Tensor | None = None, **options: bool) -> Any:
        """(1, h, n, p) -> its output and its buckets (1, h, r, n); it takes batch and heads as one dimension."""
        module = self.peer.LSHAttention(bucket_size=CHUNK, n_hashes=num_hashes, **options)
        torch.manual_seed(2)
        output, _, buckets = module(q[0], v[0], input_mask=None if mask is None else mask.expand(len(q[0]), -1))
        offset = (q.shape[2] // CHUNK) * torch.arange(num_hashes)[:, None]
        return output[None], buckets.view(1, len(q[0]), num_hashes, -1) - offset

    @pytest.mark.parametrize("num_hashes", [1, 4])
    @pytest.mark.parametrize("duplicates", [False, True])
    def test_same_buckets_same_output_and_gradients(self, num_hashes: int, duplicates: bool) -> None:
        q, v = (x.requires_grad_() for x in inputs(1, 3))
        options = {"attend_across_buckets": False, "allow_duplicate_attention": duplicates}
        theirs, buckets = self.run(q, v, num_hashes, **options)
        output = lsh_attention(q, v, None, buckets, CHUNK, P**-0.5, count_duplicates=duplicates)
        torch.testing.assert_close(output, theirs, **TOLERANCE)
        weight = torch.randn(output.shape, generator=generator(1))
        expected = torch.autograd.grad((theirs * weight).sum(), (q, v))
        gradient = torch.autograd.grad((output * weight).sum(), (q, v))
        for ours, other in zip(gradient, expected, strict=True):
            torch.testing.assert_close(ours, other, **TOLERANCE)

    @pytest.mark.parametrize("num_hashes", [1, 3])
    @pytest.mark.parametrize("duplicates", [False, True])
    def test_across_buckets_and_the_defect_of_its_first_chunk(self, num_hashes: int, duplicates: bool) -> None:
        """The rounds are one row of chunks: the first chunk of a round looks back into the round before it."""
        q, v = inputs(1, 3)
        options = {"attend_across_buckets": True, "allow_duplicate_attention": duplicates}
        theirs, buckets = self.run(q, v, num_hashes, **options)
        output = lsh_attention(q, v, None, buckets, CHUNK, P**-0.5, across_buckets=True, count_duplicates=duplicates)
        affected = first_chunk(buckets)
        difference = (output - theirs).abs().amax(-1)
        if num_hashes == 1:
            assert difference.max() < 1e-4
        else:
            assert difference[affected].max() > 0.01
            if duplicates:
                assert difference[~affected].max() < 1e-4

    def test_same_rotations_same_hash(self) -> None:
        """It hashes to N / CHUNK buckets; ours to twice as many as chunks, so the chunk is doubled here."""
        q, v = inputs(1, 3)
        _, buckets = self.run(q, v, 4)
        torch.manual_seed(2)
        rotations = torch.randn(1, P, 4, N // CHUNK // 2)  # shared by heads, as the peer draws them
        R = rotations.permute(0, 3, 2, 1)[:, None].expand(1, 3, -1, -1, -1)  # (1, h, columns, r, p)
        assert torch.equal(hash_tokens(q, R, torch.tensor([[N]]), 2 * CHUNK), buckets)

    def test_defect_needs_a_multiple_of_two_buckets(self) -> None:
        q, v = inputs(1, 2, N + 4)
        with pytest.raises(AssertionError, match="needs to be divisible"):
            self.run(q, v, 1)
        assert lsh_attention(q, v, None, torch.zeros(1, 2, 1, N + 4).long(), CHUNK, 1.0).isfinite().all()

    def test_defect_contents_of_padding_change_the_result(self) -> None:
        """Padded tokens are hashed and take places in the chunks of real ones; ours come after them."""
        q, v = inputs(1, 2)
        mask = lengths_mask([30], N)
        other = torch.where(mask[:, None, :, None], q, 5 * q.flip(2))
        options = {"attend_across_buckets": False, "allow_duplicate_attention": False}
        first, buckets = self.run(q, v, 2, mask, **options)
        second, other_buckets = self.run(other, v, 2, mask, **options)
        assert torch.equal(buckets[..., :30], other_buckets[..., :30])
        assert (first - second)[:, :, :30].abs().max() > 0.01
        ours = [
            lsh_attention(x, v, mask[:, None], at, CHUNK, P**-0.5)[:, :, :30]
            for x, at in ((q, buckets), (other, other_buckets))
        ]
        torch.testing.assert_close(ours[0], ours[1], rtol=1e-6, atol=1e-6)


class TestTransformers:
    peer: Any

    @pytest.fixture(autouse=True)
    def _peer(self) -> None:
        self.peer = pytest.importorskip(
            "transformers.models.reformer.modeling_reformer", reason="transformers is not installed"
        )

    def make(self, num_hashes: int, **options: Any) -> Any:
        config = self.peer.ReformerConfig(
            hidden_size=2 * P,
            num_attention_heads=2,
            attention_head_size=P,
            lsh_attn_chunk_length=CHUNK,
            num_hashes=num_hashes,
            num_buckets=8,
            lsh_num_chunks_before=1,
            lsh_num_chunks_after=0,
            lsh_attention_probs_dropout_prob=0.0,
            is_decoder=False,
            **options,
        )
        torch.manual_seed(0)
        module = self.peer.LSHSelfAttention(config)
        torch.nn.init.normal_(module.query_key.weight)
        return module

    def compare(self, num_hashes: int) -> tuple[Tensor, Tensor]:
        """|ours - theirs| for each token, (2, 2, n), and the buckets. It has s = 1 and counts as our options do."""
        module = self.make(num_hashes)
        x = torch.randn(2, N, 2 * P, generator=generator())
        theirs = module(x)
        q, v = (f(x).unflatten(-1, (2, P)).transpose(1, 2) for f in (module.query_key, module.value))
        buckets = theirs.buckets - 8 * torch.arange(num_hashes)[:, None]
        output = lsh_attention(q, v, None, buckets, CHUNK, 1.0, across_buckets=True, count_duplicates=True)
        expected = theirs.hidden_states.unflatten(-1, (2, P)).transpose(1, 2)
        return (output - expected).detach().abs().amax(-1), buckets

    def test_same_buckets_same_output(self) -> None:
        difference, _ = self.compare(1)
        assert difference.max() < 1e-4

    def test_defect_of_the_first_chunk(self) -> None:
        """With several rounds the first chunk of each looks back into the round before it; other tokens agree."""
        difference, buckets = self.compare(3)
        affected = first_chunk(buckets)
        assert (~affected).sum() > 50
        assert difference[~affected].max() < 1e-4
        assert difference[affected].max() > 0.01

    def test_defect_hash_seed_reseeds_the_global_generator(self) -> None:
        module = self.make(1, hash_seed=7)
        x = torch.randn(1, N, 2 * P, generator=generator())
        after = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            module(x)
            after.append(torch.rand(()))
        assert after[0] == after[1]

    def test_defect_needs_a_multiple_of_the_chunk(self) -> None:
        module = self.make(1)
        with pytest.raises(RuntimeError):
            module(torch.randn(1, N + 1, 2 * P, generator=generator()))
