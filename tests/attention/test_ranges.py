"""A method's output is finite whenever exact attention's is: any size of values, logits to 1e4, every precision."""

import math
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from skeinformer import build, cluster_attention, skein_attention
from skeinformer.kernels import loops, plain
from skeinformer.kernels.rows import log_row_norms, narrow
from tests.cases import cases
from tests.helpers import (
    DTYPES,
    SHARED_QK,
    VARIANTS,
    dense_exact,
    generator,
    gradients,
    inputs_for,
    random_mask,
    relative_error,
    tensors,
)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "name": draw(st.sampled_from(sorted(VARIANTS))),
        "dtype": draw(st.sampled_from(DTYPES)),
        "n": draw(st.sampled_from([3, 11, 40, 90])),
        "n_k": draw(st.sampled_from([7, 60])),
        "budget": draw(st.sampled_from([1, 5, 16])),
        "seed": draw(st.integers(0, 10**6)),
        "logits": 10 ** draw(st.floats(-2, 4)),
        "values": 10 ** draw(st.floats(-30, 30)),
        "uneven": draw(st.booleans()),
        "masked": draw(st.booleans()),
    }


def extreme_inputs(problem: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs whose largest logit and value are those of the problem, as far as the precision can hold them."""
    name, dtype, source = problem["name"], problem["dtype"], generator(problem["seed"])
    q, k, v = (x.detach() for x in inputs_for(name, 1, 2, problem["n"], problem["n_k"], seed=problem["seed"]))
    size = math.sqrt(problem["logits"] / (q @ k.mT / 2).abs().max())
    if problem["uneven"]:
        v = v * 10 ** (20 * torch.rand(v.shape[:3], generator=source, dtype=v.dtype) - 20)[..., None]
    limit = torch.finfo(dtype).max / 4
    v = (v * problem["values"]).clamp(-limit, limit).to(dtype)
    q = (q * size).to(dtype)
    return q, q if name in SHARED_QK else (k * size).to(dtype), v


def check_finite(problem: dict[str, Any]) -> None:
    q, k, v = extreme_inputs(problem)
    mask = random_mask(1, q.shape[2], problem["seed"]) if problem["masked"] and q.shape == k.shape else None
    masks = {"key_mask": mask, "query_mask": mask}
    assert build("softmax", head_dim=4)(q, k, v, **masks).isfinite().all()
    module = VARIANTS[problem["name"]].build(budget=problem["budget"]).eval()
    output, info = module.certify(q, k, v, generator=generator(problem["seed"]), **masks)
    assert output.isfinite().all()
    assert not any(x.isnan().any() for x in (info.error, info.error_se, info.error_upper))


# an exact output whose numbers are below the least normal one: the error was 0 times infinity
TINY = {"name": "cluster", "dtype": torch.bfloat16, "n": 3, "n_k": 7, "budget": 5, "seed": 680}
TINY |= {"logits": 1000.0, "values": 1e-22, "uneven": True, "masked": False}


@hypothesis_settings(max_examples=cases(60))
@given(problem=problems())
@example(problem=TINY)
def test_outputs_are_finite_where_those_of_exact_attention_are(problem: dict[str, Any]) -> None:
    check_finite(problem)


@pytest.mark.slow
@hypothesis_settings(max_examples=10_000)
@given(problem=problems())
def test_outputs_are_finite_in_ten_thousand_cases(problem: dict[str, Any]) -> None:
    check_finite(problem)


@pytest.mark.parametrize("size", [1e15, 1e30, 1e-15, 1e-30])
@pytest.mark.parametrize("attention", [cluster_attention, skein_attention])
def test_a_sketch_does_not_depend_on_the_unit_of_the_values(attention: Any, size: float) -> None:
    """Squares of the values leave float32: NaN, in the output and in the info. The error is that of the output."""
    q, k, v = (x.detach().float() for x in tensors(1, 2, 128, p=32))
    options: dict[str, Any] = {"budget": 16, "return_info": True, "num_checks": 128}
    expected, info_of_expected = attention(q, k, v, generator=generator(3), **options)
    output, info = attention(q, k, v * size, generator=generator(3), **options)
    torch.testing.assert_close(output / size, expected, rtol=1e-4, atol=1e-5)
    for name in ("error", "error_se", "error_upper"):
        torch.testing.assert_close(getattr(info, name), getattr(info_of_expected, name), rtol=1e-3, atol=0)
    truth = relative_error(expected, dense_exact(q, k, v))
    torch.testing.assert_close(info.error.double(), truth, rtol=1e-3, atol=0)
    if attention is skein_attention:
        torch.testing.assert_close(info.log_probability, info_of_expected.log_probability, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("steps", [loops, plain], ids=["loops", "plain"])
@pytest.mark.parametrize("n", [128, 1024])
def test_gradients_in_half_precision_at_large_logits(
    monkeypatch: pytest.MonkeyPatch, steps: ModuleType, n: int
) -> None:
    """A sum over all queries left the range of float16: dK and dV were NaN."""
    monkeypatch.setattr("skeinformer.attention.cluster.steps_for", lambda x: steps)
    q, k, v = (x.detach() for x in tensors(1, 2, n, p=64))
    inputs = tuple(x.half().requires_grad_() for x in (3000 * q, k, v))
    assert (inputs[0].double() @ inputs[1].double().mT / 8).abs().max() > 1e4
    output = cluster_attention(*inputs, generator=generator(3))
    assert all(x.isfinite().all() for x in (output, *gradients(output, inputs)))


def test_what_exceeds_half_precision_becomes_its_largest_number() -> None:
    x = torch.tensor([1e5, -1e5, 3.0], requires_grad=True)
    assert narrow(x, torch.float16).tolist() == [65504.0, -65504.0, 3.0]
    assert narrow(x, torch.float32) is x


def test_norms_of_moderate_rows_are_those_of_torch_to_the_bit() -> None:
    x = torch.randn(2, 3, 50, 8, generator=generator())
    norms = log_row_norms(x, torch.float32)
    assert torch.equal(norms, x.norm(dim=-1).log())
    for size in (1e30, 1e-30):
        torch.testing.assert_close(log_row_norms(x * size, torch.float32), norms + math.log(size), rtol=1e-5, atol=0)


@pytest.mark.parametrize("options", [{}, {"first_order": False}], ids=str)
@pytest.mark.parametrize("size", [2.0**60, 2.0**66, 2.0**83])
def test_large_gradients_of_the_output_give_finite_ones_at_large_logits(size: float, options: dict[str, Any]) -> None:
    """Keys that no pilot sees have a mass of 1e-20, by which the gradients of their means are divided.

    Powers of two: scores of 1e3 have errors of 1e-4, and other factors would round differently.
    """
    for seed in range(10):
        source = generator(seed)
        q, k, v = (torch.randn(1, 1, 40, 4, generator=source) for _ in range(3))
        inputs = [x.requires_grad_() for x in (1250 * q, k, v)]
        upstream = torch.randn(1, 1, 40, 4, generator=source)
        exact = torch.autograd.grad(torch.nn.functional.scaled_dot_product_attention(*inputs), inputs, size * upstream)
        assert all(x.isfinite().all() for x in exact)
        results = [
            torch.autograd.grad(
                cluster_attention(*inputs, budget=8, generator=generator(seed), **options), inputs, by * upstream
            )
            for by in (1.0, size)
        ]
        assert all(x.isfinite().all() for x in results[1])
        # linear in the gradient of the output; those of queries and keys are rounding where one key has all of a row
        torch.testing.assert_close(results[1][2] / size, results[0][2], rtol=1e-4, atol=1e-4)
