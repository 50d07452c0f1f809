"""The cluster sketch with exact parts put in: each part is what it is elsewhere."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer import build, cluster_attention
from skeinformer.attention import ClusterNoise
from studies.offered import studied_methods
from tests.helpers import generator, random_mask, tensors

N, D = 40, 6


def noise_of(inputs: tuple[Tensor, Tensor, Tensor]) -> ClusterNoise:
    source = generator(3)
    return ClusterNoise(*(torch.rand(*x.shape[:3], generator=source) for x in inputs[:2]))


@pytest.mark.parametrize("output", ["exact", "sketch"])
@pytest.mark.parametrize("parts", [("exact",) * 3, ("sketch",) * 3, ("sketch", "exact", "sketch")])
def test_every_part_is_that_of_its_own_attention(output: str, parts: tuple[str, str, str]) -> None:
    inputs, mask = tensors(2, 2, N), random_mask(2, N)
    expected = {
        "exact": F.scaled_dot_product_attention(*inputs, attn_mask=mask[:, None, None, :]),
        "sketch": cluster_attention(*inputs, key_mask=mask, budget=D, noise=noise_of(inputs)),
    }
    options = dict(zip(("dq", "dk", "dv"), parts, strict=True))
    with studied_methods("mixed"):
        attention = build("mixed", head_dim=inputs[0].shape[-1], budget=D, output=output, **options)
    result = attention(*inputs, key_mask=mask, noise=noise_of(inputs))
    torch.testing.assert_close(result, expected[output])
    up = torch.randn_like(result)
    gradients = {name: torch.autograd.grad(out, inputs, up) for name, out in expected.items()}
    for place, (ours, part) in enumerate(zip(torch.autograd.grad(result, inputs, up), parts, strict=True)):
        torch.testing.assert_close(ours, gradients[part][place])
