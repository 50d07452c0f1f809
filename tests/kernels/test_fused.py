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
from skeinformer.kernels.choice import Route, only_plain_kernel, route, statistics_dtype
from skeinformer.kernels.fused import (
    attend,
    attend_unfused,
    attend_where,
    attend_with_normalizer,
    halves_of,
    row_gradients,
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
        kept, columns = re.fullmatch(r"(\w+)(?:, (\d))?", row["weights go as"]).groups()  # type: ignore[union-attr]
        for name in row["precision"].split(", "):
            dtype, weighted = getattr(torch, name), row["weights"] == "yes"
            found = route(row["device"], dtype, int(row["p"]), int(row["p_v"]), weighted)
            infinite = row["empty slot"] == "-inf" or (not weighted and row["device"] == "cpu")
            expected = Route(kept, int(columns or 0), int(row["width"]), row["normalizer"], infinite)  # type: ignore[arg-type]
            assert found == expected, row
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
    for name in ("weights", "normalizer"):
        assert {getattr(x, name) for x in every} == set(get_args(Route.__annotations__[name]))
    assert route("cuda", torch.float16, 64, 64, True, recent=False).normalizer == "efficient"
    assert route("cuda", torch.bfloat16, 64, 64, True, recent=False).normalizer == "scores"


@pytest.fixture
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the CPU are prepared as on CUDA, and given to the CPU's kernel."""

    def route_of(query: Tensor, values: Tensor, log_weight: Tensor | None) -> Route:
        found = route("cuda", query.dtype, query.shape[-1], values.shape[-1], log_weight is not None)
        return found._replace(normalizer="cpu")

    monkeypatch.setattr(fused, "route_of", route_of)


def weighted(dtype: torch.dtype, n: int = 300, m: int = 65, p: int = 32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys, values and log weights as a cluster sketch has them: from -4 to 9, some slots empty."""
    q, k, v = (torch.randn(2, 3, size, p, generator=generator(i)).to(dtype) for i, size in enumerate((n, m, m)))
    log_weight = torch.rand(2, 3, m, generator=generator(3)) * 13 - 4
    return q, k, v, log_weight.masked_fill(torch.rand(2, 3, m, generator=generator(4)) < 0.2, -math.inf)


def error(x: Tensor, truth: Tensor) -> float:
    return float((x.detach().double() - truth.detach()).norm() / truth.detach().norm())


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_weights_in_columns_are_as_good_as_a_float32_mask(request: pytest.FixtureRequest, dtype: torch.dtype) -> None:
    """Values, normalizers and gradients; a mask rounded to the precision of the query is several times worse."""
    q, k, v, log_weight = weighted(dtype)
    upstream = torch.randn(q.shape, generator=generator(5))

    def results(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> list[Tensor]:
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        output, normalizer = attend_with_normalizer(*inputs, weight, 0.25)
        torch.testing.assert_close(attend(*inputs, weight, 0.25), output, rtol=0, atol=0)
        return [output, normalizer, *torch.autograd.grad(output, inputs, upstream.to(output.dtype))]

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
    output, normalizer = attend_with_normalizer(q, k, v[..., :5], log_weight, scale)
    expected, log_sum = attend_unfused(q.double(), k.double(), v[..., :5].double(), log_weight.double(), scale)
    assert output.shape == (2, 3, 20, 5)
    torch.testing.assert_close(output.double(), expected, rtol=2**-6, atol=2**-7 + 0.02 * (abs(scale) > 1))
    torch.testing.assert_close(normalizer.double(), log_sum, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.usefixtures("_as_on_cuda")
def test_no_live_slot_gives_zeros_and_no_gradient(dtype: torch.dtype) -> None:
    q, k, v, log_weight = weighted(dtype, n=7, m=5, p=4)
    log_weight[1] = -math.inf
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    output, normalizer = attend_with_normalizer(*inputs, log_weight, 0.5)
    assert torch.equal(output[1], torch.zeros_like(output[1]))
    assert torch.equal(normalizer[1], torch.zeros_like(normalizer[1]))
    for x in torch.autograd.grad(output.sum(), inputs):
        assert torch.isfinite(x).all()
        assert not x[1].any()
    exact = statistics_dtype(q)
    d_key, d_value = row_gradients(q.to(exact), k, v, log_weight, torch.ones(q.shape, dtype=exact), 0.5)
    assert not d_key[1].any()
    assert not d_value[1].any()


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


@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_row_gradients_with_columns_are_those_of_a_mask(request: pytest.FixtureRequest, dtype: torch.dtype) -> None:
    q, k, v, log_weight = weighted(dtype, n=12, m=40, p=8)
    gradient = 1e4 * torch.randn(q.shape, generator=generator(6))
    expected = row_gradients(q.float(), k, v, log_weight, gradient, 0.3)
    request.getfixturevalue("_as_on_cuda")
    for ours, theirs in zip(row_gradients(q.float(), k, v, log_weight, gradient, 0.3), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-5, atol=2**-7 * float(theirs.abs().max()))


@pytest.mark.parametrize(("dtype", "count", "lost"), [(torch.bfloat16, 3, 0.0), (torch.float16, 2, 2.0**-21)])
def test_a_number_is_the_sum_of_its_parts(dtype: torch.dtype, count: int, lost: float) -> None:
    x = torch.cat([torch.randn(500, generator=generator(0)) * 30, torch.tensor([0.0, -60000.0, 625.5])])
    parts = halves_of(x, dtype, count)
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
    assert not only_plain_kernel()
    with sdpa_kernel(SDPBackend.MATH):
        assert only_plain_kernel()
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION]):
        assert not only_plain_kernel()
