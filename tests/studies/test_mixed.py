"""The cluster sketch with exact parts put in: each part is what it is elsewhere."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer import cluster_attention
from skeinformer.attention.inputs import prepare
from studies.mixed import Mixed, MixedOptions
from tests.helpers import generator, random_mask, tensors

N, D = 40, 6


def mixed(inputs: tuple[Tensor, Tensor, Tensor], mask: Tensor, **options: str) -> Tensor:
    chosen = Mixed.complete(MixedOptions(budget=D, **options))  # type: ignore[arg-type]
    noise = noise_of(inputs)
    return Mixed.compute(prepare(*inputs, key_mask=mask), noise, chosen)[0]


def noise_of(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    source = generator(3)
    return (torch.rand(*inputs[0].shape[:3], generator=source), torch.rand(*inputs[1].shape[:3], generator=source))


@pytest.mark.parametrize("output", ["exact", "sketch"])
@pytest.mark.parametrize(
    "parts", [("exact",) * 3, ("keys",) * 3, ("keys", "queries", "queries"), ("keys", "exact", "keys")]
)
def test_every_part_is_that_of_its_own_attention(output: str, parts: tuple[str, str, str]) -> None:
    inputs, mask = tensors(2, 2, N), random_mask(2, N)
    exact = F.scaled_dot_product_attention(*inputs, attn_mask=mask[:, None, None, :])
    by_gradient = {
        name: cluster_attention(*inputs, key_mask=mask, budget=D, gradient=name, noise=noise_of(inputs))
        for name in ("keys", "queries")
    }
    found = mixed(inputs, mask, output=output, **dict(zip(("dq", "dk", "dv"), parts, strict=True)))
    torch.testing.assert_close(found, exact if output == "exact" else by_gradient["keys"])
    up = torch.randn_like(found)
    expected = {name: torch.autograd.grad(out, inputs, up) for name, out in {"exact": exact, **by_gradient}.items()}
    ours = torch.autograd.grad(found, inputs, up)
    for place, part in enumerate(parts):
        torch.testing.assert_close(ours[place], expected[part][place])
