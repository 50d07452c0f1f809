"""`compare` on models of transformers, with random weights: what is sketched, what stays exact."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers", reason="needs the extra `lab`")

import transformers
from transformers import AttentionInterface, AttentionMaskInterface

from skeinformer import build, compare, huggingface
from skeinformer.compare.apply import remembered
from skeinformer.compare.contender import Contender
from skeinformer.compare.layers import LayerCall, Plan, measure_call
from skeinformer.compare.transformers_models import SKETCHED, TransformersLayers, registered
from skeinformer.huggingface.interface import attention_forward
from skeinformer.huggingface.settings import LayerSettings
from tests.helpers import lengths_mask

N = 24
FAST: dict[str, Any] = {"rounds": 1, "budget": 4}
SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # attention that is not flat
}


def bert(kind: str = "BertModel", **options: Any) -> Any:
    return getattr(transformers, kind)(transformers.BertConfig(**SIZES, **options))


def tokens(padded: bool = True) -> dict[str, Tensor]:
    mask = lengths_mask([N, 15] if padded else [N, N], N)
    return {"input_ids": torch.randint(3, 50, (2, N)), "attention_mask": mask.long()}


def test_layers_heads_and_output_of_bert() -> None:
    model, inputs = bert(), tokens()
    result = compare(model, inputs, "skeinformer:num_pilots=3", **FAST)
    assert [(r["layer"], r["head"]) for r in result.layers] == [
        (f"encoder.layer.{layer}.attention.self", head) for layer in range(2) for head in (None, 0, 1, 2, 3)
    ]
    assert result.whole["output"] == "last_hidden_state"
    assert 0 < result.whole["cosine_min"] <= result.whole["cosine"] < 1
    full = compare(model, inputs, "performer", **FAST)
    assert full.whole["layers"] == 2


def test_the_error_is_that_of_the_layer() -> None:
    """The first layer's queries, keys and values by hand, and the draws that the registered name has there."""
    model, inputs = bert().eval(), tokens()
    seen: dict[str, Tensor] = {}
    attention = model.encoder.layer[0].attention.self
    for name in ("query", "key", "value"):
        getattr(attention, name).register_forward_hook(lambda _, __, x, name=name: seen.update({name: x.detach()}))
    result = compare(model, inputs, "cluster", **FAST)
    model(**inputs)
    q, k, v = (seen[name].view(2, N, 4, 4).transpose(1, 2) for name in ("query", "key", "value"))
    mask = inputs["attention_mask"].bool()
    exact = F.scaled_dot_product_attention(q, k, v, mask[:, None, None])
    sketch = LayerSettings("cluster", 4).build(head_dim=4).eval()
    rows = mask[:, None, :, None]
    missed = ((sketch(q, k, v, key_mask=mask, query_mask=mask) - exact) * rows).square()
    expected = (missed.sum((0, 2, 3)) / (exact * rows).square().sum((0, 2, 3))).sqrt().tolist()  # of each head
    assert [r["error"] for r in result.layers[1:5]] == pytest.approx(expected, rel=1e-4)


def test_padding_changes_nothing() -> None:
    model, inputs = bert(), tokens()
    padding = inputs["attention_mask"] == 0
    other = {**inputs, "input_ids": inputs["input_ids"].masked_fill(padding, 7)}
    first, second = (compare(model, x, "cluster", **FAST) for x in (inputs, other))
    assert [r["error"] for r in first.layers] == pytest.approx([r["error"] for r in second.layers], rel=1e-4)
    assert first.whole["cosine"] == pytest.approx(second.whole["cosine"])


def test_logits_of_a_classifier_and_a_wrapper_around_it() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bert("BertForSequenceClassification", num_labels=3)

        def forward(self, **inputs: Tensor) -> Any:
            return self.inner(**inputs)

    result = compare(Wrapped(), tokens(), **FAST)
    assert result.whole["output"] == "logits"
    assert result.whole["logits_change"] is not None
    assert result.layers[0]["layer"] == "inner.bert.encoder.layer.0.attention.self"


def test_the_mask_of_an_encoder_is_not_that_of_the_decoder() -> None:
    sizes = {"d_model": 16, "vocab_size": 50, "max_position_embeddings": 64, "init_std": 0.5}
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    model, inputs = transformers.BartModel(transformers.BartConfig(**sizes, **layers, **widths)).eval(), tokens()
    inputs["decoder_input_ids"] = torch.randint(3, 50, (2, N))  # as long as the encoder's

    def found(**more: Tensor) -> Any:
        return compare(model, {**inputs, **more}, "cluster", **FAST).whole["cosine"]

    last = lengths_mask([9, N], N)
    every = torch.ones(2, N, dtype=torch.bool)
    assert found() == compare(model, inputs, "cluster", mask=every, **FAST).whole["cosine"]
    assert found(decoder_attention_mask=last.long()) != found()


