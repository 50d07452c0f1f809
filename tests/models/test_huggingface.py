"""Hugging Face encoders with `attn_implementation="skein"`: really sketched, right with padding, in every mode."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")

from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing import assert_close
from transformers import AttentionInterface, AttentionMaskInterface

from skeinformer import METHODS
from skeinformer.models import huggingface
from skeinformer.models.policy import SLOWER, unsuitable_reason
from tests.models.hf_models import (
    ENCODERS,
    HEADS,
    LAYERS,
    LENGTH,
    TEXT_ENCODERS,
    encoder,
    forward,
    hidden,
    inputs,
    layer,
    register,
    sketched,
)

SUITABLE = [method for method in METHODS if unsuitable_reason(method) is None and METHODS[method].exact_from != 0]


@pytest.fixture(autouse=True)
def _default_policy() -> Iterator[None]:
    register(budget=5)
    yield
    huggingface.register()


def padding(where: str, n: int = LENGTH) -> Tensor:
    """Two examples, one of them padded: (2, n), 1 = real."""
    mask = torch.ones(2, n, dtype=torch.long)
    place = {"right": slice(n - 9, n), "left": slice(0, 9), "middle": slice(6, 15)}[where]
    mask[1, place] = 0
    return mask


def gradients(model: Any, given: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Gradients of a fixed linear function of the last hidden state with respect to the weights."""
    model.zero_grad()
    state = model(**given, **options).last_hidden_state
    weight = torch.randn(state.shape, generator=torch.Generator().manual_seed(2)).to(state.dtype)
    if (mask := options.get("attention_mask")) is not None:
        weight = weight * mask[..., None]
    (state * weight).sum().backward()
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def test_the_import_registers_one_name_with_the_default_method() -> None:
    for mapping in (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping):
        assert [name for name in mapping if name.startswith("skein")] == ["skein"]
    policy = huggingface.register()
    assert (policy.method, policy.budget, policy.seed, policy.min_length) == ("adaptive", None, 0, "auto")
    register()
    given = inputs("bert")
    expected = hidden(sketched(), given)
    register("cluster", budget=16)
    assert torch.equal(hidden(sketched(), given), expected)


@pytest.mark.parametrize("name", ENCODERS)
def test_layers_are_sketched_and_the_output_shows_it(name: str) -> None:
    given = inputs(name)
    exact = hidden(encoder(name), given)
    model = sketched(name)
    with huggingface.watch() as counts:
        output = hidden(model, given)
    assert counts["sketched"] == ENCODERS[name].sketched
    assert output.isfinite().all()
    assert (output - exact).abs().max() > 1e-3
    # the error falls with d, and with as many clusters as keys nothing is left to sketch
    register(budget=LENGTH - 4)
    assert (hidden(model, given) - exact).norm() < (output - exact).norm()
    register(budget=64)
    with huggingface.watch() as counts:
        assert_close(hidden(model, given), exact)
    assert counts["sketched"] == 0
    assert counts["no more keys than the budget"] == ENCODERS[name].sketched


@pytest.mark.parametrize("where", ["right", "left", "middle"])
@pytest.mark.parametrize("name", TEXT_ENCODERS)
def test_the_content_of_padding_changes_nothing(name: str, where: str) -> None:
    given, mask = inputs(name), padding(where)
    other = {"input_ids": given["input_ids"].where(mask.bool(), 7)}
    model, real = sketched(name), mask.bool()
    output = hidden(model, given, attention_mask=mask)
    assert_close(output[real], hidden(model, other, attention_mask=mask)[real])
    assert not torch.allclose(output[real], hidden(model, given)[real], atol=1e-3)
    # as many samples as real keys, fewer than keys: the sketch is exact
    register("skeinformer", budget=LENGTH - 9)
    exact = hidden(encoder(name), given, attention_mask=mask)
    with huggingface.watch() as counts:
        output = hidden(model, given, attention_mask=mask)
    assert counts["sketched"] == ENCODERS[name].sketched
    assert_close(output[1][real[1]], exact[1][real[1]], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ENCODERS)
def test_gradients_flow_and_are_exact_where_the_output_is(name: str) -> None:
    given = inputs(name)
    mask = {} if name == "vit" else {"attention_mask": padding("middle")}
    expected, rough = gradients(encoder(name), given, **mask), gradients(sketched(name), given, **mask)
    assert rough.keys() == expected.keys()
    assert all(x.isfinite().all() for x in rough.values())
    if mask:
        given, mask = {"input_ids": given["input_ids"][1:]}, {"attention_mask": mask["attention_mask"][1:]}
        register("skeinformer", budget=LENGTH - 9)
        expected, output = gradients(encoder(name), given, **mask), gradients(sketched(name), given, **mask)
        for weight, gradient in output.items():
            assert_close(gradient, expected[weight], rtol=1e-3, atol=1e-3 * float(expected[weight].abs().max()) + 1e-5)


