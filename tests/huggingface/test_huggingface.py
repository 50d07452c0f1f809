"""Hugging Face encoders with `attn_implementation="skein"`: really sketched, right with padding, in every mode."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers, of the extra `lab`")

from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from transformers import AttentionInterface

from skeinformer import METHODS, build, huggingface
from tests.attention.test_compile import Backend
from tests.huggingface.models import (
    ENCODERS,
    HEADS,
    LAYERS,
    LENGTH,
    TEXT_ENCODERS,
    WORDS,
    bert,
    encoder,
    hidden,
    inputs,
    register,
    save_bert,
)

NAMES = list(huggingface.available().values())


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    register(budget=5)
    yield
    huggingface.unregister()


def sketched(name: str, implementation: str = "skein") -> Any:
    model = encoder(name)
    model.set_attn_implementation(implementation)
    return model


def padding(where: str, n: int = LENGTH) -> Tensor:
    """Two examples, one of them padded: (2, n), 1 = real."""
    mask = torch.ones(2, n, dtype=torch.long)
    place = {"right": slice(n - 9, n), "left": slice(0, 9), "middle": slice(6, 15)}[where]
    mask[1, place] = 0
    return mask


def gradients(model: Any, given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Of a fixed linear function of the last hidden state with respect to each weight that it depends on."""
    model.zero_grad()
    state = model(**given, **options).last_hidden_state
    weight = torch.randn(state.shape, generator=torch.Generator().manual_seed(2)).to(state.dtype)
    if (mask := options.get("attention_mask")) is not None:
        weight = weight * mask[..., None]
    (state * weight).sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("name", ENCODERS)
def test_layers_are_sketched_and_the_output_says_so(name: str) -> None:
    given = inputs(name)
    exact = hidden(encoder(name), given)
    model = sketched(name)
    with huggingface.watch() as counts:
        output = hidden(model, given)
    assert counts["sketched"] == ENCODERS[name].sketched
    assert output.isfinite().all()
    assert (output - exact).abs().max() > 1e-3
    # the estimate improves with d, and with as many samples as keys there is nothing left to sketch
    register(budget=LENGTH - 4)
    assert (hidden(model, given) - exact).norm() < (output - exact).norm()
    register(budget=64)
    with huggingface.watch() as counts:
        assert_close(hidden(model, given), exact)
    assert counts["sketched"] == 0
    assert counts["no more keys than the budget"] == ENCODERS[name].sketched


