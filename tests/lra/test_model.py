"""The model never reads padding, is saved and loaded, and refuses sizes that are not possible."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lra.model import BagOfTokens, Classifier, Dropout, ModelConfig, PairClassifier, attention_errors
from skeinformer.attention import METHODS

CONFIG = ModelConfig(20, 3, 16, "skeinformer", budget=8, dim=16, feedforward_dim=20, classifier_dim=12)


def inputs(pair: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    tokens, mask = torch.randint(20, (2, 4, 12)), torch.arange(12) < torch.tensor([[12], [9], [5], [1]])
    return (tokens[0], tokens[1], mask, mask) if pair else (tokens[0], mask)


@pytest.mark.parametrize("method", METHODS)
def test_padding_changes_nothing(method: str) -> None:
    model = Classifier(replace(CONFIG, method=method, dropout=0.0)).eval()
    tokens, mask = inputs()
    other = torch.where(mask, tokens, 19)
    torch.testing.assert_close(model(tokens, mask), model(other, mask))
    model(tokens, mask).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("kind", [Classifier, PairClassifier])
def test_a_saved_model_is_loaded_with_its_weights(kind: type[Classifier | PairClassifier], tmp_path: Path) -> None:
    model = kind(replace(CONFIG, options={"num_pilots": 4})).eval()
    arguments = inputs(kind is PairClassifier)
    model.save_pretrained(tmp_path)
    loaded = kind.from_pretrained(tmp_path)
    assert loaded.config == model.config
    torch.testing.assert_close(loaded(*arguments), model(*arguments), rtol=0, atol=0)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["head.0.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"head\.0\.weight"):  # a part of the weights would be a random model
        kind.from_pretrained(tmp_path)


def test_a_model_of_other_sizes_than_its_weights_is_refused(tmp_path: Path) -> None:
    Classifier(CONFIG).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "dim": 32}))
    with pytest.raises(RuntimeError, match="size mismatch"):
        Classifier.from_pretrained(tmp_path)
    path.write_text(json.dumps({**config, "method": "no"}))
    with pytest.raises(ValueError, match="unknown attention 'no'"):
        Classifier.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 0}, "dim must be at least 1"),
        ({"dim": 15}, "dim=15 is not a multiple of num_heads=2"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
    ],
)
def test_sizes_that_are_not_possible(change: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CONFIG, **change)  # type: ignore[arg-type]


def test_longer_sequences_than_positions_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"tokens have shape \(1, 17\), expected \(batch, n\) with n from 1 to"):
        Classifier(CONFIG)(torch.zeros(1, 17, dtype=torch.int64))


def test_dropout_keeps_the_mean_and_drops_its_share() -> None:
    torch.manual_seed(0)
    ones = torch.ones(100, 100, 10)
    dropped = Dropout(0.25).train()(ones)
    share = (dropped == 0).float().mean().item()
    assert share == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / ones.numel()) ** 0.5)
    assert dropped.unique().tolist() == [0, pytest.approx(1 / 0.75, rel=1e-4)]
    assert Dropout(0.25).eval()(ones) is ones


def test_a_bag_of_tokens_does_not_know_their_order() -> None:
    tokens, mask = inputs()
    model = BagOfTokens(20, 3)
    torch.testing.assert_close(model(tokens, mask), model(tokens.flip(1), mask.flip(1)))
    assert attention_errors(model, (tokens, mask)) == {}


def test_each_layer_estimates_its_error() -> None:
    with torch.no_grad():
        assert set(attention_errors(Classifier(CONFIG).eval(), inputs())) == {"error_layer_0", "error_layer_1"}
        exact = attention_errors(Classifier(replace(CONFIG, method="softmax")).eval(), inputs())
    assert set(exact.values()) == {0.0}