@pytest.mark.parametrize("method", ["cluster", "skeinformer", "performer"])
def test_gradient_checkpointing_draws_the_same_again(method: str) -> None:
    register(method, budget=5)
    given, mask = inputs("bert"), padding("left")
    model = sketched().train()
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


@pytest.mark.parametrize("of_the_model", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_one_compiled_graph_that_follows_the_policy(of_the_model: bool) -> None:
    torch._dynamo.reset()
    model, given, mask = sketched(), inputs("bert"), padding("middle")

    def set_policy(budget: int) -> None:
        if of_the_model:
            huggingface.sketch(model, budget=budget, min_length=0)
        else:
            register(budget=budget)

    set_policy(5)
    model.encoder.layer = model.encoder.layer[:1]
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    assert_close(hidden(compiled, given, attention_mask=mask), hidden(model, given, attention_mask=mask))
    assert_close(hidden(compiled, given, attention_mask=padding("left"))[0], hidden(model, given)[0])
    assert backend.frame_count == 1
    set_policy(9)
    assert_close(hidden(compiled, given, attention_mask=mask), hidden(model, given, attention_mask=mask))
    assert backend.frame_count == 2


@pytest.mark.slow
def test_one_exported_program_for_all_lengths() -> None:
    model, n = sketched(), torch.export.Dim("n", min=8, max=90)
    short, long = ({**inputs("bert", n=k), "attention_mask": torch.ones(2, k, dtype=torch.long)} for k in (LENGTH, 30))
    with torch.no_grad():
        shapes = {"input_ids": {1: n}, "attention_mask": {1: n}}
        program = torch.export.export(model, (), kwargs=short, dynamic_shapes=shapes).module()
        for given in (short, long):
            assert_close(program(**given).last_hidden_state, hidden(model, given), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["bert", "eurobert"])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    model, given, mask = sketched(name), inputs(name), padding("right")
    register("skeinformer", budget=LENGTH - 9)
    wide = hidden(model, given, attention_mask=mask)
    half = hidden(copy.deepcopy(model).to(dtype), given, attention_mask=mask)
    assert half.dtype == dtype
    assert_close(half[1, : LENGTH - 9].float(), wide[1, : LENGTH - 9], rtol=0.1, atol=0.2)
    with torch.autocast("cpu", dtype):
        mixed = hidden(model, given, attention_mask=mask)
    assert_close(mixed[1, : LENGTH - 9].float(), wide[1, : LENGTH - 9], rtol=0.1, atol=0.2)


@pytest.mark.parametrize("method", SUITABLE)
def test_every_method_runs_with_padding_and_gradients(method: str) -> None:
    register(method, budget=8)
    with huggingface.watch() as counts:
        found = gradients(sketched(), inputs("bert"), attention_mask=padding("middle"))
    assert counts == {SLOWER if method == "adaptive" else "sketched": LAYERS}
    assert all(x.isfinite().all() for x in found.values())


def test_attention_weights_are_refused() -> None:
    model = sketched()
    with pytest.raises(ValueError, match=r"'skein' forms no attention weights to return; use 'eager'"):
        hidden(model, inputs("bert"), output_attentions=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pilot": 3}, "attention 'cluster' has no option 'num_pilot'; did you mean 'num_pilots'"),
        ({"method": "reformer"}, "'reformer' cannot replace .*: it uses the same vectors as queries and keys"),
    ],
)
def test_wrong_options_are_named_and_change_nothing(options: dict[str, Any], message: str) -> None:
    model, given = sketched(), inputs("bert")
    expected = hidden(model, given)
    with pytest.raises((TypeError, ValueError), match=message):
        register(**options)
    with pytest.raises((TypeError, ValueError), match=message):
        huggingface.sketch(model, **options)
    assert torch.equal(hidden(model, given), expected)


@pytest.mark.parametrize("min_length", [0, "auto"])
def test_second_derivatives_raise_with_advice_that_works(min_length: Any) -> None:
    """In sketched layers and in those that are exact."""
    register(budget=5, min_length=min_length)
    model = sketched()
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


def test_layers_of_different_numbers_draw_apart() -> None:
    register("skeinformer", budget=5)
    q = torch.randn(1, HEADS, LENGTH, 8)
    assert torch.equal(forward(layer(), q, q, q, None), forward(layer(), q, q, q, None))
    assert not torch.equal(forward(layer(), q, q, q, None), forward(layer(layer_idx=1), q, q, q, None))
