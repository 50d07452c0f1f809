"""Which layers of a Hugging Face model are sketched, which take the exact kernel, and what is refused."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")

import transformers
from torch.testing import assert_close
from transformers import AttentionInterface
from transformers.masking_utils import create_bidirectional_mask

import skeinformer
from skeinformer import build
from skeinformer.models import huggingface
from tests.models.hf_models import (
    LAYERS,
    LENGTH,
    bart,
    bert,
    encoder,
    forward,
    grouped,
    hidden,
    inputs,
    layer,
    register,
    sketched,
    t5,
)

TOKENS = inputs("bert")["input_ids"]


@pytest.fixture(autouse=True)
def _default_policy() -> Iterator[None]:
    register(budget=5)
    yield
    huggingface.register()


def both(model: Any, **given: Any) -> tuple[Tensor, Tensor, dict[str, int]]:
    """The last hidden state with sdpa, with ours, and what the layers did."""
    model.eval().set_attn_implementation("sdpa")
    exact = hidden(model, given)
    model.set_attn_implementation("skein")
    with huggingface.watch() as counts:
        return exact, hidden(model, given), dict(counts)


def call(module: nn.Module, mask: Tensor | None = None, n: int = 20, n_k: int = 20, **options: Any) -> str:
    """What a layer does with random queries and keys: "sketched", or why it is exact; then it is right."""
    q, k = torch.randn(2, 2, n, 8), torch.randn(2, 2, n_k, 8)
    with huggingface.watch() as counts:
        output = forward(module, q, k, k, mask, **options)
    (reason,) = counts
    if reason != "sketched":
        sdpa: Any = AttentionInterface._global_mapping["sdpa"]
        four = mask if mask is None or mask.dim() == 4 else mask.bool()[:, None, None]
        assert_close(output, sdpa(module, q, k, k, four, **options)[0])
    return reason


PADDING = torch.arange(20) < torch.tensor([[20], [13]])


@pytest.mark.parametrize("padded", [False, True])
def test_a_causal_model_is_exact(padded: bool) -> None:
    torch.manual_seed(0)
    mask = torch.ones_like(TOKENS)
    mask[1, :9] = 1 - padded
    model, given = grouped("Llama"), {"input_ids": TOKENS, "attention_mask": mask}
    with pytest.warns(UserWarning, match="sketches nothing in this model: its 2 layers are causal"):
        exact, ours, counts = both(model, **given)
    assert_close(ours, exact)
    assert counts == {"causal": LAYERS}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hidden(model, given)


@pytest.mark.filterwarnings("ignore:attn_implementation='skein' sketches nothing")
def test_generation_is_exact() -> None:
    torch.manual_seed(0)
    config = grouped("Llama").config
    model: Any = transformers.LlamaForCausalLM(config).eval()
    mask = torch.ones_like(TOKENS)
    mask[1, :9] = 0
    options = {"attention_mask": mask, "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    expected = model.generate(TOKENS, **options)
    model.set_attn_implementation("skein")
    with huggingface.watch() as counts:
        assert torch.equal(model.generate(TOKENS, **options), expected)
    assert set(counts) == {"causal"}


def test_position_biases_are_exact() -> None:
    """T5: a learned bias in the encoder, one of zeros in its cross-attention."""
    torch.manual_seed(0)
    mask = torch.ones_like(TOKENS)
    mask[1, 15:] = 0
    model = t5()
    exact, ours, counts = both(model.get_encoder(), input_ids=TOKENS, attention_mask=mask)
    assert_close(ours, exact)
    assert counts == {"position bias": LAYERS}
    exact, ours, counts = both(model, input_ids=TOKENS, attention_mask=mask, decoder_input_ids=TOKENS[:, :7])
    assert_close(ours, exact)
    assert counts == {"position bias": 2 * LAYERS, "causal": LAYERS}


def test_windows_are_kept_and_exact() -> None:
    """ModernBERT: with as many samples as keys all is exact, so a window that was lost would show."""
    mask = torch.ones_like(TOKENS)
    mask[1, 15:] = 0
    model = encoder("modernbert")
    exact, ours, counts = both(model, input_ids=TOKENS, attention_mask=mask)
    assert counts == {"sketched": 2, "sliding window": 2}
    assert not torch.allclose(ours[0], exact[0], atol=1e-3)
    register(budget=LENGTH)
    exact, ours, _ = both(model, input_ids=TOKENS, attention_mask=mask)
    assert_close(ours[mask.bool()], exact[mask.bool()])
    model.config.sliding_window = 10**6  # the mask is made from it
    for window in model.layers:
        window.attn.sliding_window = None
    assert not torch.allclose(hidden(model, {"input_ids": TOKENS})[0], exact[0], atol=1e-3)


@pytest.mark.parametrize("n", [LENGTH, 10])
@pytest.mark.parametrize("kind", ["bart", "bert"])
def test_a_decoder_attends_to_the_encoder_exactly_by_default(kind: str, n: int) -> None:
    torch.manual_seed(0)
    mask = torch.ones_like(TOKENS)
    mask[1, 15:] = 0
    given: dict[str, Tensor]
    if kind == "bart":
        model, encoded = bart(), LAYERS
        given = {"input_ids": TOKENS, "attention_mask": mask, "decoder_input_ids": TOKENS[:, :n]}
    else:
        model, encoded = bert(is_decoder=True, add_cross_attention=True), 0
        states = torch.randn(2, LENGTH, 32)
        given = {"input_ids": TOKENS[:, :n], "encoder_hidden_states": states, "encoder_attention_mask": mask}
    *_, counts = both(model, **given)
    assert counts.pop("sketched", 0) == encoded
    assert counts == {"causal": LAYERS, "cross-attention of a decoder": LAYERS}
    register(budget=5, decoder_cross_attention=True)
    exact, rough, counts = both(model, **given)
    assert counts == {"causal": LAYERS, "sketched": encoded + LAYERS}
    assert not torch.allclose(rough, exact, atol=1e-3)
    # no query is taken for padding: 15 real keys and samples are exact, also where there are as many queries as keys
    register("skeinformer", budget=15, decoder_cross_attention=True)
    exact, ours, counts = both(model, **given)
    assert counts["sketched"] == encoded + LAYERS
    if kind == "bert":
        assert_close(ours[1], exact[1], rtol=1e-4, atol=1e-4)


def test_cross_attention_is_a_decoders_unless_the_layer_says_otherwise() -> None:
    for module, n in ((layer(), 11), (layer(is_cross_attention=True), 20), (CrossAttention().eval(), 20)):
        assert call(module, PADDING, n=n) == "cross-attention of a decoder"
    ambiguous = Ambiguous().eval()
    ambiguous.config = transformers.BartConfig()  # of a model with a decoder
    assert call(ambiguous, PADDING) == "cross-attention of a decoder"
    assert call(layer(is_cross_attention=True, is_decoder=False), PADDING) == "sketched"
    assert call(layer(is_decoder=False), PADDING, n=11) == "sketched"
    register(budget=5, decoder_cross_attention=True)
    assert call(layer(), PADDING, n=11) == "sketched"
    register("longformer", budget=5)
    assert call(layer(), PADDING, n=11) == "cross-attention"  # a pattern over one sequence


@pytest.mark.parametrize("allowed", [False, True])
def test_gpt2_does_not_see_later_tokens_by_its_cross_attention(allowed: bool) -> None:
    """Neither its config nor its layers say that it is a decoder."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 99, "initializer_range": 0.3}
    config = transformers.GPT2Config(**sizes, add_cross_attention=True, bos_token_id=1, eos_token_id=2)
    model: Any = transformers.GPT2Model(config).eval()
    model.set_attn_implementation("skein")
    register(budget=5, decoder_cross_attention=allowed)
    given = {"input_ids": TOKENS, "encoder_hidden_states": torch.randn(2, 40, 32)}
    later = TOKENS.clone()
    later[:, 12:] = 98 - later[:, 12:]
    with huggingface.watch() as counts:
        change = hidden(model, given) - hidden(model, {**given, "input_ids": later})
    assert bool(change[:, :12].abs().max() > 1e-3) is allowed
    assert counts == {"causal": 4, "sketched" if allowed else "cross-attention of a decoder": 4}


