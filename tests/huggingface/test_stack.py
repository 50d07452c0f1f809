"""Layers draw by their number, also in models whose layers do not know it; the same by register, compare and apply."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra `lab`")

import skeinformer
from skeinformer import huggingface
from skeinformer.huggingface.stack import attending, layer_number
from tests.huggingface.models import LAYERS, encoder, hidden, inputs, register

UNNUMBERED = ["distilbert", "vit"]


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(budget=5, seed=3)
    yield
    huggingface.unregister()


def sketched(name: str) -> Any:
    model = encoder(name)
    model.set_attn_implementation("skein-cluster")
    return model


@pytest.mark.parametrize("name", UNNUMBERED)
def test_layers_that_do_not_know_their_number_draw_apart(name: str) -> None:
    model, given = sketched(name), inputs(name)
    output = hidden(model, given)
    layers = [module for _, module in attending(model) if hasattr(module, "is_causal")]
    assert list(map(layer_number, layers)) == list(range(LAYERS))
    assert torch.equal(hidden(model, given), output)
    assert torch.equal(hidden(copy.deepcopy(model), given), output)
    twin = type(model)(model.config).eval()  # of the same configuration, the same object
    twin.load_state_dict(model.state_dict())
    assert torch.equal(hidden(twin, given), output)
    last = list(attending(sketched(name)))[-1][1]  # a layer alone, of no model that is called
    assert layer_number(last) == 0


@pytest.mark.parametrize("name", UNNUMBERED)
def test_a_compiled_model_numbers_them_alike(name: str) -> None:
    model, given = sketched(name), inputs(name)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")(**given).last_hidden_state
        torch.compiler.reset()
        fresh = sketched(name)
        inlined = torch.compile(lambda: fresh(**given).last_hidden_state, backend="eager")()
    expected = hidden(sketched(name), given)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(inlined, expected)


@pytest.mark.parametrize("name", UNNUMBERED)
def test_compare_and_apply_draw_as_register_does(name: str) -> None:
    given = inputs(name)
    expected = hidden(sketched(name), given)
    exact = hidden(encoder(name), given)
    model = encoder(name)
    told: dict[str, Any] = {"budget": 5, "seed": 3, "rounds": 1, "tolerance": 10.0, "show": False}
    result = skeinformer.compare(model, given, "cluster", **told)
    changed = (expected - exact).norm() / exact.norm()
    assert result.whole["change"] == pytest.approx(float(changed), rel=1e-4)
    skeinformer.apply(model, result, min_length=0)
    torch.testing.assert_close(hidden(model, given), expected)
