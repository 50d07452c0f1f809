"""`sketch`: a model of its own policy, saved and loaded with it; `restore_models`; layers that know no number."""

import copy
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")

import transformers
from torch import Tensor, nn
from torch.testing import assert_close

from skeinformer.models import huggingface
from skeinformer.models.hf_rules import layer_number
from skeinformer.models.policy import Call, observe
from tests.models.hf_models import ENCODERS, LAYERS, encoder, hidden, inputs, register, save_bert, sketched

GIVEN = inputs("bert")
OWN: dict[str, Any] = {"method": "skeinformer", "budget": 7, "num_pilots": 3, "seed": 4, "min_length": 0}


@pytest.fixture(autouse=True)
def _default_policy() -> Iterator[None]:
    register(budget=5)
    yield
    huggingface.register()


def of_own_policy(name: str = "bert", **options: Any) -> Any:
    model = encoder(name)
    huggingface.sketch(model, **{**OWN, **options})
    return model


def by_default_policy(name: str = "bert", **options: Any) -> Tensor:
    """What a model gives whose policy is the default, which is put back."""
    register(**{**OWN, **options})
    output = hidden(sketched(name), inputs(name))
    register(budget=5)
    return output


@pytest.mark.parametrize("name", ENCODERS)
def test_a_model_follows_its_own_policy(name: str) -> None:
    expected = by_default_policy(name)
    model = of_own_policy(name)
    assert torch.equal(hidden(model, inputs(name)), expected)
    assert model.config.skeinformer == {**OWN, "decoder_cross_attention": False}
    register("vmean")  # of all other models
    assert torch.equal(hidden(model, inputs(name)), expected)
    model.config.skeinformer["budget"] = 9  # the configuration decides
    assert torch.equal(hidden(model, inputs(name)), by_default_policy(name, budget=9))


@pytest.mark.parametrize("name", ["bert", "modernbert", "eurobert", "vit"])
def test_a_saved_model_is_loaded_with_its_policy(name: str, tmp_path: Path) -> None:
    model = of_own_policy(name)
    expected = hidden(model, inputs(name))
    model.save_pretrained(tmp_path / "first")
    assert json.loads((tmp_path / "first" / "config.json").read_text())["skeinformer"] == model.config.skeinformer
    kind = type(model)
    loaded = kind.from_pretrained(tmp_path / "first", attn_implementation="skein").eval()
    assert torch.equal(hidden(loaded, inputs(name)), expected)
    exact = kind.from_pretrained(tmp_path / "first").eval()
    assert_close(hidden(exact, inputs(name)), hidden(encoder(name), inputs(name)))
    exact.save_pretrained(tmp_path / "second")
    again = kind.from_pretrained(tmp_path / "second", attn_implementation="skein").eval()
    assert torch.equal(hidden(again, inputs(name)), expected)
    assert huggingface.restore_models(again) == [""]
    assert again.config._attn_implementation == "sdpa"


def test_copies_and_pickles_keep_their_policy() -> None:
    model = of_own_policy()
    expected = hidden(model, GIVEN)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(hidden(copied, GIVEN), expected)
        assert huggingface.restore_models(copied) == [""]
        assert_close(hidden(copied, GIVEN), hidden(encoder("bert"), GIVEN))
    assert torch.equal(hidden(model, GIVEN), expected)


def test_two_models_of_one_configuration_have_their_own() -> None:
    config = encoder("bert").config
    first, second, third = (transformers.BertModel(config).eval() for _ in range(3))
    huggingface.sketch(first, **OWN)
    huggingface.sketch(second, "vmean", min_length=0)
    assert (config._attn_implementation, hasattr(config, "skeinformer")) == ("sdpa", False)
    assert [model.config.skeinformer["method"] for model in (first, second)] == ["skeinformer", "vmean"]
    with huggingface.watch() as counts:
        hidden(third, GIVEN)
    assert not counts
    assert third.config is config


@pytest.mark.parametrize("name", ["eager", "sdpa", "skein"])
def test_restored_to_what_it_was(name: str) -> None:
    model = encoder("bert")
    model.set_attn_implementation(name)
    before, text = hidden(model, GIVEN), model.config.to_json_string()
    for options in (OWN, {"method": "vmean"}):
        huggingface.sketch(model, **options)
    assert huggingface.restore_models(model) == [""]
    assert model.config._attn_implementation == name
    assert model.config.to_json_string() == text
    assert torch.equal(hidden(model, GIVEN), before)
    assert huggingface.restore_models(model) == []