class Ambiguous(nn.Module):
    """May attend to another sequence, and does not say whether it did."""

    is_causal = False

    def forward(self, hidden_states: Tensor, key_value_states: Tensor | None = None) -> None: ...


class CrossAttention(nn.Module):
    is_causal = False


@pytest.mark.parametrize(
    ("module", "elsewhere"),
    [
        (layer(), False),
        (Ambiguous(), True),
        (CrossAttention(), True),
        (layer(is_cross_attention=True), True),
        (layer(is_cross_attention=False), False),
        (layer(is_decoder=True), True),
        (layer(is_decoder=False), False),
    ],
)
def test_queries_are_padded_only_where_they_are_the_keys(module: nn.Module, elsewhere: bool) -> None:
    register(budget=5, decoder_cross_attention=True)
    q = torch.randn(2, 2, 20, 8)
    output = forward(module.eval(), q, q, q, PADDING)
    query_mask = None if elsewhere else PADDING
    method = build("cluster", head_dim=8, budget=5, seed=0).eval()
    assert_close(output, method(q, q, q, key_mask=PADDING, query_mask=query_mask).transpose(1, 2))
    assert bool((output[1, 13:] == 0).all()) is not elsewhere


def test_masks_given_to_a_layer() -> None:
    four = PADDING[:, None, None]  # (b, 1, 1, n_k)
    window = four & (torch.arange(20)[:, None] - torch.arange(20)).abs().le(3)  # (b, 1, n, n_k)
    additive = torch.zeros(2, 1, 20, 20).masked_fill(~window, -torch.inf)
    by_head = four & (torch.arange(2) > 0)[:, None, None]  # (b, h, 1, n_k)
    weights = torch.zeros(2, 1, 1, 20).masked_fill(~four, -1.0)
    # the same for every query, whatever the shape and the dtype
    padding = torch.zeros(2, 1, 1, 20).masked_fill(~four, -1e9)
    for mask in (four, four[:1], four.expand(-1, 2, -1, -1), four.expand(-1, 1, 20, -1).contiguous(), padding):
        assert call(layer(), mask) == "sketched"
    assert call(layer(), PADDING.long()) == "sketched"
    for mask in (window, additive):
        assert call(layer(), mask) == "the mask differs between queries"
    assert call(layer(), by_head) == "the mask differs between heads"
    assert call(layer(), weights) == "the mask is more than padding"


