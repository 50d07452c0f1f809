"""A verdict in Hugging Face models: each model its own, saved and loaded with it by whatever saves and loads models."""

import copy
import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra `lab`")

import transformers
from torch import Tensor, nn
from torch.testing import assert_close

import skeinformer
from skeinformer import Verdict, apply, compare, huggingface, restore
from skeinformer.huggingface.applied import APPLIED
from skeinformer.nn.verdict import Choice
from tests.helpers import lengths_mask
from tests.huggingface.models import ENCODERS, LENGTH, TEXT_ENCODERS, bert, encoder, hidden, inputs, save_bert

LAYERS = [f"encoder.layer.{i}.attention.self" for i in range(2)]
EXACT = "exact by the verdict"


def padded(name: str = "bert") -> dict[str, Tensor]:
    given = inputs(name)
    if name in TEXT_ENCODERS:
        given["attention_mask"] = lengths_mask([LENGTH, 15], LENGTH).long()
    return given


def verdict(first: Choice = Choice("cluster", 4), second: Choice = Choice()) -> Verdict:  # noqa: B008
    return Verdict(dict(zip(LAYERS, (first, second), strict=True)), min_length=0)


def watched(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, Counter[str]]:
    """The rows of real tokens, and what the layers did."""
    with huggingface.watch() as layers:
        found = hidden(model, given)
    mask = given.get("attention_mask")
    return (found if mask is None else found[mask.bool()]), layers


@pytest.mark.parametrize("name", list(ENCODERS))
def test_the_verdict_of_a_comparison_in_models_of_every_kind(name: str) -> None:
    model, given = encoder(name), padded(name)
    exact, _ = watched(model, given)
    result = compare(model, given, "cluster", budget=4, rounds=1, tolerance=9.0, show=False)
    apply(model, result, min_length=0)
    found, layers = watched(model, given)
    assert layers["sketched"] == ENCODERS[name].sketched
    huggingface.register("cluster", budget=4, min_length=0)
    try:
        registered = encoder(name)
        registered.set_attn_implementation("skein-cluster")
        assert torch.equal(watched(registered, given)[0], found)  # with the draws that compare has measured
    finally:
        huggingface.unregister()
    nothing = compare(model, given, "cluster", budget=4, rounds=1, tolerance=1e-9, show=False)
    apply(model, nothing)
    found, layers = watched(model, given)
    assert layers[EXACT] == sum(layers.values())
    assert_close(found, exact)


def test_a_layer_set_to_exact_works_on_padded_batches() -> None:
    """By a verdict, and by hand, where transformers' own kernel gets the mask."""
    expected, layers = watched(model := apply_to(bert_model(), verdict()), padded())
    assert layers == {"sketched": 1, EXACT: 1}
    huggingface.register("cluster", budget=4, min_length=0)
    try:
        other = bert_model()
        other.set_attn_implementation("skein-cluster")
        own = copy.deepcopy(other.config)
        own._attn_implementation = "sdpa"
        other.encoder.layer[1].attention.self.config = own
        assert_close(watched(other, padded())[0], expected)
    finally:
        huggingface.unregister()
    assert model.config._attn_implementation == APPLIED


def test_two_models_of_one_process_have_their_own() -> None:
    first, second = bert_model(), bert_model()
    expected = [watched(apply_to(bert_model(), verdict(*choices)), padded())[0] for choices in BOTH]
    apply(first, verdict(*BOTH[0]))
    apply(second, verdict(*BOTH[1]))
    for _ in range(2):
        assert torch.equal(watched(first, padded())[0], expected[0])
        assert torch.equal(watched(second, padded())[0], expected[1])
    copied = copy.deepcopy(first)
    restore(first)
    assert torch.equal(watched(copied, padded())[0], expected[0])
    assert first.config._attn_implementation == "sdpa"
    assert not {"skeinformer", "attn_implementation"} & first.config.to_dict().keys()


def test_two_models_of_one_configuration_have_their_own(tmp_path: Path) -> None:
    config = bert_model().config
    first, second, third = (transformers.BertModel(config).eval() for _ in range(3))
    apply(first, verdict(*BOTH[0]))
    apply(second, verdict(*BOTH[1]))
    assert (config._attn_implementation, hasattr(config, "skeinformer")) == ("sdpa", False)
    assert [watched(model, padded())[1] for model in (first, second, third)] == [
        {"sketched": 1, EXACT: 1},
        {"sketched": 2},
        {},
    ]
    first.save_pretrained(tmp_path)
    assert "vmean" not in (tmp_path / "config.json").read_text()
    restore(second)
    assert watched(first, padded())[1] == {"sketched": 1, EXACT: 1}


