"""The frame of every attention: methods as frozen dataclasses, one certificate, functions, second derivatives."""

import copy
import inspect
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skeinformer import METHODS, build, cluster_attention, skein_attention
from skeinformer.attention import Attention, Method
from skeinformer.attention.base import run
from skeinformer.attention.certificate import certify
from skeinformer.attention.inputs import prepare
from skeinformer.attention.operation import from_spec, spec_of
from skeinformer.attention.sketch_method import SketchMethod
from skeinformer.kernels.choice import NO_SECOND_DERIVATIVE
from skeinformer.noise import from_generator
from tests.helpers import (
    SHARED_QK,
    VARIANTS,
    dense_exact,
    draw,
    generator,
    inputs_for,
    masks_for,
    random_mask,
    relative_error,
    tensors,
)

every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
def test_a_method_is_a_frozen_dataclass_of_its_options(name: str) -> None:
    entry, options = METHODS[VARIANTS[name].method], VARIANTS[name].options
    module = VARIANTS[name].build(budget=7, seed=3)
    method = module.method
    assert type(method) is entry.method
    assert is_dataclass(method)
    with pytest.raises(FrozenInstanceError):
        method.budget = 8
    names = {field.name for field in fields(method)}
    if "sketch_options" not in names:  # a sketch has options of its own, which go into this field
        assert names == set(entry.option_names())
    assert module.method.budget == 7
    for option, value in {**entry.options, **options}.items():
        assert getattr(method, option) == value
    assert not names & {"head_dim", "max_len", "seed", "scale", "group"}
    assert method == copy.deepcopy(method)
    assert hash(method) == hash(copy.deepcopy(method))


@every_variant
def test_a_method_survives_as_text(name: str) -> None:
    """A graph holds it as a constant; its repr is the call that builds it."""
    method = VARIANTS[name].build(budget=7).method
    assert from_spec(spec_of(method)) == method
    assert eval(repr(method), {type(method).__name__: type(method)}) == method


def test_integers_of_numpy_survive_as_text() -> None:
    method = build("cluster", head_dim=4, budget=np.int64(7)).method
    assert from_spec(spec_of(method)) == method


@pytest.mark.parametrize(("function", "name"), [(skein_attention, "skeinformer"), (cluster_attention, "cluster")])
def test_function_and_module_share_their_options(function: Any, name: str) -> None:
    parameters = inspect.signature(function).parameters
    for field in fields(METHODS[name].method):
        assert parameters[field.name].default == field.default
    q, k, v = tensors(1, 2, 30)
    module = build(name, head_dim=4)
    assert torch.equal(function(q, k, v, generator=generator(0)), module(q, k, v, generator=generator(0)))
    with pytest.raises(TypeError, match="unexpected keyword argument 'num_samples'"):
        function(q, k, v, num_samples=4)


@pytest.mark.parametrize(
    "method",
    [type("Empty", (kind,), {"__annotations__": {"budget": int}})(budget=4) for kind in (Method, SketchMethod)],
)
def test_a_method_without_mathematics_is_an_error(method: Method) -> None:
    q, k, v = tensors(1, 1, 5)
    with pytest.raises(TypeError, match="it does not define"):
        Attention(method, head_dim=4)(q, k, v)


@pytest.mark.parametrize(
    ("name", "size"),
    [("bigbird", "block_size"), ("longformer", "window"), ("sparse_transformer", "stride"), ("reformer", "chunk_size")],
)
def test_two_options_for_one_size_are_an_error(name: str, size: str) -> None:
    with pytest.raises(ValueError, match=f"budget=8 and {size}=2 both set the size"):
        build(name, head_dim=4, budget=8, **{size: 2})
    assert build(name, head_dim=4, **{size: 2}).method.budget_in_force is None
    assert build(name, head_dim=4, budget=8).method.budget_in_force == 8


def test_scale_and_seed_of_a_call_come_before_those_of_the_module() -> None:
    q, k, v = tensors(1, 2, 30)
    module = build("cluster", head_dim=4, budget=5, seed=1, scale=0.3)
    expected = build("cluster", head_dim=4, budget=5, seed=2, scale=0.7).eval()(q, k, v)
    for training in (False, True):
        assert torch.equal(module.train(training)(q, k, v, seed=2, scale=0.7), expected)


