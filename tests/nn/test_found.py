"""`convert` on a model that it has nothing to do with says what it found and which way fits; decoders are warned of."""

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer import convert, restore


class OwnAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def test_a_model_that_calls_sdpa_is_told_of_sketched() -> None:
    with pytest.warns(UserWarning, match="nothing was converted") as caught:
        report = convert(nn.Sequential(OwnAttention(), OwnAttention()))
    assert caught[0].filename == __file__
    (note,) = report.notes
    assert "has no torch.nn.MultiheadAttention (2 OwnAttention)" in note
    assert "its code calls scaled_dot_product_attention itself" in note
    assert "with skeinformer.sketched(" in note


def test_a_model_of_transformers_is_told_of_register() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")
    config = transformers.ViTConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, image_size=8, patch_size=4
    )
    with pytest.warns(UserWarning, match=r"skeinformer.huggingface.register\(\), then model.set_attn_implementation"):
        convert(transformers.ViTModel(config))


def test_a_decoder_is_warned_of_once() -> None:
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 8, batch_first=True), 3)
    with pytest.warns(UserWarning, match="3 of 6 attention layers of TransformerDecoder are causal") as caught:
        report = convert(decoder, "cluster")
    assert len(caught) == 1
    assert report.converted == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(decoder, "cluster", decoder_cross_attention=True)
        convert(nn.Transformer(8, 2, 1, 1, 8, batch_first=True), "cluster")


def test_a_decoder_of_transformers_is_warned_of_once() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")
    from skeinformer import huggingface

    huggingface.register("cluster")
    try:
        sizes = {"vocab_size": 9, "n_positions": 16, "n_embd": 8, "n_layer": 3, "n_head": 2}
        model = transformers.GPT2Model(transformers.GPT2Config(**sizes)).eval()
        model.set_attn_implementation("skein-cluster")
        tokens = torch.randint(9, (1, 8))
        with pytest.warns(UserWarning, match="sketches nothing in this model: its 3 layers are causal") as caught:
            _ = model(tokens), model(tokens)
        assert len([one for one in caught if "sketches nothing" in str(one.message)]) == 1
        small = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        encoder = transformers.BertModel(transformers.BertConfig(vocab_size=9, **small)).eval()
        encoder.set_attn_implementation("skein-cluster")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            encoder(tokens)
    finally:
        huggingface.unregister()


def test_what_is_no_model_is_refused() -> None:
    for function in (convert, restore):
        with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got str"):
            function("model")  # type: ignore[arg-type]
