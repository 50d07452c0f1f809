"""A saved model from a stranger: config.json and weights are compared before anything is built."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from skeinformer.attention import METHODS
from skeinformer.lab.training.model import Classifier, Encoder, ModelConfig

CONFIG = ModelConfig(vocab_size=5, num_classes=3, max_len=8, method="skeinformer", budget=4, dim=16, feedforward_dim=24)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    Classifier(CONFIG).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def nothing_is_built(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: object) -> None:
        raise AssertionError("a model is built")

    monkeypatch.setattr("torch.nn.Embedding.__init__", build)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_len": 10**12}, "field 'max_len' is 1000000000000, but encoder.positions in model.safetensors has 8"),
        ({"vocab_size": 10**9}, "field 'vocab_size' is 1000000000, but encoder.tokens.weight in"),
        ({"dim": 2**40}, "field 'dim' is 1099511627776, but encoder.positions in"),
        ({"num_layers": 10**9}, "field 'num_layers' is 1000000000, but model.safetensors has 2 layers"),
        ({"feedforward_dim": 10**10}, "field 'feedforward_dim' is 10000000000, but encoder.layers.0.feedforward.0"),
        ({"classifier_dim": 10**10}, "field 'classifier_dim' is 10000000000, but head.0.weight in"),
        ({"num_classes": 10**10}, "field 'num_classes' is 10000000000, but head.2.weight in"),
        ({"budget": 10**10}, "field 'budget' is 10000000000, more than 1,048,576"),
        ({"options": {"num_pilots": 10**10}}, "field 'num_pilots' is 10000000000, more than 1,048,576"),
        ({"options": []}, "field 'options' is a list, expected an object"),
        ({"max_len": "8"}, "field 'max_len' is the text '8', expected a whole number"),
        ({"dropout": 1.5}, "dropout must be at least 0 and below 1"),
        ({"num_heads": 3}, "dim=16 is not a multiple of num_heads=3"),
        ({"dim": -16}, "dim must be at least 1"),
        ({"width": 3}, "has a field 'width', which is not known"),
        ({"max_len": None}, "field 'max_len' is None, expected a whole number"),
    ],
)
@pytest.mark.usefixtures("nothing_is_built")
def test_a_config_that_is_not_of_these_weights_is_refused_before_anything_is_built(
    saved: Path, change: dict[str, Any], message: str
) -> None:
    path = saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=f"config.json[:,]? .*{message}"):
        Classifier.from_pretrained(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "config.json holds a JSON list, expected an object"),
        ("[" * 100_000, "config.json is not JSON: it is nested too deeply"),
        ("", "config.json is not JSON"),
        ("{}", "config.json has no field 'vocab_size'"),
        (" " * (2 << 20), "config.json has more than 1,048,576 bytes"),
    ],
)
def test_what_is_no_config_is_named(saved: Path, content: str, message: str) -> None:
    (saved / "config.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        Classifier.from_pretrained(saved)


def test_a_method_or_an_option_that_does_not_exist_is_named(saved: Path) -> None:
    path = saved / "config.json"
    config = json.loads(path.read_text())
    for change, message in (
        ({"method": "skienformer"}, "unknown attention 'skienformer'"),
        ({"options": {"num_pilot": 3}}, "has no option 'num_pilot'"),
        ({"options": {"columns": []}}, "columns"),
    ):
        path.write_text(json.dumps({**config, **change}))
        with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
            Classifier.from_pretrained(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update(head=t.pop("head.2.bias")),
            "model.safetensors has a tensor 'head', which the model has not",
        ),
        (lambda t: t.pop("encoder.norm.bias"), "model.safetensors has no tensor 'encoder.norm.bias'"),
        (
            lambda t: t.update({"head.2.bias": torch.zeros(4)}),
            r"tensor 'head.2.bias' has shape \(4,\), expected \(3,\)",
        ),
        (lambda t: t.update({"head.2.bias": torch.zeros(3).double()}), "tensor 'head.2.bias' is of torch.float64"),
    ],
)
def test_renamed_and_reshaped_weights_are_named(
    saved: Path, change: Callable[[dict[str, torch.Tensor]], object], message: str
) -> None:
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    (saved / "model.safetensors").unlink()
    save_file(tensors, saved / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Classifier.from_pretrained(saved)


def test_weights_that_are_no_safetensors_are_named(saved: Path) -> None:
    path = saved / "model.safetensors"
    content = path.read_bytes()
    for damaged in (b"", content[:100], content[:-1], b"\xff" * 100):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"model\.safetensors cannot be read as safetensors"):
            Classifier.from_pretrained(saved)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_saved_and_loaded(tmp_path: Path, method: str) -> None:
    config = ModelConfig(vocab_size=5, num_classes=2, max_len=8, method=method, budget=4, dim=16, num_layers=1)
    Encoder(config).save_pretrained(tmp_path)
    assert Encoder.from_pretrained(tmp_path).config == config