BOTH = [(Choice("cluster", 4), Choice()), (Choice("skeinformer", 6, (("num_pilots", 3),)), Choice("vmean"))]


def bert_model() -> Any:
    torch.manual_seed(0)
    return bert().eval()


def apply_to(model: Any, verdict: Verdict) -> Any:
    apply(model, verdict)
    return model


@pytest.mark.parametrize("choices", BOTH)
def test_saved_and_loaded_with_the_model(choices: Any, tmp_path: Path) -> None:
    model = apply_to(bert_model(), verdict(*choices))
    expected, layers = watched(model, padded())
    model.save_pretrained(tmp_path / "transformers")
    huggingface.save_pretrained(model, tmp_path / "ours")
    saved = json.loads((tmp_path / "transformers" / "config.json").read_text())
    assert saved == json.loads((tmp_path / "ours" / "config.json").read_text())
    assert list(saved["skeinformer"]["layers"]) == LAYERS
    loaded = [
        transformers.AutoModel.from_pretrained(tmp_path / "transformers"),
        huggingface.load_pretrained(tmp_path / "transformers"),
        huggingface.load_pretrained(tmp_path / "ours", transformers.BertModel),
    ]
    for other in loaded:
        found, done = watched(other.eval(), padded())
        assert torch.equal(found, expected)
        assert done == layers
    loaded[0].save_pretrained(tmp_path / "again")  # and so on
    assert json.loads((tmp_path / "again" / "config.json").read_text())["skeinformer"] == saved["skeinformer"]
    again = transformers.AutoModel.from_pretrained(tmp_path / "again").eval()
    assert torch.equal(watched(again, padded())[0], expected)
    exact = huggingface.load_pretrained(tmp_path / "ours", attn_implementation="sdpa").eval()
    assert_close(watched(exact, padded())[0], watched(bert_model(), padded())[0])


def test_loaded_saved_and_loaded_before_it_has_run(tmp_path: Path) -> None:
    model = apply_to(bert_model(), verdict())
    expected, _ = watched(model, padded())
    model.save_pretrained(tmp_path / "a")
    huggingface.load_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert torch.equal(watched(transformers.AutoModel.from_pretrained(tmp_path / "b").eval(), padded())[0], expected)
    # transformers forgets the name of the attention until the model has run; the verdict is still there
    transformers.AutoModel.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "c")
    assert torch.equal(watched(huggingface.load_pretrained(tmp_path / "c").eval(), padded())[0], expected)


def test_saved_as_it_attends(tmp_path: Path) -> None:
    model = apply_to(bert_model(), verdict())
    sketched, _ = watched(model, padded())
    model.set_attn_implementation("sdpa")
    exact, _ = watched(model, padded())
    for copied in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied.save_pretrained(tmp_path)
        again = transformers.AutoModel.from_pretrained(tmp_path).eval()
        assert torch.equal(watched(again, padded())[0], exact)
        assert torch.equal(watched(huggingface.load_pretrained(tmp_path).eval(), padded())[0], exact)
        again.set_attn_implementation(APPLIED)  # the verdict is still there
        assert torch.equal(watched(again, padded())[0], sketched)
    changed = copy.deepcopy(model)
    assert changed.config == model.config
    changed.set_attn_implementation(APPLIED)
    changed.save_pretrained(tmp_path)
    assert torch.equal(watched(transformers.AutoModel.from_pretrained(tmp_path).eval(), padded())[0], sketched)


@pytest.mark.parametrize("name", ["eager", "sdpa", "skein-vmean"])
def test_restored_to_what_it_was(name: str) -> None:
    huggingface.register("vmean", min_length=0)
    try:
        model = bert_model()
        model.set_attn_implementation(name)
        before, text = watched(model, padded())[0], model.config.to_json_string()
        apply_to(apply_to(model, verdict()), verdict(Choice(), Choice("cluster", 4)))
        copied = copy.deepcopy(model)
        assert restore(model) == (LAYERS[1],)
        assert restore(copied) == (LAYERS[1],)
        for restored in (model, copied):
            assert restored.config._attn_implementation == name
            assert restored.config.to_json_string() == text
            assert torch.equal(watched(restored, padded())[0], before)
        assert restore(model) == ()

        apply(model, Verdict())  # which names no layer: all are exact
        assert model.config._attn_implementation == ("sdpa" if name == "skein-vmean" else name)
        restore(model)
        assert model.config._attn_implementation == name
    finally:
        huggingface.unregister()


