"""Every fast form equals its plain form, in values and gradients, for every method."""

import pytest
import torch
from torch import Tensor

from skeinformer.kernels import choice
from skeinformer.kernels.choice import at_hand, known, plain_forms
from tests.helpers import VARIANTS, draw, gradients, inputs_for, masks_for, random_mask

SIZES = [(11, 11), (90, 70)]


def outputs(name: str, inputs: tuple[Tensor, ...], masked: bool) -> list[Tensor]:
    """Output and gradients, and the output without gradients, with the same draws at every call."""
    module = VARIANTS[name].build(budget=7)
    q, k, _ = inputs
    masks = {}
    if masked:
        masks = masks_for(name, random_mask(2, k.shape[2]), random_mask(2, q.shape[2], seed=1))
    noise = draw(module, q, k)
    output = module(*inputs, noise=noise, **masks)
    with torch.no_grad():
        alone = module(*inputs, noise=noise, **masks)
    return [output, alone, *gradients(output, inputs)]


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_fast_and_plain_forms_agree(name: str, masked: bool, size: tuple[int, int]) -> None:
    inputs = inputs_for(name, 2, 3, *size, peak=2)
    fast = outputs(name, inputs, masked)
    with plain_forms():
        assert not at_hand(inputs[0])
        plain = outputs(name, inputs, masked)
    assert at_hand(inputs[0])
    for ours, theirs in zip(fast, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9 * max(1.0, theirs.detach().abs().max().item()))


def test_the_choice_looks_at_device_graph_gradient_and_precision() -> None:
    taken = []

    def plain(x: Tensor) -> Tensor:
        taken.append("plain")
        return x * 1

    def fast(x: Tensor) -> Tensor:
        taken.append("fast")
        return x * 1

    either = choice.fast_form(plain)(fast)
    x = torch.ones(3)
    either(x)
    either(x.clone().requires_grad_())
    with torch.no_grad():
        either(x.clone().requires_grad_())
    either(x.to("meta"))
    torch.func.vmap(either)(x[None])
    choice.fast_form(plain, differentiable=True)(fast)(x.clone().requires_grad_())
    choice.fast_form(plain, half=False)(fast)(x.bfloat16())
    with plain_forms():
        either(x)
    assert taken == ["fast", "plain", "fast", "plain", "plain", "fast", "plain", "plain"]


def test_a_condition_is_known_only_where_it_can_be_looked_at() -> None:
    assert known(torch.tensor([True, True]))
    assert not known(torch.tensor([True, False]))
    assert not known(torch.ones(2, dtype=torch.bool, device="meta"))
