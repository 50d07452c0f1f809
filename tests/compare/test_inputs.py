"""Which rows of an output are real, by whatever way the inputs are given, and random numbers that stay as they were."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skeinformer import compare
from skeinformer.compare.inputs import mask_of_inputs, named_inputs, seeded
from tests.helpers import lengths_mask
from tests.nn.test_convert import encoder, padded_input

FAST: dict[str, Any] = {"rounds": 1, "budget": 3, "show": False}
B, N, WIDTH = 2, 6, 4


class Positional(nn.Module):
    """Tells nothing of the names of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()

    def forward(self, *args: Tensor) -> Any:
        return self.inner(args[0], src_key_padding_mask=args[1] == 0)


class Named(nn.Module):
    """Has a name of its own for the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = encoder()

    def forward(self, x: Tensor, padding: Tensor) -> Any:
        return self.inner(x, src_key_padding_mask=padding)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_positional_arguments_have_the_names_of_forward() -> None:
    model = encoder()
    x, padding = padded_input()
    assert set(named_inputs(model, (x, None, padding))) == {"src", "mask", "src_key_padding_mask"}
    by_name = compare(model, {"src": x, "src_key_padding_mask": padding}, **FAST)
    by_place = compare(model, (x, None, padding), **FAST)
    for name in ("cosine", "cosine_min", "change", "pooled_cosine"):
        assert by_place.whole[name] == by_name.whole[name]


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_mask_that_is_not_known_is_warned_of() -> None:
    x, padding = padded_input()
    real = (~padding).long()
    for model, inputs, name in ((Positional(), (x, real), "args"), (Named(), (x, padding), "padding")):
        with pytest.warns(UserWarning, match=f"the input '{name}' looks like a mask of padding"):
            compare(model, inputs, **FAST)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "args|padding")
            compare(model, inputs, mask=~padding, **FAST)
            none = torch.ones_like(real) if name == "args" else torch.zeros_like(padding)
            compare(model, (x, none), **FAST)


def test_the_output_of_a_decoder_has_the_mask_of_the_decoder() -> None:
    source, target = lengths_mask([N, 2], N), lengths_mask([3, N], N)
    transformer = nn.Transformer(WIDTH, 2, 1, 1, 8, batch_first=True)
    inputs = {"src": torch.randn(B, N, WIDTH), "tgt": torch.randn(B, N, WIDTH), "src_key_padding_mask": ~source}
    assert mask_of_inputs(transformer, inputs, None) is None
    found = mask_of_inputs(transformer, {**inputs, "tgt_key_padding_mask": ~target}, None)
    assert found is not None
    assert torch.equal(found, target)
    # a module that takes any arguments: what it returns tells
    model, given = nn.Sequential(), {"attention_mask": source.long()}
    found = mask_of_inputs(model, given, {"last_hidden_state": torch.randn(B, N, WIDTH)})
    assert found is not None
    assert torch.equal(found, source)
    assert mask_of_inputs(model, given, {"encoder_last_hidden_state": torch.randn(B, N, WIDTH)}) is None


def test_only_generators_of_the_model_are_set_and_they_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = [torch.Generator().manual_seed(5), torch.Generator().manual_seed(6)]
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    before = [x.get_state() for x in (torch.default_generator, *devices)]
    with seeded([torch.device("cpu"), torch.device("cuda:1"), torch.device("cuda:1")], 3):
        assert [x.initial_seed() for x in (torch.default_generator, *devices)] == [3, 5, 3]
        torch.rand(2)
    assert all(torch.equal(x.get_state(), y) for x, y in zip((torch.default_generator, *devices), before, strict=True))
