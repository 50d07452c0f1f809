"""torch.export of layers and converted models with a symbolic length and default arguments: always sketched."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import skeinformer

LENGTHS = torch.export.Dim("n", min=64, max=4096)


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layer = skeinformer.models.MultiheadAttention(16, 2, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x)[0]


def always(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, skeinformer.models.MultiheadAttention):
            module.policy = replace(module.policy, min_length=0)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("method", ["skeinformer", pytest.param("cluster", marks=pytest.mark.slow)])
def test_a_layer_with_default_arguments(method: str, strict: bool) -> None:
    model = SelfAttention(method=method).eval()
    program = torch.export.export(
        model, (torch.randn(2, 300, 16),), dynamic_shapes=({1: LENGTHS},), strict=strict
    ).module()
    always(model)
    with torch.no_grad():  # else the model draws afresh; a program is for inference, and draws by the seed
        for n in (64, 129, 300, 1000):
            x = torch.randn(2, n, 16)
            torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("method", ["cluster", pytest.param("skeinformer", marks=pytest.mark.slow)])
def test_a_converted_encoder_with_padding(method: str) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    skeinformer.convert(model, method)
    padding = torch.arange(300) >= torch.tensor([[300], [280]])
    program = torch.export.export(
        model,
        (torch.randn(2, 300, 16),),
        {"src_key_padding_mask": padding},
        dynamic_shapes={"src": {1: LENGTHS}, "src_key_padding_mask": {1: LENGTHS}},
    ).module()
    always(model)
    for n in (65, 300, 1000):
        x, padding = torch.randn(2, n, 16), torch.arange(n) >= torch.tensor([[n], [n - 20]])
        with torch.no_grad():
            expected = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(program(x, src_key_padding_mask=padding), expected, rtol=1e-5, atol=1e-5)


def test_a_range_in_which_no_length_is_worth_a_sketch_is_exact() -> None:
    model = SelfAttention(method="cluster").eval()
    short = torch.export.Dim("n", min=4, max=14)
    program = torch.export.export(model, (torch.randn(2, 10, 16),), dynamic_shapes=({1: short},))
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(program.module()(x), model(x))
    targets = [str(node.target) for part in program.graph_module.modules() for node in part.graph.nodes]
    assert targets.count("aten.scaled_dot_product_attention.default") == 1
    assert len(targets) < 60  # a sketch has some hundreds


def test_a_fixed_length_goes_by_the_rule() -> None:
    model = SelfAttention(method="cluster").eval()
    x = torch.randn(2, 100, 16)
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))
