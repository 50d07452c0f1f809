"""A method has the same options whichever way it is called, and every way names an option that is misspelled."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import skeinformer
from skeinformer.attention import ADAPTIVE, DEFAULT, METHODS, Cluster
from skeinformer.models.policy import unsuitable_reason
from skeinformer.noise import layer_seed
from tests.helpers import tensors

WIDTH, HEADS, N = 8, 2, 20
IN_A_LAYER = [name for name, row in METHODS.items() if not row.shares_keys]  # which torch's layer projects apart


@pytest.fixture
def huggingface() -> Iterator[Any]:
    pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")
    module = importlib.import_module("skeinformer.models.huggingface")
    yield module
    module.register()


def layer(name: str) -> nn.MultiheadAttention:
    """A layer of torch; attention dropout is the layer's own, so it has what the row would set."""
    dropout: Any = METHODS[name].options.get("dropout", 0.0)
    return nn.MultiheadAttention(WIDTH, HEADS, dropout=dropout, batch_first=True)


class OneLayer(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.attention = layer(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.attention(x, x, x)[0]
        return output


def needed(name: str) -> dict[str, Any]:
    """What a method with parameters for each position needs."""
    return {"max_len": N} if name == "linformer" else {}


@pytest.mark.parametrize("name", IN_A_LAYER)
def test_defaults_are_the_same_in_a_layer_and_in_a_converted_model(name: str) -> None:
    expected = skeinformer.build(name, head_dim=WIDTH // HEADS, **needed(name)).method
    options = {"dropout": layer(name).dropout, "method": name, **needed(name)}
    assert skeinformer.MultiheadAttention(WIDTH, HEADS, **options).attention.method == expected
    model: Any = layer(name)
    skeinformer.convert(model, name, **needed(name))
    assert model.attention.method == expected


SUITABLE = [name for name in METHODS if unsuitable_reason(name) is None]


@pytest.mark.parametrize("name", SUITABLE)
def test_defaults_are_the_same_in_compare(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run: Any = importlib.import_module("skeinformer.comparison.run")
    measure_call, seen = run.measure_call, []

    def measured(call: Any, policy: Any, *rest: Any) -> Any:
        seen.append(policy.build(WIDTH // HEADS))
        return measure_call(call, policy, *rest)

    monkeypatch.setattr(run, "measure_call", measured)
    if name in ("softmax", ADAPTIVE):  # so few tokens are exact by a tolerance
        with pytest.raises(ValueError, match="no attention layer of OneLayer would be sketched"):
            skeinformer.compare(OneLayer(name), torch.randn(1, N, WIDTH), name, rounds=1, show=False)
        return
    skeinformer.compare(OneLayer(name), torch.randn(1, 300, WIDTH), name, rounds=1, show=False)
    (attention,) = seen
    assert attention.method == skeinformer.build(name, head_dim=WIDTH // HEADS).method


def test_the_method_is_the_same_in_every_drop_in_without_a_name() -> None:
    model: Any = layer("softmax")
    skeinformer.convert(model)
    assert model.method == skeinformer.sketched().policy.method == ADAPTIVE
    assert (
        skeinformer.MultiheadAttention(WIDTH, HEADS).method == skeinformer.sketched(budget=8).policy.method == DEFAULT
    )
    assert skeinformer.sketched(window=8).policy.method == DEFAULT
    function = inspect.signature(skeinformer.scaled_dot_product_attention)
    assert function.parameters["method"].default is None
    x = torch.randn(1, 2 * N, WIDTH)
    assert skeinformer.compare(OneLayer("softmax"), x, rounds=1, show=False).whole["method"] == DEFAULT


def test_defaults_are_the_same_in_register(huggingface: Any) -> None:
    assert huggingface.register().method == ADAPTIVE
    assert huggingface.register(budget=8).method == DEFAULT
    for method in SUITABLE:
        assert huggingface.register(method).build(8).method == skeinformer.build(method, head_dim=8).method


@pytest.mark.parametrize(
    ("name", "function"), [("skeinformer", skeinformer.skein_attention), ("cluster", skeinformer.cluster_attention)]
)
def test_defaults_are_the_same_in_functions(name: str, function: Callable[..., torch.Tensor]) -> None:
    q, k, v = tensors(n=40)
    module = skeinformer.build(name, head_dim=q.shape[-1])
    noise = module.sample_noise(q, k)
    assert torch.equal(function(q, k, v, noise=noise), module(q, k, v, noise=noise))


def test_the_budgets_that_methods_have_of_their_own() -> None:
    own = {name: skeinformer.build(name, head_dim=8, max_len=8).method.budget for name in METHODS}
    assert own.pop("adaptive") is None
    assert own == {name: 16 if METHODS[name].method is Cluster else 256 for name in own}


def ways(method: str, huggingface: Any) -> dict[str, Callable[..., object]]:
    """Every way to give options to a method."""
    x = torch.randn(1, N, WIDTH)
    encoder = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, batch_first=True)
    return {
        "build": lambda **options: skeinformer.build(method, head_dim=8, **options),
        "layer": lambda **options: skeinformer.MultiheadAttention(WIDTH, HEADS, method=method, **options),
        "convert": lambda **options: skeinformer.convert(encoder, method, **options),
        "compare": lambda **options: skeinformer.compare(encoder, x, method, rounds=1, show=False, **options),
        "sketched": lambda **options: skeinformer.sketched(method, **options),
        "register": lambda **options: huggingface.register(method, **options),
    }


@pytest.mark.parametrize("way", ["build", "layer", "convert", "compare", "sketched", "register"])
@pytest.mark.parametrize("other", ["num_samples", "samples", "num_landmarks", "budgte"])
def test_other_names_of_the_budget_are_named(other: str, way: str, huggingface: Any) -> None:
    with pytest.raises(TypeError, match=f"has no option '{other}'; did you mean 'budget'"):
        ways("cluster", huggingface)[way](**{other: 64})


def test_the_seed_of_a_layer() -> None:
    assert [layer_seed(seed, 2) for seed in (0, 1, 7, None)] == [2, 1011, 7065, None]
    assert layer_seed(True, 2) is True  # no number: left to be refused
    seeds = {layer_seed(seed, i) for seed in range(50) for i in range(1009)}
    assert len(seeds) == 50 * 1009