def test_a_layer_set_to_eager_is_refused() -> None:
    model = apply_to(bert_model(), verdict())
    expected, _ = watched(model, padded())
    layer = model.get_submodule(LAYERS[1])
    shared, layer.config = layer.config, copy.deepcopy(layer.config)
    layer.config._attn_implementation = "eager"
    with pytest.raises(ValueError, match="a layer of BertModel, a BertSelfAttention, is set to 'eager'"):
        hidden(model, padded())
    layer.config._attn_implementation = "sdpa"
    assert_close(watched(model, padded())[0], expected)
    layer.config = shared
    model.set_attn_implementation("eager")  # of the whole model: masks are made for it
    hidden(model, padded())


def test_a_verdict_of_the_encoder_in_a_classifier_and_back(tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(bert_model().config).eval()
    found = apply(model, verdict())
    assert list(found.layers) == [f"bert.{name}" for name in LAYERS]
    model.save_pretrained(tmp_path)
    inner = transformers.BertModel.from_pretrained(tmp_path).eval()
    assert torch.equal(watched(inner, padded())[0], watched(model.bert, padded())[0])
    assert list(inner.config.skeinformer["layers"]) == LAYERS
    assert apply(inner).sketched == (LAYERS[0],)


def test_trainer_saves_it(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="Trainer needs it")
    model = transformers.BertForSequenceClassification(bert_model().config)
    apply(model, verdict())
    data = [{"input_ids": row, "labels": i % 2} for i, row in enumerate(inputs("bert", b=4)["input_ids"])]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no"
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data)  # type: ignore[arg-type]
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    given = padded()
    with huggingface.watch() as layers, torch.no_grad():
        assert torch.equal(loaded(**given).logits, model.eval()(**given).logits)
    assert layers == {"sketched": 2, EXACT: 2}


def test_parts_with_configurations_of_their_own(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 99, **sizes}, vision_config={"image_size": 16, "patch_size": 4, **sizes}
    )
    model: Any = transformers.CLIPModel(config).eval()
    (name,) = [x for x, part in model.named_modules() if "vision" in x and type(part).__name__ == "CLIPAttention"]
    apply(model, Verdict({name: Choice("cluster", 4)}, min_length=0))
    given = {"input_ids": torch.randint(3, 99, (1, 6)), "pixel_values": torch.randn(1, 3, 16, 16)}
    with torch.no_grad(), huggingface.watch() as layers:
        expected = model(**given).image_embeds
    assert layers == {"sketched": 1, EXACT: 1}
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        loaded = transformers.CLIPModel.from_pretrained(tmp_path).eval()
        # to rounding: products may be summed in another order where loaded weights begin at another address
        torch.testing.assert_close(loaded(**given).image_embeds, expected, rtol=1e-5, atol=1e-6)


def test_sentence_transformers_and_pipelines_load_it(tmp_path: Path) -> None:
    sentence_transformers = pytest.importorskip("sentence_transformers", reason="of the extra `dev`")
    folder = save_bert(tmp_path / "bert")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    found = apply(model, verdict())
    assert all(name.endswith(short) for name, short in zip(found.layers, LAYERS, strict=True))
    texts = ["w1 w2 w3 w4 w5 w6 w7 w8", "w9 w8"]
    expected = model.encode(texts)
    model.save(str(tmp_path / "saved"))
    with huggingface.watch() as layers:
        again = sentence_transformers.SentenceTransformer(str(tmp_path / "saved"), device="cpu").encode(texts)
    assert layers == {"sketched": 1, EXACT: 1}
    assert (again == expected).all()
    pipe = transformers.pipeline("feature-extraction", str(tmp_path / "saved"), device="cpu")
    with huggingface.watch() as layers:
        pipe(texts[0])
    assert layers == {"sketched": 1, EXACT: 1}


def test_a_part_of_a_module_and_a_model_of_two_parts() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = bert_model(), bert_model()

    model = Two()
    with pytest.raises(ValueError, match="apply it to one part of the model"):
        apply(model, verdict())
    apply(model, Verdict({f"left.{LAYERS[0]}": Choice("cluster", 4)}, min_length=0))
    assert watched(model.left, padded())[1] == {"sketched": 1, EXACT: 1}
    assert watched(model.right, padded())[1] == {}
    assert restore(model) == (f"left.{LAYERS[0]}",)