@pytest.mark.parametrize("where", ["right", "left", "middle"])
@pytest.mark.parametrize("name", TEXT_ENCODERS)
def test_what_stands_in_padding_changes_nothing(name: str, where: str) -> None:
    given, mask = inputs(name), padding(where)
    other = {"input_ids": given["input_ids"].where(mask.bool(), 7)}
    model, real = sketched(name), mask.bool()
    output = hidden(model, given, attention_mask=mask)
    assert_close(output[real], hidden(model, other, attention_mask=mask)[real])
    assert not torch.allclose(output[real], hidden(model, given)[real], atol=1e-3)
    # as many samples as real keys, fewer than keys: the sketch is exact
    register(budget=LENGTH - 9)
    exact = hidden(encoder(name), given, attention_mask=mask)
    with huggingface.watch() as counts:
        output = hidden(model, given, attention_mask=mask)
    assert counts["sketched"] == ENCODERS[name].sketched
    assert_close(output[1][real[1]], exact[1][real[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", ["skein", "skein-cluster"])
def test_neither_right_padding_nor_batch_mates_change_a_result(implementation: str) -> None:
    model, given = sketched("bert", implementation), inputs("bert")["input_ids"]
    mask = torch.ones(2, LENGTH + 8, dtype=torch.long)
    mask[:, LENGTH:] = 0
    longer = {"input_ids": torch.cat([given, given[:, :8]], 1)}
    alone = hidden(model, {"input_ids": given[:1]})
    assert_close(hidden(model, longer, attention_mask=mask)[:1, :LENGTH], alone)
    assert_close(hidden(model, {"input_ids": given})[:1], alone)


@pytest.mark.parametrize("implementation", ["skein", "skein-cluster"])
def test_left_padding_changes_the_draw_and_not_the_quality(implementation: str) -> None:
    """A BERT without positions: all that left padding can change is the noise."""
    model, tokens = encoder("bert"), inputs("bert", b=16)["input_ids"]
    model.embeddings.position_embeddings.weight.data.zero_()
    pad = 13
    given = {"input_ids": torch.cat([tokens[:, :pad], tokens], 1)}
    mask = torch.ones_like(given["input_ids"])
    mask[:, :pad] = 0
    exact = hidden(model, {"input_ids": tokens})
    model.set_attn_implementation(implementation)

    def both() -> tuple[Tensor, Tensor]:
        alone = hidden(model, {"input_ids": tokens})
        return alone, hidden(model, given, attention_mask=mask)[:, pad:]

    alone, padded = both()
    errors = [float((output - exact).norm() / exact.norm()) for output in (alone, padded)]
    change = float((padded - alone).norm() / exact.norm())
    assert change > 0.2 * errors[0]
    assert 0.7 < errors[1] / errors[0] < 1.4
    register(budget=LENGTH)  # as many samples as real keys: nothing is drawn
    alone, padded = both()
    assert_close(padded, alone, rtol=1e-4, atol=1e-4)
    assert_close(padded, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_gradients_flow_and_are_exact_where_the_output_is(name: str) -> None:
    given = inputs(name)
    mask = {} if name == "vit" else {"attention_mask": padding("middle")}
    expected, rough = gradients(encoder(name), given, **mask), gradients(sketched(name), given, **mask)
    assert rough.keys() == expected.keys()
    assert all(x.isfinite().all() for x in rough.values())
    if mask:
        given, mask = {"input_ids": given["input_ids"][1:]}, {"attention_mask": mask["attention_mask"][1:]}
        register(budget=LENGTH - 9)
        expected, found = gradients(encoder(name), given, **mask), gradients(sketched(name), given, **mask)
        for weight, gradient in found.items():
            assert_close(gradient, expected[weight], rtol=1e-3, atol=1e-3 * float(expected[weight].abs().max()) + 1e-5)


def test_a_seed_makes_evaluation_deterministic_and_training_draws_anew() -> None:
    model, given = sketched("bert"), inputs("bert")
    assert torch.equal(hidden(model, given), hidden(model, given))
    assert not torch.equal(hidden(model, given), hidden(model, given, seed=3))
    assert torch.equal(hidden(model, given, seed=3), hidden(model, given, seed=3))
    first = hidden(model.train(), given)
    assert not torch.equal(first, hidden(model, given))
    torch.manual_seed(5)
    first = hidden(model, given)
    torch.manual_seed(5)
    assert torch.equal(first, hidden(model, given))
    register(budget=5, seed=None)
    assert not torch.equal(hidden(model.eval(), given), hidden(model, given))


def test_layers_that_know_their_number_draw_apart() -> None:
    q = torch.randn(1, HEADS, LENGTH, 8)
    forward = AttentionInterface._global_mapping["skein"]
    first, second = (torch.nn.Module().eval() for _ in range(2))
    first.is_causal = second.is_causal = False
    assert torch.equal(forward(first, q, q, q, None)[0], forward(second, q, q, q, None)[0])
    second.layer_idx = 1
    assert not torch.equal(forward(first, q, q, q, None)[0], forward(second, q, q, q, None)[0])


@pytest.mark.parametrize("implementation", ["skein", "skein-cluster", "skein-performer"])
def test_gradient_checkpointing_draws_the_same_again(implementation: str) -> None:
    given, mask = inputs("bert"), padding("left")
    model = sketched("bert", implementation).train()
    torch.manual_seed(3)
    expected = gradients(model, given, attention_mask=mask)
    model.gradient_checkpointing_enable()
    torch.manual_seed(3)
    with huggingface.watch() as counts:
        found = gradients(model, given, attention_mask=mask)
    assert counts["sketched"] == 2 * LAYERS  # a second time in the backward pass
    for name, gradient in found.items():
        assert_close(gradient, expected[name])
    torch.manual_seed(4)
    other = gradients(model, given, attention_mask=mask)
    assert any(not torch.allclose(other[name], expected[name], rtol=1e-2) for name in other)


@pytest.mark.parametrize("implementation", ["skein", pytest.param("skein-cluster", marks=pytest.mark.slow)])
def test_one_compiled_graph_that_follows_the_settings(implementation: str) -> None:
    torch._dynamo.reset()
    model, given, mask = sketched("bert", implementation), inputs("bert"), padding("middle")
    model.encoder.layer = model.encoder.layer[:1]
    backend = Backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_close(hidden(compiled, given, attention_mask=mask), hidden(model, given, attention_mask=mask))
    assert_close(hidden(compiled, given, attention_mask=padding("left"))[0], hidden(model, given)[0])
    assert backend.compilations == 1
    register(budget=9)
    assert_close(hidden(compiled, given, attention_mask=mask), hidden(model, given, attention_mask=mask))
    assert backend.compilations == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bert", "eurobert"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    model, given, mask = sketched(name), inputs(name), padding("right")
    register(budget=LENGTH - 9)
    wide = hidden(model, given, attention_mask=mask)
    half = hidden(copy.deepcopy(model).to(dtype), given, attention_mask=mask)
    assert half.dtype == dtype
    assert_close(half[1, : LENGTH - 9].float(), wide[1, : LENGTH - 9], rtol=0.1, atol=0.2)
    with torch.autocast("cpu", dtype):
        mixed = hidden(model, given, attention_mask=mask)
    assert_close(mixed[1, : LENGTH - 9].float(), wide[1, : LENGTH - 9], rtol=0.1, atol=0.2)


def test_grouped_heads_are_those_of_repeated_keys() -> None:
    b, n, p = 2, 20, 8
    q = torch.randn(b, 6, n, p, requires_grad=True)
    k, v = (torch.randn(b, 2, n, p, requires_grad=True) for _ in range(2))
    mask = torch.arange(n) < torch.tensor([[20], [13]])
    layer = torch.nn.Module()
    layer.is_causal = False
    forward = AttentionInterface._global_mapping["skein-nystromformer"]
    found, weights = forward(layer, q, k, v, mask, scaling=0.2)
    method = build("nystromformer", head_dim=p, budget=5, scale=0.2)
    repeated = [x.repeat_interleave(3, 1) for x in (k, v)]
    expected = method(q, *repeated, key_mask=mask, query_mask=mask).transpose(1, 2)
    assert weights is None
    assert found.is_contiguous()
    assert_close(found, expected)
    upstream = torch.randn(found.shape)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        assert_close(ours, theirs)


def test_the_scale_is_the_models() -> None:
    q = torch.randn(1, 2, 12, 8)
    layer = torch.nn.Module().eval()
    layer.is_causal = False
    forward = AttentionInterface._global_mapping["skein"]
    for scale in (0.1, 1.0, None):
        expected = build("skeinformer", head_dim=8, budget=5, scale=scale, seed=0).eval()(q, q, q)
        assert_close(forward(layer, q, q, q, None, scaling=scale)[0], expected.transpose(1, 2))


@pytest.mark.parametrize("implementation", NAMES)
def test_every_name_runs_with_padding_and_gradients(implementation: str) -> None:
    register(budget=8)
    model, given, mask = sketched("bert", implementation), inputs("bert"), padding("middle")
    with huggingface.watch() as counts:
        found = gradients(model, given, attention_mask=mask)
    assert counts == {"sketched": LAYERS}
    assert all(x.isfinite().all() for x in found.values())


# ViT's, BART's and the others' attention gets what the model is called with
@pytest.mark.parametrize("name", ENCODERS)
def test_options_by_keyword_at_the_call(name: str) -> None:
    model, given = sketched(name), inputs(name)
    few, more = hidden(model, given), hidden(model, given, budget=12)
    assert not torch.allclose(few, more, atol=1e-3)
    assert torch.equal(few, hidden(model, given))
    register(budget=12)
    assert torch.equal(more, hidden(model, given))
    pilots = hidden(model, given, num_pilots=3)
    register(budget=12, num_pilots=3)
    assert torch.equal(pilots, hidden(model, given))


def test_dropout_is_ignored_with_one_warning() -> None:
    model, given = bert(attention_probs_dropout_prob=0.5), inputs("bert")
    model.set_attn_implementation("skein")
    hidden(model.eval(), given)
    with pytest.warns(UserWarning, match=r"'skein' has no attention dropout: the model's 0\.5 is ignored"):
        hidden(model.train(), given)
    hidden(model, given)  # a second warning would be an error
    torch.manual_seed(0)
    first = hidden(model, given, budget=LENGTH - 1, num_pilots=LENGTH)  # all rows are pilots, exact
    assert_close(first, hidden(model.eval(), given, budget=LENGTH), rtol=1e-4, atol=1e-4)


def test_attention_weights_are_refused() -> None:
    model, given = sketched("bert"), inputs("bert")
    with pytest.raises(ValueError, match=r"'skein' forms no attention weights to return; use 'eager'"):
        hidden(model, given, output_attentions=True)
    with pytest.raises(ValueError, match=r"`output_attentions` attribute is not supported"):
        model.config.output_attentions = True


def test_names_and_what_is_left_out() -> None:
    assert register() == tuple(NAMES)
    assert {"skein", "skein-cluster", "skein-performer", "skein-skeinformer_uniform"} < set(NAMES)
    left = {method: reason for method in METHODS if (reason := huggingface.left_out(method))}
    assert left.keys() == {
        "softmax",
        "softmax_dropout",
        "sketched",
        "linformer",
        "linformer_jlt",
        "reformer",
        "skeinformer_no_norm",
    }
    for method, words in (("reformer", "shares queries"), ("linformer", "parameters"), ("sketched", "quadratic")):
        assert words in left[method]
        with pytest.raises(ValueError, match=f"{method!r} cannot stand in for a model's attention: it "):
            register(method)


def test_one_method_is_set_apart_from_the_others() -> None:
    model, given = sketched("bert"), inputs("bert")
    before = hidden(model, given)
    assert register("cluster", budget=7, num_steps=2) == ("skein-cluster",)
    assert torch.equal(before, hidden(model, given))
    model.set_attn_implementation("skein-cluster")
    seven = hidden(model, given)
    register("cluster", budget=7, num_steps=0)
    assert not torch.equal(seven, hidden(model, given))
    assert torch.equal(seven, hidden(model, given, num_steps=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pilot": 3}, "register has no option 'num_pilot'; did you mean 'num_pilots'"),
        ({"method": "performer", "num_pilots": 3}, "attention 'performer' has no option 'num_pilots'"),
        ({"method": "skeinfromer"}, "unknown attention 'skeinfromer'; did you mean 'skeinformer'"),
        ({"budget": 0}, "budget must be at least 1"),
        ({"scale": 1.0}, "register takes no 'scale' here"),
        ({"columns": "best"}, "columns='best' is not known"),
        ({"seed": 1.5}, "seed must be an integer or None"),
        ({"decoder_cross_attention": 1}, "decoder_cross_attention must be True or False"),
        (
            {"method": "nystromformer", "conv_kernel": 3, "num_heads": 4},
            "adds parameters, which the model was not trained with",
        ),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        register(**options)


def test_sentence_transformers(tmp_path: Path) -> None:
    """Through `model_kwargs`, the way SentenceTransformer hands arguments to transformers."""
    package = pytest.importorskip("sentence_transformers", reason="not installed")
    save_bert(tmp_path)
    whole = package.SentenceTransformer(str(tmp_path), model_kwargs={"attn_implementation": "skein"}, device="cpu")
    with huggingface.watch() as counts:
        whole.encode([" ".join(WORDS[:20]), " ".join(WORDS[20:50])])
    assert counts["sketched"] == LAYERS


@pytest.mark.parametrize("min_length", [0, "auto"])
def test_second_derivatives_say_what_to_do(min_length: Any) -> None:
    """Of sketched layers and of those that are exact; what is said works."""
    register(budget=5, min_length=min_length)
    model = sketched("bert")
    state = model.embeddings(**inputs("bert")).detach().requires_grad_()

    def penalty() -> Tensor:
        output = model(inputs_embeds=state).last_hidden_state
        (first,) = torch.autograd.grad(output.square().sum(), state, create_graph=True)
        return first.square().sum()

    with pytest.raises(RuntimeError, match=r"create_graph=False, or use exact attention .*'sdpa'.*SDPBackend\.MATH"):
        penalty()
    model.set_attn_implementation("sdpa")
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.grad(penalty(), state)[0].abs().sum() > 0
