"""Calls of `scaled_dot_product_attention` by their number, in hooks that go with the model."""

import copy
import io
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer
from skeinformer import Verdict, restore
from skeinformer.nn.calls import apply_to_calls
from skeinformer.nn.verdict import Choice

N, WIDTH = 40, 8
VERDICT = Verdict({"call 0": Choice(), "call 1": Choice("cluster", 4)}, min_length=0)


class Own(nn.Module):
    """Two calls, or three."""

    def forward(self, x: Tensor, more: bool = False) -> Tensor:
        for _ in range(3 if more else 2):
            x = F.scaled_dot_product_attention(x, x, x) + x
        if x.isnan().any():
            raise ValueError("not a number")
        return x


def given() -> Tensor:
    return 3 * torch.randn(1, 2, N, WIDTH)


def by_hand(x: Tensor) -> Tensor:
    """The first call exactly, the second as call 1 of a scope."""
    x = F.scaled_dot_product_attention(x, x, x) + x
    with torch.no_grad(), skeinformer.sketched("cluster", budget=4, min_length=0):
        F.scaled_dot_product_attention(x, x, x)
        return F.scaled_dot_product_attention(x, x, x) + x


@torch.no_grad()
def test_each_call_has_its_own_choice_in_copies_and_pickles_too() -> None:
    model, x = Own(), given()
    exact, expected = model(x), by_hand(x)
    apply_to_calls(model, VERDICT)
    assert torch.equal(model(x), expected)
    assert torch.equal(model(x), expected)  # counted from 0 in each pass
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False), nn.Sequential(model)):
        assert torch.equal(other(x), expected)
        assert restore(other) == ("call 1",)
        assert torch.equal(other(x), exact)
    assert torch.equal(Own()(x), exact)


@torch.no_grad()
def test_outside_of_the_model_and_after_an_error_nothing_is_sketched() -> None:
    model, x = Own(), given()
    apply_to_calls(model, VERDICT)
    exact = F.scaled_dot_product_attention(x, x, x)
    with pytest.raises(ValueError, match="not a number"):
        model(x * torch.nan)
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), exact)
    apply_to_calls(model, VERDICT)  # once more changes nothing
    assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == (1, 1)


@torch.no_grad()
def test_more_calls_than_the_verdict_knows_are_exact_with_one_warning() -> None:
    model, x = Own(), given()
    apply_to_calls(model, VERDICT)
    with pytest.warns(UserWarning, match=r"made 3 calls of scaled_dot_product_attention.* has 2"):
        found = model(x, more=True)
    y = by_hand(x)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(y, y, y) + y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x, more=True)
