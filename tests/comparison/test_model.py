"""Which rows of an output are real, how far two outputs are apart, and a model that is given back as it was."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from skeinformer.comparison.model import compare_outputs, mask_of_inputs, tensors_of, unchanged
from tests.helpers import lengths_mask

B, N, WIDTH = 3, 6, 4


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (torch.randn(B, N, WIDTH), ["output"]),
        (torch.randn(B), ["output"]),
        ((torch.arange(3), None, torch.randn(B, N, WIDTH)), ["output"]),
        ({"pooler_output": torch.randn(B, 2), "last_hidden_state": torch.randn(B, N, 2)}, ["last_hidden_state"]),
        ({"loss": torch.tensor(1.0), "logits": torch.randn(B, 2), "past": None}, ["logits"]),
        ({"embedding": torch.randn(B, 2), "other": torch.randn(B, 2)}, ["embedding"]),
        ("text", []),
    ],
)
def test_the_main_output_comes_first(output: Any, names: list[str]) -> None:
    assert list(tensors_of(output))[:1] == names


def test_an_output_without_a_name_may_be_logits() -> None:
    first = torch.randn(B, WIDTH)
    assert tensors_of((first, torch.randn(2)), logits=True)["logits"] is first
    assert list(tensors_of({"embedding": first}, logits=True)) == ["embedding"]


@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_and_logits(batch_first: bool) -> None:
    exact = {"last_hidden_state": torch.randn(B, N, WIDTH), "logits": torch.randn(B, 2)}
    sketched = {name: x + 0.1 * torch.randn(x.shape) for name, x in exact.items()}
    mask = lengths_mask([6, 2, 4], N)
    x, y = exact["last_hidden_state"][mask], sketched["last_hidden_state"][mask]
    difference = (exact["logits"] - sketched["logits"]).abs()
    expected = {
        "cosine": F.cosine_similarity(x, y, dim=-1).mean(),
        "cosine_min": F.cosine_similarity(x, y, dim=-1).min(),
        "change": (x - y).norm() / x.norm(),
        "logits_change": difference.mean(),
        "logits_change_max": difference.max(),
        "argmax_agreement": (exact["logits"].argmax(-1) == sketched["logits"].argmax(-1)).float().mean(),
    }
    if not batch_first:
        for outputs in (exact, sketched):
            outputs["last_hidden_state"] = outputs["last_hidden_state"].transpose(0, 1)
    record = compare_outputs(exact, sketched, mask)
    assert record.pop("output") == "last_hidden_state"
    assert record == pytest.approx({name: float(value) for name, value in expected.items()}, rel=1e-5)


def test_nothing_to_compare_is_an_error() -> None:
    with pytest.raises(ValueError, match="returns no tensor of numbers"):
        compare_outputs({}, {}, None)
    assert compare_outputs({"output": torch.zeros(B)}, {"output": torch.zeros(B)}, None)["change"] == 0


def test_the_mask_is_found_in_the_inputs() -> None:
    source, target = lengths_mask([N, 2], N), lengths_mask([3, N], N)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True), 1)
    found = mask_of_inputs(encoder, (torch.randn(2, N, WIDTH), None, ~source), None)
    assert found is not None
    assert torch.equal(found, source)
    transformer = nn.Transformer(WIDTH, 2, 1, 1, 8, batch_first=True)
    inputs = {"src": torch.randn(2, N, WIDTH), "tgt": torch.randn(2, N, WIDTH), "src_key_padding_mask": ~source}
    assert mask_of_inputs(transformer, inputs, None) is None
    found = mask_of_inputs(transformer, {**inputs, "tgt_key_padding_mask": ~target}, None)
    assert found is not None
    assert torch.equal(found, target)
    # a module that takes any arguments: its output shows whether it has a decoder
    model, named = nn.Sequential(), {"attention_mask": source.long()}
    for arguments in (named, (named,)):  # a SentenceTransformer has all arguments in one dict
        found = mask_of_inputs(model, arguments, {"last_hidden_state": torch.randn(2, N, WIDTH)})
        assert found is not None
        assert torch.equal(found, source)
    assert mask_of_inputs(model, named, {"encoder_last_hidden_state": torch.randn(2, N, WIDTH)}) is None


def test_a_model_is_given_back_as_it_was() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].eval()
    weight, generator = model[0].weight, torch.random.get_rng_state()

    def change() -> None:
        model[0].__class__ = Other
        model[0].more = 1
        model[0].register_parameter("weight", nn.Parameter(torch.zeros(2, 2)))
        model[0].register_forward_hook(lambda *_: None)
        model.append(nn.Linear(2, 2))
        model.eval()
        torch.rand(3)

    def change_and_stop() -> None:
        with unchanged(model) as reset:
            change()
            reset()
            assert model[0].weight is weight
            change()
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        change_and_stop()
    assert [type(module) for module in model] == [nn.Linear, nn.Dropout]
    assert [module.training for module in model.modules()] == [True, True, False]
    assert not hasattr(model[0], "more")
    assert not model[0]._forward_hooks
    assert torch.equal(torch.random.get_rng_state(), generator)