@every_variant
@pytest.mark.parametrize("training", [False, True])
def test_certify_returns_what_a_call_returns_and_an_error(name: str, training: bool) -> None:
    inputs = inputs_for(name, 2, 2, 40)
    module, mask = VARIANTS[name].build(budget=5, seed=3).train(training), random_mask(2, 40)
    masks = masks_for(name, mask, mask)

    def call(function: Any) -> Any:
        return function(*inputs, **masks, **({"generator": generator(1)} if training else {}))

    output, info = call(module.certify)
    assert torch.equal(output, call(module))
    assert info.error.shape == info.error_se.shape == info.error_upper.shape == (2, 2)
    assert info.error.isfinite().all()
    assert torch.equal(info.error, call(module.certify)[1].error)
    if METHODS[VARIANTS[name].method].exact_from == 0 and not training:
        assert info.error.max() < 1e-6


@pytest.mark.parametrize(
    "name", ["vmean", "performer", "nystromformer", "linformer", "informer", "bigbird", "cluster", "skeinformer"]
)
@pytest.mark.parametrize(("n", "masked"), [(64, False), (200, True)])
def test_the_draw_of_check_rows_is_independent_of_the_output(name: str, n: int, masked: bool) -> None:
    """One output, many draws of check rows: the mean square of the estimate is that of this output.

    Within four standard errors; in the cluster sketch also where most of the rows make the metric of the clusters.
    """
    q, k, v = (x.detach() for x in tensors(1, 2, n))
    mask = random_mask(1, n, share=0.9) if masked else None
    module = VARIANTS[name].build(budget=8, max_len=200)
    inputs = prepare(q, k, v, mask, mask)
    output, trace = run(module.attend, inputs, draw(module, q, k))
    rand = from_generator((1, 2), generator=generator(3))
    errors = [certify(inputs, output, trace.pilots, rand, 16).error for _ in range(100)]
    expected = dense_exact(q, k, v, mask)
    expected = expected if mask is None else expected.masked_fill(~mask[:, None, :, None], 0)
    ratio = torch.stack(errors).square() / relative_error(output, expected) ** 2
    assert ((ratio.mean(0) - 1).abs() < 4 * ratio.std(0) / 100**0.5 + 0.02).all()


def second_derivative(penalty: Any, x: Tensor) -> None:
    """Assert that the second derivative along a random direction is the difference quotient of the first."""
    (second,) = torch.autograd.grad(penalty(x), x)
    step, direction = 1e-6, torch.randn(x.shape, generator=generator(4), dtype=x.dtype)
    moved = [penalty((x + sign * step * direction).detach().requires_grad_()).item() for sign in (1, -1)]
    assert float((second * direction).sum()) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-4, abs=1e-5)


@every_variant
@pytest.mark.parametrize("which", ["query", "value"])
@pytest.mark.parametrize("masked", [False, True])
def test_second_derivatives_are_right_or_an_error(name: str, which: str, masked: bool) -> None:
    """Never zeros or a detached gradient without a word; of the query also where it is the key."""
    q, k, v = inputs_for(name, 1, 2, 30)
    module, mask = VARIANTS[name].build(budget=5), random_mask(1, 30)
    masks = masks_for(name, mask, mask) if masked else {}
    noise = draw(module, q, k)

    def penalty(x: Tensor) -> Tensor:
        query = x if which == "query" else q
        inputs = query, query if name in SHARED_QK else k, x if which == "value" else v
        (first,) = torch.autograd.grad(
            module(*inputs, noise=noise, **masks).square().sum(), x, create_graph=True, materialize_grads=True
        )
        return first.square().sum() + 0 * x.sum()

    refused = ""
    try:
        second_derivative(penalty, q if which == "query" else v)
    except RuntimeError as error:
        refused = str(error)
    assert refused in ("", NO_SECOND_DERIVATIVE)
