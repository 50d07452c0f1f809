"""The one call of the fused kernel: which it is, and weights that the keys carry, for their numbers."""

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from skeinformer.kernels import fused
from skeinformer.kernels.choice import only_math_backend, statistics_dtype
from skeinformer.kernels.fused import (
    Route,
    attend,
    attend_backward,
    attend_unfused,
    attend_where,
    attend_with_lse,
    route,
    split_digits,
)
from tests.helpers import DTYPES, generator

PAGE = Path(__file__).parents[2] / "docs" / "devices.md"
HALF = [torch.bfloat16, torch.float16]


def table() -> list[dict[str, str]]:
    """The rows of the page's first table, by the names of its columns."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]


def test_the_table_in_the_docs_is_the_function() -> None:
    seen = set()
    for row in table():
        weights, columns = re.fullmatch(r"(\w+)(?:, (\d))?", row["weights go as"]).groups()  # type: ignore[union-attr]
        kernel = list(row.values())[-1]
        for name in row["precision"].split(", "):
            dtype, weighted = getattr(torch, name), row["weights"] == "yes"
            chosen = route(row["device"], dtype, int(row["p"]), int(row["p_v"]), weighted)
            infinite = row["empty slot"] == "-inf" or (not weighted and row["device"] == "cpu")
            expected = Route(weights, int(columns or 0), int(row["width"]), kernel, infinite)  # type: ignore[arg-type]
            assert chosen == expected, row
            seen.add((row["device"], dtype, weighted))
    assert seen == {(device, dtype, x) for device in ("cpu", "cuda", "mps") for dtype in DTYPES for x in (True, False)}


def test_the_call_depends_on_nothing_but_its_arguments() -> None:
    """Every value is reached, and old GPUs get what they have."""
    every = [
        route(device, dtype, p, p_v, weighted)
        for device in ("cpu", "cuda", "mps")
        for dtype in DTYPES
        for p, p_v in ((4, 4), (64, 32), (254, 300))
        for weighted in (True, False)
    ]
    for name in ("weights", "kernel"):
        assert {getattr(x, name) for x in every} == set(get_args(Route.__annotations__[name]))
    assert route("cuda", torch.float16, 64, 64, True, recent=False).kernel == "efficient"
    assert route("cuda", torch.bfloat16, 64, 64, True, recent=False).kernel == "scores"


@pytest.fixture
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are prepared as on CUDA, for the CPU's kernel."""

    def route_of(query: Tensor, values: Tensor, log_weight: Tensor | None) -> Route:
        chosen = route("cuda", query.dtype, query.shape[-1], values.shape[-1], log_weight is not None)
        return chosen._replace(kernel="cpu")

    kernel = fused._attend_on_cpu

    def attend_on_cuda(
        query: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        call = fused._kernel_inputs(query, keys, values, log_weight, scale, route_of(query, values, log_weight))
        mask = None if call.mask is None else call.mask[..., 0, :]
        output, lse = kernel(call.query, call.keys, call.values, mask, call.scale)
        output, lse = fused._to_caller(output, query, values, call), lse.reshape(query.shape[:-1])
        return output, lse if call.empty is None else lse.masked_fill(call.empty, 0)

    monkeypatch.setattr(fused, "route_of", route_of)
    monkeypatch.setattr(fused, "_attend_on_cpu", attend_on_cuda)


def weighted(dtype: torch.dtype, n: int = 300, m: int = 65, p: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and log weights as a cluster sketch has them: from -4 to 9, some slots empty."""
    q, k, v = (torch.randn(2, 3, size, p, generator=generator(i)).to(dtype) for i, size in enumerate((n, m, m)))
    log_weight = torch.rand(2, 3, m, generator=generator(3)) * 13 - 4
    return q, k, v, log_weight.masked_fill(torch.rand(2, 3, m, generator=generator(4)) < 0.2, -math.inf)


def error(x: Tensor, truth: Tensor) -> float:
    return float((x.detach().double() - truth.detach()).norm() / truth.detach().norm())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_weights_in_columns_are_as_good_as_a_float32_mask(request: pytest.FixtureRequest, dtype: torch.dtype) -> None:
    """Values, logs of row sums, and gradients; a mask rounded to the precision of the query is several times worse."""
    q, k, v, log_weight = weighted(dtype)
    upstream = torch.randn(q.shape, generator=generator(5))

    def results(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        output, lse = attend_with_lse(*inputs, weight, 0.25)
        torch.testing.assert_close(attend(*inputs, weight, 0.25), output, rtol=0, atol=0)
        return [output, lse, *torch.autograd.grad(output, inputs, upstream.to(output.dtype))]

    truth = results(*(x.double() for x in (q, k, v, log_weight)))
    masked, rounded = results(q, k, v, log_weight), results(q, k, v, log_weight.to(dtype).float())
    request.getfixturevalue("_as_on_cuda")
    ours = results(q, k, v, log_weight)
    for x, y, z, exact in zip(ours, masked, rounded, truth, strict=True):
        assert x.dtype == y.dtype
        assert error(x, exact) < 1.1 * error(y, exact) + 1e-6
        assert error(z, exact) > 2 * error(x, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [0.125, 1.0, 300.0, 2.0**-14, 0.0, -0.5])
@pytest.mark.usefixtures("_as_on_cuda")
def test_any_scale_and_large_logits(dtype: torch.dtype, scale: float) -> None:
    q, k, v, log_weight = weighted(dtype, n=20, m=9, p=6)
    q = q * (1e3 if scale == 1 else 1)
    output, lse = attend_with_lse(q, k, v[..., :5], log_weight, scale)
    expected, log_sum = attend_unfused(q.double(), k.double(), v[..., :5].double(), log_weight.double(), scale)
    assert output.shape == (2, 3, 20, 5)
    torch.testing.assert_close(output.double(), expected, rtol=2**-6, atol=2**-7 + 0.02 * (abs(scale) > 1))
    torch.testing.assert_close(lse.double(), log_sum, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("_as_on_cuda")
def test_no_live_slot_gives_zeros_and_no_gradient(dtype: torch.dtype) -> None:
    q, k, v, log_weight = weighted(dtype, n=7, m=5, p=4)
    log_weight[1] = -math.inf
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    output, lse = attend_with_lse(*inputs, log_weight, 0.5)
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    assert torch.equal(lse[1], torch.zeros_like(lse[1]))
    for x in torch.autograd.grad(output.sum(), inputs):
        assert torch.isfinite(x).all()
        assert not x[1].any()
    for x in attend_backward(torch.ones_like(output), *inputs, log_weight, output, lse, 0.5):
        assert not x[1].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("_as_on_cuda")
def test_rows_that_see_nothing_are_zero(dtype: torch.dtype) -> None:
    q, k, v, _ = weighted(dtype, n=7, m=9, p=4)
    seen = torch.rand(2, 1, 7, 9, generator=generator(1)) < 0.4
    seen[:, :, 3] = False
    output = attend_where(q, k, v, seen, 0.5)
    scores = (0.5 * q.double() @ k.double().mT).masked_fill(~seen, -1e9)
    expected = scores.softmax(-1).masked_fill(~seen, 0) @ v.double()
    torch.testing.assert_close(output.double(), expected, rtol=2**-6, atol=2**-6)
    assert not output[:, :, 3].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("p_v", [8, 5])
def test_backward_is_autograds_by_the_kernel_and_by_parts(
    dtype: torch.dtype, masked: bool, p_v: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows whose log of the row sum is infinite are constant. Off the CPU a part of the queries at a time."""
    q, k, v, log_weight = weighted(dtype, n=12, m=40, p=8)
    v, log_weight = v[..., :p_v], log_weight.to(statistics_dtype(q)) if masked else None
    upstream = torch.randn(2, 3, 12, p_v, generator=generator(6)).to(dtype)
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    output, lse = attend_unfused(*doubles, None if log_weight is None else log_weight.double(), 0.3)
    truth = torch.autograd.grad(output[..., 3:, :], doubles, upstream[..., 3:, :].double())
    output, lse = attend_with_lse(q, k, v, log_weight, 0.3)
    lse[..., :3] = torch.inf
    arguments = (upstream, q, k, v, log_weight, output, lse, 0.3)
    by_kernel = attend_backward(*arguments)
    monkeypatch.setattr(fused, "WEIGHTS_AT_ONCE", 7 * 2 * 3 * 40)
    wide = [x.to(lse.dtype) for x in (upstream, q, k, v)]
    by_parts = fused._backward_unfused(*wide, log_weight, output.to(lse.dtype), lse, 0.3)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2**-6)
    for ours in (by_kernel, by_parts):
        for x, expected in zip(ours, truth, strict=True):
            torch.testing.assert_close(
                x.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
            )


def test_gradients_in_float16_hold_sums_of_large_products() -> None:
    """The gradient of a key is a sum over 640 rows of products that float16 cannot hold."""
    draws, size = generator(0), 80.0
    queries = size * (1 + 0.05 * torch.randn(1, 1, 640, 32, generator=draws)).half()
    key = torch.full((1, 1, 100, 32), -0.5).half()
    key[:, :, :2] = 0.5  # two keys to which all rows attend, with values far apart
    value = torch.randn(key.shape, generator=draws).half()
    value[:, :, 0], value[:, :, 1] = size, -size
    gradient, results = torch.full_like(queries, 1e-4), []
    for dtype in (torch.float64, torch.float16):
        q, k, v, g = (x.to(dtype) for x in (queries, key, value, gradient))
        results.append(attend_backward(g, q, k, v, None, *attend_with_lse(q, k, v, None, 0.2), 0.2))
    for truth, ours in zip(*(x[1:] for x in results), strict=True):  # queries get nothing from keys that are alike
        assert float((ours.double() - truth).norm()) < 1e-2 * float(truth.norm())


@pytest.mark.parametrize(("dtype", "count", "lost"), [(torch.bfloat16, 3, 0.0), (torch.float16, 2, 2.0**-21)])
def test_a_number_is_the_sum_of_its_parts(dtype: torch.dtype, count: int, lost: float) -> None:
    x = torch.cat([torch.randn(500, generator=generator(0)) * 30, torch.tensor([0.0, -60000.0, 625.5])])
    parts = split_digits(x, dtype, count)
    assert parts.shape == (503, count)
    assert parts.dtype == dtype
    assert ((parts.double().sum(-1) - x.double()).abs() <= lost * x.abs() + (1e-7 if lost else 0)).all()


def test_leading_dimensions_are_free() -> None:
    """Blocks of keys are heads for the kernel: a GPU takes no more than 65,535 examples."""
    calls: list[Any] = []
    q, k, v, log_weight = (x[:, :, None].expand(2, 3, 4, *x.shape[2:]) for x in weighted(torch.float32, 6, 5, 4))
    kernel = fused._sdpa
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_sdpa", lambda *arguments: (calls.append(arguments), kernel(*arguments))[1])
        output = attend(q, k, v, log_weight, 0.5)
    assert calls[0][0].shape == (6, 4, 6, 4)
    torch.testing.assert_close(output, attend_unfused(q, k, v, log_weight, 0.5)[0])


def test_the_kernel_that_the_caller_chose_for_second_derivatives_is_seen() -> None:
    assert not only_math_backend()
    with sdpa_kernel(SDPBackend.MATH):
        assert only_math_backend()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert not only_math_backend()
