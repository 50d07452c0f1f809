"""A sketched Hugging Face model that was saved is sketched when it is loaded again, or says what is missing."""

import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="needs transformers, of the extra `lab`")

import transformers
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface

from skeinformer import huggingface
from skeinformer.huggingface.applied import APPLIED, SAVED
from skeinformer.huggingface.registration import REGISTERED
from tests.huggingface.models import HEADS, WIDTH, encoder, hidden, inputs, register

NAMES = list(huggingface.available().values())
MISSING = r"attn_implementation='skein' is not registered: call skeinformer\.huggingface\.register\(\) first"
GIVEN = inputs("bert")


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(budget=5)
    yield
    huggingface.unregister()


def sketched(name: str = "bert", implementation: str = "skein") -> Any:
    model = encoder(name)
    model.set_attn_implementation(implementation)
    return model


def test_settings_without_a_name_are_not_loaded(tmp_path: Path) -> None:
    """transformers' own methods keep the settings of a folder, and drop the name of the attention."""
    huggingface.save_pretrained(sketched(), tmp_path / "sketched")
    model = transformers.BertModel.from_pretrained(tmp_path / "sketched")
    model.set_attn_implementation("sdpa")
    model.save_pretrained(tmp_path / "exact")
    with pytest.raises(ValueError, match=r"was not saved by skeinformer\.huggingface\.save_pretrained"):
        huggingface.load_pretrained(tmp_path / "exact")


