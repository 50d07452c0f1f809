"""`compare` on models of transformers, with random weights: what is sketched, what stays exact."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs the extra `hf`")

import transformers

from skeinformer import compare, huggingface
from tests.helpers import lengths_mask

N = 24
FAST: dict[str, Any] = {"rounds": 1, "budget": 4, "show": False}
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


def tokens() -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, 50, (2, N)), "attention_mask": lengths_mask([N, 15], N).long()}


def test_layers_heads_and_output_of_bert() -> None:
    result = compare(bert(), tokens(), "skeinformer", num_pilots=3, **FAST)
    assert [(r["layer"], r["head"]) for r in result.layers] == [
        (f"encoder.layer.{layer}.attention.self", head) for layer in range(2) for head in (None, 0, 1, 2, 3)
    ]
    assert result.whole["output"] == "last_hidden_state"
    assert 0 < float(result.whole["cosine_min"] or 0) <= float(result.whole["cosine"] or 0) < 1


def test_a_classifier_inside_of_a_module_that_writes_into_its_inputs() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = bert("BertForSequenceClassification", num_labels=3)

        def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
            features["logits"] = self.inner(**features).logits
            return features

    result = compare(Wrapped(), (tokens(),), **FAST)
    assert result.whole["output"] == "logits"
    assert result.whole["logits_change"] is not None
    assert result.layers[0]["layer"] == "inner.bert.encoder.layer.0.attention.self"


def test_the_mask_of_an_encoder_is_not_that_of_the_decoder() -> None:
    sizes = {"d_model": 16, "vocab_size": 50, "max_position_embeddings": 64, "init_std": 0.5}
    layers = {f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")}
    widths = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    model, inputs = transformers.BartModel(transformers.BartConfig(**sizes, **layers, **widths)).eval(), tokens()
    inputs["decoder_input_ids"] = torch.randint(3, 50, (2, N))  # as long as the encoder's

    def cosine(**more: Any) -> Any:
        mask = more.pop("mask", None)
        return compare(model, {**inputs, **more}, mask=mask, **FAST).whole["cosine"]

    assert cosine() == cosine(mask=torch.ones(2, N, dtype=torch.bool))
    assert cosine(decoder_attention_mask=lengths_mask([9, N], N).long()) != cosine()


@pytest.mark.parametrize("before", ["eager", "sdpa", "skein", "a policy of its own"])
def test_the_model_is_compared_with_exact_attention_and_stays_as_it_was(before: str) -> None:
    model, inputs = bert().train(), tokens()
    if before == "a policy of its own":
        huggingface.sketch(model, "vmean", min_length=0)
    else:
        model.set_attn_implementation(before)
    config, values = model.config, dict(vars(model.config))
    result = compare(model, inputs, **FAST)
    assert float(result.whole["change"] or 0) > 1e-4
    model.set_attn_implementation("sdpa")
    expected = compare(model, inputs, **FAST)
    assert result.whole["cosine"] == pytest.approx(expected.whole["cosine"], rel=1e-5)
    model.set_attn_implementation(values["_attn_implementation_internal"])
    assert model.config is config
    assert vars(config) == values
    assert model.training


def test_causal_layers_full_budgets_and_other_methods_are_refused_with_the_reason() -> None:
    config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2)
    with pytest.raises(ValueError, match=r"would be sketched: layers\.0\.self_attn: causal"):
        compare(transformers.LlamaModel(config), {"input_ids": torch.randint(3, 50, (1, N))}, **FAST)
    with pytest.raises(ValueError, match="no more keys than the budget"):
        compare(bert(), tokens(), budget=N, rounds=1)
    with pytest.raises(ValueError, match="parameters of its own"):
        compare(bert(), tokens(), "linformer", max_len=N, rounds=1)