@pytest.mark.filterwarnings("ignore:attn_implementation='skein' sketches nothing")  # in the text model
def test_parts_with_configurations_of_their_own(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 99, **sizes}, vision_config={"image_size": 16, "patch_size": 4, **sizes}
    )
    model: Any = transformers.CLIPModel(config).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    given = {"input_ids": torch.randint(3, 99, (1, 6)), "pixel_values": torch.randn(1, 3, 16, 16)}
    huggingface.sketch(model, **OWN)
    with torch.no_grad(), huggingface.watch() as layers:
        expected = model(**given).image_embeds
    assert layers == {"sketched": 1, "causal": 1}
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.CLIPModel.from_pretrained(tmp_path, attn_implementation="skein").eval()
    with torch.no_grad():
        # to rounding: products may be summed in another order where loaded weights begin at another address
        assert_close(loaded(**given).image_embeds, expected, rtol=1e-5, atol=1e-6)
    huggingface.restore_models(model)
    parts = (model.config, model.config.text_config, model.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa", "eager", "sdpa"]
    assert not any(hasattr(part, "skeinformer") for part in parts)


def test_models_inside_other_modules(tmp_path: Path) -> None:
    pair = nn.ModuleDict({"left": encoder("bert"), "right": encoder("distilbert")})
    huggingface.sketch(pair, **OWN)
    assert torch.equal(hidden(pair["left"], GIVEN), by_default_policy())
    assert huggingface.restore_models(pair) == ["left", "right"]
    package = pytest.importorskip("sentence_transformers", reason="of the extra `dev`")
    model = package.SentenceTransformer(str(save_bert(tmp_path / "bert")), device="cpu")
    huggingface.sketch(model, **OWN)
    texts = ["w1 w2 w3 w4 w5 w6 w7 w8", "w9 w8"]
    expected = model.encode(texts)
    model.save(str(tmp_path / "saved"))
    kwargs = {"attn_implementation": "skein"}
    loaded = package.SentenceTransformer(str(tmp_path / "saved"), model_kwargs=kwargs, device="cpu")
    assert (loaded.encode(texts) == expected).all()


def test_wrong_models_and_configurations_are_named() -> None:
    with pytest.raises(ValueError, match="Linear holds no model of transformers"):
        huggingface.sketch(nn.Linear(2, 2))
    sizes: dict[str, Any] = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with pytest.raises(ValueError, match="MPNetModel does not choose its attention by name"):
        huggingface.sketch(transformers.MPNetModel(transformers.MPNetConfig(**sizes)))
    with pytest.raises(TypeError, match=r"sketch takes no group.* use register\(group=...\)"):
        huggingface.sketch(encoder("bert"), group=object())
    with pytest.raises(TypeError, match="not JSON serializable"):
        huggingface.sketch(encoder("bert"), budget=torch.tensor(12))
    model = sketched()
    for settings, message in (({"num_pilot": 2}, "no option 'num_pilot'"), ([1], "expected an object, got list")):
        model.config.skeinformer = settings
        with pytest.raises(ValueError, match=f"field 'skeinformer' of the model's configuration .*{message}"):
            hidden(model, GIVEN)


def test_an_observer_sees_layers_which_are_then_exact() -> None:
    model, seen = of_own_policy(), []

    def callback(call: Call, reason: str | None, site: Any) -> None:
        seen.append((call.number, reason, site))

    with observe(callback):
        assert_close(hidden(model, GIVEN), hidden(encoder("bert"), GIVEN))
    layers = [module.attention.self for module in model.encoder.layer]
    assert seen == [(i, None, module) for i, module in enumerate(layers)]


UNNUMBERED = ["distilbert", "vit"]


@pytest.mark.parametrize("name", UNNUMBERED)
def test_layers_that_know_no_number_draw_by_their_place(name: str) -> None:
    register("skeinformer", budget=5)
    model, given = sketched(name), inputs(name)
    output = hidden(model, given)
    layers = [module for module in model.modules() if hasattr(module, "is_causal")]
    assert list(map(layer_number, layers)) == list(range(LAYERS))
    assert torch.equal(hidden(model, given), output)
    assert torch.equal(hidden(copy.deepcopy(model), given), output)
    twin = type(model)(model.config).eval()  # of the same configuration, the same object
    twin.load_state_dict(model.state_dict())
    assert torch.equal(hidden(twin, given), output)
    alone = [module for module in sketched(name).modules() if hasattr(module, "is_causal")][-1]
    assert layer_number(alone) == 0  # called outside of a model


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("name", UNNUMBERED)
def test_a_compiled_model_numbers_them_alike(name: str, own: bool) -> None:
    register("skeinformer", budget=5)
    make = of_own_policy if own else sketched
    model, given = make(name), inputs(name)
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")(**given).last_hidden_state
        torch.compiler.reset()
        fresh = make(name)
        inlined = torch.compile(lambda: fresh(**given).last_hidden_state, backend="eager")()
    expected = hidden(make(name), given)
    assert_close(compiled, expected)
    assert_close(inlined, expected)
