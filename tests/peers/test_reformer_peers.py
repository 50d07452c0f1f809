"""reformer-pytorch and transformers' LSH attention beside ours: same buckets, same output; and where they depart."""

from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer.attention.inputs import Inputs
from skeinformer.attention.reformer import Reformer, hash_tokens
from tests.helpers import generator

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

    def test_same_rotations_same_hash(self) -> None:
        """It hashes to N / CHUNK buckets; ours to twice as many as chunks, so the chunk is doubled here."""
        q, v = inputs(1, 3)
        _, buckets = self.run(q, v, 4)
        torch.manual_seed(2)
        rotations = torch.randn(1, P, 4, N // CHUNK // 2)  # shared by heads, as the peer draws them
        R = rotations.permute(0, 3, 2, 1)[:, None].expand(1, 3, -1, -1, -1)  # (1, h, columns, r, p)
        assert torch.equal(hash_tokens(q, R, torch.tensor([[N]]), 2 * CHUNK), buckets)
