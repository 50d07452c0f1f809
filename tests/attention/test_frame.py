"""The frame: a method is one file and one row; `certify` for all; options once; check rows decide nothing."""

import inspect
import pickle
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from skeinformer import METHODS, build, cluster_attention, skein_attention
from skeinformer.attention.base import Attention, Trace, certificate
from skeinformer.attention.cluster import Cluster
from skeinformer.attention.inputs import Inputs, prepare
from skeinformer.attention.run import run
from skeinformer.attention.skein import Skeinformer
from skeinformer.kernels.choice import NO_SECOND_DERIVATIVE, plain_forms
from skeinformer.noise import from_generator
from tests.helpers import (
    EXACT,
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


@pytest.mark.parametrize("name", VARIANTS)
def test_certify_returns_what_a_call_returns_and_an_error(name: str) -> None:
    inputs = inputs_for(name, 2, 2, 40)
    module, mask = VARIANTS[name].build(budget=5, seed=3).eval(), random_mask(2, 40)
    masks = masks_for(name, mask, mask)
    output, info = module.certify(*inputs, **masks)
    assert torch.equal(output, module(*inputs, **masks))
    assert info.error.shape == info.error_se.shape == info.error_upper.shape == (2, 2)
    assert info.error.isfinite().all()
    again = module.certify(*inputs, **masks)[1]
    assert torch.equal(info.error, again.error)  # with a seed the check rows are the same too
    if name in EXACT and EXACT[name] == 0:
        assert info.error.max() < 1e-6


@pytest.mark.parametrize("name", ["vmean", "performer", "nystromformer", "linformer", "informer", "bigbird"])
def test_the_estimate_without_pilots_is_the_error(name: str) -> None:
    """The mean square over draws of check rows is that of all rows; here within four standard errors."""
    q, k, v = (x.detach() for x in tensors(1, 2, 200, p=4))
    module = VARIANTS[name].build(budget=16, max_len=200)
    noise = draw(module, q, k)
    squares = []
    for seed in range(60):
        torch.manual_seed(seed)
        # noise from a generator, then the check rows from the same: the output differs, so noise is given by copies
        output, info = module.certify(q, k, v, noise=noise) if noise is None else _with_checks(module, (q, k, v), noise)
        squares.append(info.error.square())
    truth = relative_error(output, dense_exact(q, k, v)).square()
    found = torch.stack(squares)
    spread = found.std(0) / len(squares) ** 0.5
    assert ((found.mean(0) - truth).abs() < 4 * spread + 0.02 * truth).all()


def _with_checks(module: Attention, inputs: tuple[Tensor, ...], noise: Any) -> tuple[Tensor, Any]:
    """`certify` with given noise and fresh check rows."""
    prepared = prepare(*inputs)
    output, trace = run(module.attend, prepared, noise)
    rand = from_generator(tuple(inputs[0].shape[:2]))
    return output, certificate(type(module), module.options, prepared, output, trace, rand, 32)


@pytest.mark.parametrize("n", [64, 200])
@pytest.mark.parametrize("masked", [False, True])
def test_the_draw_of_check_rows_is_independent_of_the_output(n: int, masked: bool) -> None:
    """One output, many draws of check rows: the mean square of the estimate is that of this output, also where the
    rows that made the metric of the clusters are most of all."""
    q, k, v = (x.detach().float() for x in tensors(1, 2, n, p=16))
    mask = random_mask(1, n, share=0.9) if masked else None
    module = build("cluster", head_dim=16, budget=8)
    prepared = prepare(q, k, v, mask, mask)
    output, trace = run(module.attend, prepared, draw(module, q, k))
    rand = from_generator((1, 2), generator=generator(3))
    infos = [certificate(type(module), module.options, prepared, output, trace, rand, 16) for _ in range(100)]
    expected = dense_exact(q, k, v, mask)
    expected = expected if mask is None else expected.masked_fill(~mask[:, None, :, None], 0)
    ratio = torch.stack([info.error for info in infos]).double().square() / relative_error(output, expected) ** 2
    assert ((ratio.mean(0) - 1).abs() < 4 * ratio.std(0) / 100**0.5 + 0.02).all()


@pytest.mark.parametrize(("function", "kind"), [(skein_attention, Skeinformer), (cluster_attention, Cluster)])
def test_function_and_module_share_their_options(function: Any, kind: type[Attention]) -> None:
    parameters = inspect.signature(function).parameters
    for option, default in kind.Options._field_defaults.items():
        assert parameters[option].default == default
    assert function.__doc__
    q, k, v = tensors(1, 2, 30)
    name = next(name for name, row in METHODS.items() if row.make is kind and not row.options)
    module = build(name, head_dim=4)
    torch.testing.assert_close(
        function(q, k, v, generator=generator(0)), module(q, k, v, generator=generator(0)), rtol=0, atol=0
    )
    for wrong in ("num_samples", "d"):
        with pytest.raises(TypeError, match=f"{function.__name__} has no option '{wrong}'; did you mean 'budget'"):
            function(q, k, v, **{wrong: 4})
    with pytest.raises(TypeError, match=f"{function.__name__} has no option 'seed'"):
        function(q, k, v, seed=4)
    assert pickle.loads(pickle.dumps(function)) is function


@pytest.mark.parametrize(
    ("name", "size"),
    [("bigbird", "block_size"), ("longformer", "window"), ("sparse_transformer", "stride"), ("reformer", "chunk_size")],
)
def test_two_names_for_one_size_are_an_error(name: str, size: str) -> None:
    with pytest.raises(ValueError, match=f"budget=8 and {size}=2 both set the size"):
        build(name, head_dim=4, budget=8, **{size: 2})
    build(name, head_dim=4, **{size: 2})


class ToyOptions(NamedTuple):
    """The options of the toy."""

    budget: int = 256
    power: float = 1.0


class Toy(Attention):
    """The mean of the first d values, times a power: a method of one file."""

    Options = ToyOptions

    @staticmethod
    def compute(inputs: Inputs, noise: None, options: ToyOptions) -> tuple[Tensor, Trace]:
        mean = inputs.value[..., : options.budget, :].mean(-2, keepdim=True)
        return options.power * mean.expand_as(inputs.query), Trace()


def test_a_method_of_one_file_works_in_the_frame() -> None:
    q, k, v = tensors(2, 2, 9)
    module = Toy(head_dim=4, budget=3, power=2.0)
    torch.testing.assert_close(module(q, k, v), 2 * v[:, :, :3].mean(2, keepdim=True).expand_as(q))
    assert module.certify(q, k, v)[1].error.shape == (2, 2)
    assert repr(module) == "Toy(head_dim=4, budget=3, power=2.0)"
    with pytest.raises(TypeError, match="Toy has no option 'powers'; did you mean 'power'"):
        Toy(head_dim=4, powers=2.0)


@pytest.mark.parametrize("name", VARIANTS)
def test_second_derivatives_are_right_or_an_error(name: str) -> None:
    """Never zeros or a detached gradient without a word."""
    inputs = tuple(x.requires_grad_() for x in dict.fromkeys(inputs_for(name, 1, 2, 30)))
    module = VARIANTS[name].build(budget=5)
    q, v = inputs[0], inputs[-1]
    k = q if len(inputs) == 2 else inputs[1]
    noise = draw(module, q, k)

    def penalty(value: Tensor) -> Tensor:
        output = module(q, k, value, noise=noise)
        (first,) = torch.autograd.grad(output.square().sum(), value, create_graph=True)
        return first.square().sum()

    second, refused = None, ""
    try:
        (second,) = torch.autograd.grad(penalty(v), v)
    except RuntimeError as error:
        refused = str(error)
    if second is None:
        assert refused == NO_SECOND_DERIVATIVE
        assert "create_graph=False" in refused
        assert "method='softmax'" in refused
        assert "sdpa_kernel(torch.nn.attention.SDPBackend.MATH)" in refused
        return
    step = 1e-5
    direction = torch.randn(v.shape, generator=generator(4), dtype=v.dtype)
    moved = [float(penalty((v + sign * step * direction).detach().requires_grad_())) for sign in (1, -1)]
    expected = (moved[0] - moved[1]) / (2 * step)
    assert float((second * direction).sum()) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_what_the_error_of_second_derivatives_says_works(masked: bool) -> None:
    q, k, v = (x.detach() for x in inputs_for("softmax", 1, 2, 30))
    mask = random_mask(1, 30) if masked else None
    module = build("softmax", head_dim=q.shape[-1])

    def penalty(query: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            output = module(query, k, v, key_mask=mask)
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        return first.square().sum()

    query = q.clone().requires_grad_()
    (second,) = torch.autograd.grad(penalty(query), query)
    step, direction = 1e-6, torch.randn(q.shape, generator=generator(4), dtype=q.dtype)
    moved = [penalty((q + sign * step * direction).requires_grad_()).item() for sign in (1, -1)]
    assert float((second * direction).sum()) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-5)


@pytest.mark.parametrize("name", sorted(SHARED_QK))
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_second_derivatives_of_shared_queries_are_right_or_an_error(name: str, plain: bool, masked: bool) -> None:
    """With respect to what is query and key at once, in both forms."""
    q, _, v = (x.detach() for x in inputs_for(name, 1, 2, 30))
    module, mask = VARIANTS[name].build(budget=5), random_mask(1, 30) if masked else None
    noise = draw(module, q, q)

    def penalty(query: Tensor) -> Tensor:
        output = module(query, query, v, noise=noise, **masks_for(name, mask, mask))
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        return first.square().sum()

    query = q.clone().requires_grad_()
    with plain_forms() if plain else nullcontext():
        if not plain:
            with pytest.raises(RuntimeError, match="no second derivative"):
                penalty(query)
            return
        (second,) = torch.autograd.grad(penalty(query), query)
        step, direction = 1e-6, torch.randn(q.shape, generator=generator(4), dtype=q.dtype)
        moved = [penalty((q + sign * step * direction).requires_grad_()).item() for sign in (1, -1)]
    assert float((second * direction).sum()) == pytest.approx((moved[0] - moved[1]) / (2 * step), rel=1e-5)