def test_transformers_alone_saves_an_exact_model(tmp_path: Path) -> None:
    model = sketched()
    model.save_pretrained(tmp_path)
    assert "skein" not in (tmp_path / "config.json").read_text()
    plain = transformers.BertModel.from_pretrained(tmp_path).eval()
    assert plain.config._attn_implementation == "sdpa"
    assert_close(hidden(plain, GIVEN), hidden(encoder("bert"), GIVEN))
    loaded = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="skein").eval()
    assert torch.equal(hidden(loaded, GIVEN), hidden(model, GIVEN))
    with pytest.raises(ValueError, match=r"was not saved by skeinformer\.huggingface\.save_pretrained"):
        huggingface.load_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["bert", "modernbert", "eurobert"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("skeinformer", {"budget": 7, "num_pilots": 3, "seed": 4}),
        ("cluster", {"budget": 6, "num_steps": 2, "decoder_cross_attention": True}),
    ],
)
def test_a_saved_model_loads_with_its_settings(name: str, method: str, options: dict[str, Any], tmp_path: Path) -> None:
    (implementation,) = register(method, **options)
    model = sketched(name, implementation)
    expected = hidden(model, inputs(name))
    before = model.config.to_dict().keys()
    huggingface.save_pretrained(model, tmp_path)
    assert model.config.to_dict().keys() == before
    huggingface.unregister()
    loaded = huggingface.load_pretrained(tmp_path).eval()
    assert torch.equal(hidden(loaded, inputs(name)), expected)
    assert loaded.config.to_dict().keys() == before
    # what is registered holds where the model is loaded by transformers
    register(method, budget=5)
    plain = type(model).from_pretrained(tmp_path).eval()
    assert plain.config._attn_implementation == implementation
    assert not torch.equal(hidden(plain, inputs(name)), expected)
    register(method, **options)
    assert torch.equal(hidden(plain, inputs(name)), expected)
    exact = huggingface.load_pretrained(tmp_path, type(model), attn_implementation="sdpa").eval()
    assert_close(hidden(exact, inputs(name)), hidden(encoder(name), inputs(name)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"skeinformer": {"skein": {"method": "skeinformer", "budget": 3, "num_pilot": 2}}},
            "has no option 'num_pilot'",
        ),
        ({"skeinformer": {"skein": {"method": "skeinformer", "budget": "x"}}}, "budget"),
        ({"skeinformer": {"skein": {"method": ["x"]}}}, "'skein': attention is chosen by its name, a string"),
        ({"skeinformer": {"skein": [1]}}, "'skein' holds list, expected an object of settings"),
        ({"skeinformer": {"skein": {"budget": 3}}}, "'skein' holds the settings of skein-vmean, "),
        ({"skeinformer": {"skein": {"method": "cluster", "budget": 3}}}, "'skein' holds the settings of skein-cluster"),
        ({"skeinformer": [1]}, "was not saved by"),
        ({"hidden_size": "many"}, None),
        ({"num_attention_heads": 7}, None),
    ],
)
def test_loading_that_fails_changes_nothing(tmp_path: Path, change: dict[str, Any], message: str | None) -> None:
    register("cluster", budget=6)
    model = sketched()
    huggingface.save_pretrained(model, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    register("skeinformer", budget=7)  # other settings than those in the folder
    huggingface.unregister()
    register("cluster", budget=9)
    before = dict(REGISTERED)
    mappings = [dict(kind._global_mapping) for kind in (AttentionInterface, AttentionMaskInterface)]
    with pytest.raises(ValueError if message else Exception, match=message):
        huggingface.load_pretrained(tmp_path)
    assert before == REGISTERED
    for kind, mapping in zip((AttentionInterface, AttentionMaskInterface), mappings, strict=True):
        assert kind._global_mapping.keys() == mapping.keys()
        assert all(described(kind._global_mapping[name]) == described(mapping[name]) for name in mapping)
    with pytest.raises(RuntimeError, match=MISSING):
        hidden(model, GIVEN)


def described(function: Any) -> Any:
    """A function, or what a partial function calls with what."""
    return (function.func, function.args) if isinstance(function, functools.partial) else function


def test_parts_of_a_model_keep_their_names(tmp_path: Path) -> None:
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": 1, "num_attention_heads": HEADS, "intermediate_size": WIDTH}
    config = transformers.CLIPConfig(
        text_config={"vocab_size": 99, **sizes}, vision_config={"image_size": 8, "patch_size": 4, **sizes}
    )
    model: Any = transformers.CLIPModel(config).eval()
    model.set_attn_implementation({"": "sdpa", "text_config": "sdpa", "vision_config": "skein"})
    huggingface.save_pretrained(model, tmp_path)
    loaded = huggingface.load_pretrained(tmp_path)
    parts = (loaded.config, loaded.config.text_config, loaded.config.vision_config)
    assert [part._attn_implementation for part in parts] == ["sdpa", "sdpa", "skein"]
    assert list(json.loads((tmp_path / "config.json").read_text())["skeinformer"]) == ["skein"]


def test_only_what_is_registered_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the model's attention is 'sdpa', which register\(\) did not make"):
        huggingface.save_pretrained(encoder("bert"), tmp_path / "exact")
    model = sketched()
    huggingface.unregister()
    with pytest.raises(ValueError, match=r"attention is 'skein', which register\(\) did not make"):
        huggingface.save_pretrained(model, tmp_path / "unregistered")
    assert not list(tmp_path.iterdir())


def test_a_model_without_registration_says_what_to_call(tmp_path: Path) -> None:
    model = sketched()
    huggingface.save_pretrained(model, tmp_path)
    assert set(huggingface.unregister()) == set(NAMES)
    assert huggingface.unregister() == ()
    loaded = transformers.AutoModel.from_pretrained(tmp_path).eval()
    for other in (model, loaded, sketched()):
        with pytest.raises(RuntimeError, match=MISSING):
            hidden(other, GIVEN)
        with pytest.raises(RuntimeError, match=MISSING):
            hidden(other, GIVEN, attention_mask=torch.ones_like(GIVEN["input_ids"]))
    with pytest.raises(RuntimeError, match=MISSING):
        hidden(sketched("vit"), inputs("vit"))  # it makes no mask
    register(budget=5)
    assert torch.equal(hidden(loaded, GIVEN), hidden(model, GIVEN))
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
        assert {name for name in mapping if name.startswith("skein")} == {*NAMES, APPLIED, SAVED}


def test_a_process_that_only_imports_or_does_not_is_told(tmp_path: Path) -> None:
    huggingface.save_pretrained(sketched(), tmp_path)
    program = f"""
import torch, transformers
try:
    transformers.AutoModel.from_pretrained({str(tmp_path)!r})
except ValueError as error:
    print(error)
import skeinformer.huggingface
model = transformers.AutoModel.from_pretrained({str(tmp_path)!r})
try:
    model(torch.ones(1, 4, dtype=torch.long))
except RuntimeError as error:
    print(error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = result.stdout.splitlines()
    assert 'Specified `attn_implementation="skein"` is not supported' in first  # transformers', all that it knows
    assert "call skeinformer.huggingface.register() first" in second