def test_what_a_user_may_do_wrong() -> None:
    model = apply_to(bert_model(), verdict())
    with pytest.raises(ValueError, match="called with 'budget', but a verdict was applied to it"):
        hidden(model, padded(), budget=3)
    fresh = bert_model()
    fresh.set_attn_implementation(APPLIED)
    with pytest.raises(RuntimeError, match=r"call skeinformer\.apply\(model, result\)"):
        hidden(fresh, padded())
    before = copy.deepcopy(fresh.config.to_dict())
    with pytest.raises(ValueError, match="'linformer' cannot stand in for the attention of encoder"):
        apply(fresh, verdict(Choice("linformer")))
    with pytest.raises(ValueError, match="made on another model"):
        apply(fresh, Verdict({"decoder.layer.0": Choice("cluster")}))
    assert fresh.config.to_dict() == before
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got str; for a pipeline, give its model"):
        apply("model", verdict())  # type: ignore[arg-type]
    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    mpnet = transformers.MPNetModel(transformers.MPNetConfig(**sizes))
    with pytest.raises(ValueError, match="keeps its own attention"):
        apply(mpnet, Verdict({"encoder.layer.0": Choice("cluster")}))


def test_a_comparison_leaves_an_applied_model_as_it_was() -> None:
    model = apply_to(bert_model(), verdict())
    expected, layers = watched(model, padded())
    compare(model, padded(), "vmean", rounds=1, show=False)
    result = compare(model, padded(), ["vmean", "cluster"], search=True, rounds=1, show=False)
    assert result.verdict.sketched == ()  # nothing wins at 24 tokens
    assert result.whole["cosine_min"] == pytest.approx(1)
    found, again = watched(model, padded())
    assert torch.equal(found, expected)
    assert again == layers
    assert isinstance(model.config.skeinformer, dict)


def test_a_search_compares_what_will_be_applied() -> None:
    n = 1060  # long enough for a small sketch to win
    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=16, max_position_embeddings=n, initializer_range=0.1)
    model, given = transformers.BertModel(config).eval(), {"input_ids": torch.randint(3, 99, (1, n))}
    exact = hidden(model, given)
    result = compare(model, given, "cluster", search=True, tolerance=0.3, rounds=1, entropy_rows=4, show=False)
    assert result.verdict.sketched == (LAYERS[0],)
    assert model.config is config
    assert torch.equal(hidden(model, given), exact)
    apply(model, result)
    change = float((hidden(model, given) - exact).norm() / exact.norm())
    assert change > 1e-4
    assert result.whole["change"] == pytest.approx(change, rel=1e-3)


def test_gradients() -> None:
    model = apply_to(bert_model(), verdict()).train()
    model(**padded()).last_hidden_state.square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.encoder.parameters())


@pytest.mark.slow
def test_compiled_graphs() -> None:
    model = apply_to(bert_model(), verdict(Choice("skeinformer", 4)))
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.no_grad():
        assert_close(compiled(**padded()).last_hidden_state, model(**padded()).last_hidden_state)


def test_the_name_is_always_known() -> None:
    assert APPLIED in transformers.AttentionInterface().valid_keys()
    huggingface.unregister()
    assert APPLIED in transformers.AttentionInterface().valid_keys()
    assert skeinformer.huggingface is huggingface


def test_a_process_without_our_import_is_told_what_to_import(tmp_path: Path) -> None:
    """A model that was saved under the short name, as before, is loaded too."""
    model = encoder("bert")
    apply(model, verdict())
    model.save_pretrained(tmp_path)
    load = f"import transformers\nmodel = transformers.AutoModel.from_pretrained({str(tmp_path)!r})"
    ran = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, check=False)
    assert 'attn_implementation="skein-applied: import skeinformer.huggingface first"` is not supported' in ran.stderr
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for name in (config["attn_implementation"], "skein-applied"):
        file.write_text(json.dumps({**config, "attn_implementation": name}))
        for loaded in (transformers.AutoModel.from_pretrained(tmp_path), huggingface.load_pretrained(tmp_path)):
            assert torch.equal(hidden(loaded.eval(), inputs("bert")), hidden(model, inputs("bert")))