@pytest.mark.parametrize("before", ["eager", "sdpa", "skein-cluster"])
def test_names_and_settings_are_as_before(before: str) -> None:
    huggingface.register(budget=3, min_length=0)
    try:
        model, inputs = bert().train(), tokens()
        model.set_attn_implementation(before)
        names = [sorted(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)]
        result = compare(model, inputs, "cluster", **FAST)
        assert result.whole["change"] > 1e-4  # compared with exact attention, whatever the model had
        assert model.config._attn_implementation == before
        assert model.training
        assert [sorted(x._global_mapping) for x in (AttentionInterface, AttentionMaskInterface)] == names
    finally:
        huggingface.unregister()


def test_causal_layers_full_budgets_and_other_methods_are_refused_with_the_reason() -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"would be sketched: layers\.0\.self_attn: causal"):
        compare(transformers.LlamaModel(config), {"input_ids": torch.randint(3, 50, (1, N))}, **FAST)
    with pytest.raises(ValueError, match="no more keys than the budget"):
        compare(bert(), tokens(), budget=N, rounds=1)
    with pytest.raises(ValueError, match="parameters of its own"):
        compare(bert(), tokens(), "linformer", max_len=N, rounds=1)


def test_options_of_the_method_are_given_to_compare_and_not_to_the_model() -> None:
    with pytest.raises(ValueError, match="called with 'num_pilots', an option of the method; give it to compare"):
        compare(bert(), {**tokens(), "num_pilots": 3}, **FAST)


def test_grouped_heads_are_measured_with_the_draws_of_the_model() -> None:
    class Bidirectional(nn.Module):
        is_causal = False
        num_key_value_groups = 2

    layers = TransformersLayers(bert(), "cluster", 0, {"budget": 4})
    calls: list[LayerCall] = []
    q, k, v = torch.randn(2, 4, N, 8), torch.randn(2, 2, N, 8), torch.randn(2, 2, N, 8)
    real = lengths_mask([N, 9], N)
    module = Bidirectional().eval()
    output, _ = layers._watch(calls.append, module, q, k, v, real, scaling=0.7)
    (call,) = calls
    exact = call.repeated().run(build("softmax", head_dim=8, scale=call.scale))
    torch.testing.assert_close(output[real], exact.transpose(1, 2)[real])
    assert call.make(3).options.budget == 3
    sketched, _ = attention_forward(layers.settings, module, q, k, v, real, scaling=0.7)
    torch.testing.assert_close(call.run(call.make(4)).transpose(1, 2), sketched)
    certified, error, upper = call.certify(call.make(4))
    torch.testing.assert_close(certified.transpose(1, 2), sketched)
    assert error.shape == upper.shape == (2, 4)
    plan = Plan(Contender("cluster"), 4, 0.3, 1, N)
    missed = (sketched - output).transpose(1, 2)[:, 3].masked_fill(~real[..., None], 0)  # of the last head
    norm = output.transpose(1, 2)[:, 3].masked_fill(~real[..., None], 0)
    assert measure_call(call, plan)[-1]["error"] == pytest.approx(float(missed.norm() / norm.norm()), rel=1e-4)


def test_parts_of_a_model_keep_the_attention_that_each_had() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 50, "max_position_embeddings": N},
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        projection_dim=8,
    )
    model: Any = transformers.CLIPModel(config)
    model.set_attn_implementation({"": "sdpa", "vision_config": "eager", "text_config": "sdpa"})

    def names() -> list[str]:
        parts = (model, model.vision_model, model.text_model)
        return [part.config._attn_implementation for part in parts]

    before = names()
    assert before == ["sdpa", "eager", "sdpa"]
    put_back = remembered(model)
    with registered():
        layers = TransformersLayers(model, "cluster", 0, {"budget": 4})
        layers.sketched()
        assert set(names()) == {SKETCHED}
        layers.exact()
        assert names() == before
        layers.sketched()
    put_back()
    assert names() == before


def test_local_layers_of_modernbert_stay_exact() -> None:
    options = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    sizes = {**SIZES, "num_hidden_layers": 3}
    config = transformers.ModernBertConfig(**sizes, **options, local_attention=6, global_attn_every_n_layers=2)
    result = compare(transformers.ModernBertModel(config), tokens(), **FAST)
    assert result.whole["layers"] == 2
    assert list(result.left.values()) == ["sliding window"]


def test_a_model_that_writes_into_its_inputs() -> None:
    """As a SentenceTransformer does, which has all arguments in one dict."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bert()

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            features["token_embeddings"] = self.inner(**features).last_hidden_state
            return features

    model, inputs = Features(), tokens()
    result = compare(model, (inputs,), "cluster", **FAST)
    assert result.whole["output"] == "token_embeddings"
    inner = compare(model.inner, inputs, "cluster", **FAST)
    assert result.whole["cosine"] == inner.whole["cosine"]  # padding is left out there too