@pytest.mark.parametrize("b", [1, 2])
def test_a_mask_of_three_dimensions_given_to_a_model_is_refused(b: int) -> None:
    model = sketched()
    mask = torch.ones(b, LENGTH, LENGTH, dtype=torch.long)
    with pytest.raises(ValueError, match=rf"shape \({b}, 24, 24\), expected two dimensions, \(batch, keys\), or four"):
        hidden(model, {"input_ids": TOKENS[:b]}, attention_mask=mask)


@pytest.mark.parametrize("padded", [False, True])
def test_a_model_that_asks_for_the_whole_mask_gets_it(padded: bool) -> None:
    """T5Gemma2's decoder and LightGlue change the mask that they are given: None or two dimensions would break them."""
    model = sketched()
    mask = PADDING if padded else None
    options = {"config": model.config, "inputs_embeds": torch.zeros(2, 20, 32), "attention_mask": mask}
    whole = create_bidirectional_mask(**options, allow_is_bidirectional_skip=False)
    model.set_attn_implementation("sdpa")
    expected = create_bidirectional_mask(**options, allow_is_bidirectional_skip=False)
    assert expected is not None
    assert_close(whole, expected)
    assert whole.shape == (2, 1, 20, 20)


def test_a_layer_that_does_not_say_is_causal_as_transformers_has_it() -> None:
    assert call(nn.Module(), None) == "causal"
    assert call(layer(is_causal=True), None) == "causal"
    assert call(layer(is_causal=True), None, is_causal=False) == "sketched"
    assert call(layer(), None, is_causal=True) == "causal"


@pytest.mark.parametrize(
    ("mask", "options", "message"),
    [
        (None, {"softcap": 30.0}, "'skein' does not support the argument 'softcap'.* or use 'eager'"),
        (None, {"s_aux": torch.zeros(2)}, "s_aux"),
        (None, {"cache": object()}, "cache"),
        (None, {"cu_seq_lens_q": torch.tensor([0, 20])}, "cu_seq_lens_q"),
        (None, {"output_attentions": True}, "forms no attention weights"),
        (None, {"sliding_window": 8}, "a window of 8 keys, but no mask that limits it to them"),
        (PADDING, {"sliding_window": 8}, "a window of 8 keys, but its mask covers only padding"),
        (torch.ones(2, 20), {}, r"shape \(2, 20\) and dtype torch.float32; expected booleans"),
        (torch.ones(2, 20, 20).bool(), {}, r"shape \(2, 20, 20\)"),
        (torch.ones(2, 21).bool(), {}, r"shape \(2, 21\) .* expected booleans of shape \(2, 20\)"),
    ],
)
def test_what_neither_kernel_computes_is_refused(mask: Tensor | None, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(layer(), mask, **options)
    assert call(layer(), None, sliding_window=20) == "sliding window"  # it reaches all keys


def test_a_model_outside_the_interface_keeps_its_attention(tmp_path: Path) -> None:
    """Loading it with the name passes in silence: only `watch` tells."""
    config = transformers.MPNetConfig(
        vocab_size=99, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    model: Any = transformers.MPNetModel(config).eval()
    model.save_pretrained(tmp_path)
    loaded: Any = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="skein").eval()
    with huggingface.watch() as counts:
        assert_close(hidden(loaded, {"input_ids": TOKENS}), hidden(model, {"input_ids": TOKENS}))
    assert not counts


def test_watching_is_nested_and_ends() -> None:
    with huggingface.watch() as outer:
        call(layer(), PADDING)
        with huggingface.watch() as inner:
            call(layer(is_causal=True))
    call(layer(), PADDING)
    assert outer == {"sketched": 1, "causal": 1}
    assert inner == {"causal": 1}


def test_exact_layers_are_exact_inside_sketched() -> None:
    q = torch.randn(1, 2, 20, 8)
    expected = forward(layer(is_causal=True), q, q, q, None)
    with skeinformer.sketched(budget=5, min_length=0) as report:
        assert torch.equal(forward(layer(is_causal=True), q, q, q, None), expected)
    assert (report.sketched, report.exact) == (0, 0)
