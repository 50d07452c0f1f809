"""The models that are trained, the trivial one, and what they say of themselves."""

from pathlib import Path

import pytest
import torch

from skeinformer.lab.lra.store import Meta
from skeinformer.lab.training.job import method_of
from skeinformer.lab.training.make import BagOfTokens, attention_errors, make_model, save_trained
from skeinformer.lab.training.model import Classifier, PairClassifier
from tests.lab.training.tiny import TOKENS, tiny_recipe

RECORD: dict[str, object] = {
    "task": "text",
    "data": "imdb.parquet",
    "recipe": "cpu",
    "overrides": "",
    "seed": 3,
    "test_accuracy": 0.625,
    "test_examples": 1000,
    "majority": 0.5,
    "test_loss": 0.65,
    "best_step": 40,
    "steps": 50,
    "error_layer_0": 0.125,
}


def meta(sequences: int = 1) -> Meta:
    return Meta(1, "text", "test", vocab_size=9, num_classes=3, sequences=sequences, max_len=TOKENS)


def test_a_bag_does_not_see_order_or_padding() -> None:
    bag = BagOfTokens(9, 3)
    tokens = torch.randint(9, (4, 10))
    mixed = tokens[:, torch.randperm(10)]
    torch.testing.assert_close(bag(mixed, None), bag(tokens, None))
    padded = torch.cat([tokens, torch.full((4, 3), 7)], 1)
    mask = torch.arange(13).expand(4, -1) < 10
    torch.testing.assert_close(bag(padded, mask), bag(tokens, None))
    assert not torch.allclose(bag(tokens.fill_(1), None)[0], bag(mixed, None)[0])


def test_a_pair_gets_the_pair_model() -> None:
    recipe = tiny_recipe("retrieval")
    assert isinstance(make_model(method_of("softmax"), recipe, meta(2), 0), PairClassifier)
    single = make_model(method_of("skeinformer:num_pilots=4"), recipe, meta(), 5)
    assert isinstance(single, Classifier)
    assert (single.config.method, dict(single.config.options), single.config.seed) == (
        "skeinformer",
        {"num_pilots": 4},
        5,
    )
    assert make_model(method_of("bag_of_tokens"), recipe, meta(2), 0).sequences == 2


def test_an_unknown_method_is_named() -> None:
    with pytest.raises(ValueError, match="unknown attention 'skienformer'; did you mean 'skeinformer'"):
        method_of("skienformer")


@pytest.mark.parametrize(
    ("method", "layers"), [("skeinformer", 2), ("cluster", 2), ("softmax", 2), ("vmean", 2), ("bag_of_tokens", 0)]
)
def test_layers_estimate_their_error(method: str, layers: int) -> None:
    model = make_model(method_of(method), tiny_recipe("text", max_len=64), meta(), 0).eval()
    tokens, mask = torch.randint(9, (2, 64)), torch.arange(64) < torch.tensor([[64], [40]])
    with torch.no_grad():
        before = model(tokens, mask)
        errors = attention_errors(model, (tokens, mask))
        torch.testing.assert_close(model(tokens, mask), before, rtol=0, atol=0)
    assert list(errors) == [f"error_layer_{index}" for index in range(layers)]
    assert all(isinstance(error, float) and 0 <= error < 2 for error in errors.values())
    assert all(errors.values()) == (method != "softmax")


def test_a_saved_model_loads_and_its_card_has_the_results(tmp_path: Path) -> None:
    model = make_model(method_of("skeinformer:num_pilots=4"), tiny_recipe("text"), meta(), 0).eval()
    folder = tmp_path / "model"
    (tmp_path / ".model.part").mkdir()
    (tmp_path / ".model.part" / "README.md").write_text("half a card, left by a kill")
    save_trained(model, folder, RECORD)  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    card = " ".join((folder / "README.md").read_text().split())
    for expected in ("Classifier with skeinformer attention", "accuracy 0.6250 on 1,000 examples", "by layer: 0.125"):
        assert expected in card
    assert f"at most {model.config.max_len} tokens" in card
    loaded = Classifier.from_pretrained(folder).eval()
    tokens = torch.randint(9, (2, TOKENS))
    torch.testing.assert_close(loaded(tokens), model(tokens), rtol=0, atol=0)


def test_a_trivial_model_is_not_saved(tmp_path: Path) -> None:
    save_trained(BagOfTokens(9, 3), tmp_path / "model", {})
    assert not (tmp_path / "model").exists()
