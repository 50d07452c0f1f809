"""Each step of a sketch on a CPU, a loop over pieces, gives the numbers of the plain step for other devices."""

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer.kernels import loops, plain, steps_for
from skeinformer.kernels.choice import all_true, is_eager_cpu
from tests.helpers import generator

B, H, P, D, WIDTH, VALUE_WIDTH = 2, 3, 6, 5, 4, 7
SIZES = [1, 63, 64, 300]
LAYOUTS = ["dense", "heads last"]


@pytest.fixture(params=[False, True], ids=["whole", "pieces"], autouse=True)
def _pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once with the usual pieces, which hold all of these tensors, and once with the smallest."""
    if request.param:
        monkeypatch.setattr(loops, "CACHED", 1)
        monkeypatch.setattr(loops, "FEWEST_KEYS", 7)


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float64, layout: str = "dense") -> Tensor:
    x = torch.randn(B, H, *shape, generator=generator(seed), dtype=torch.float64).to(dtype)
    return x if layout == "dense" else x.transpose(1, 2).contiguous().transpose(1, 2)


def assert_alike(name: str, *arguments: Any, tolerance: float = 1e-9, real: Tensor | None = None) -> None:
    """Call the function of both modules, and compare what they return, or their first argument where that is nothing.

    real: (b, h, n), the keys that count, where some do not.
    """
    results = []
    for module in (loops, plain):
        copies = [x.clone() if isinstance(x, Tensor) else x for x in arguments]
        result = getattr(module, name)(*copies)
        result = copies[0] if result is None else result
        results.append([x for x in (result if isinstance(result, tuple) else (result,)) if x is not None])
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(*results, strict=True):
        if real is not None and ours.shape == real.shape:
            ours, theirs = ours[real], theirs[real]
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def pilot_arguments(n: int, layout: str, masked: bool, peak: float, dtype: torch.dtype) -> tuple[Any, ...]:
    live = weight = None
    if masked:
        live = torch.rand(B, H, P, generator=generator(4)) < 0.7
        live[..., 0] = True
        weight = random(5, n, dtype=dtype).masked_fill(torch.rand(B, H, n, generator=generator(6)) < 0.4, -torch.inf)
        weight[..., 0] = 0
    keys, values = (random(i, n, p, dtype=dtype, layout=layout) for i, p in ((1, WIDTH), (2, VALUE_WIDTH)))
    if weight is not None:  # padding is zeroed before
        keys, values = (x.masked_fill(weight[..., None] == -torch.inf, 0) for x in (keys, values))
    return peak * random(3, P, WIDTH, dtype=dtype), keys, values, live, weight, 0.5


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("peak", [1.0, 40.0], ids=["flat", "peaked"])  # squares of peaked weights leave the range
def test_pilot_attention(n: int, layout: str, masked: bool, peak: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for held in (loops.HELD, 1):  # with the scores held, and with sums apart
        monkeypatch.setattr(loops, "HELD", held)
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4 * peak)):
            arguments = pilot_arguments(n, layout, masked, peak, dtype)
            real = None if arguments[4] is None else arguments[4] > -torch.inf
            assert_alike("pilot_attention", *arguments, True, tolerance=tolerance, real=real)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
def test_column_sums(n: int, layout: str, masked: bool) -> None:
    queries, keys, _, live, weight, scale = pilot_arguments(n, layout, masked, 10, torch.float64)
    assert_alike("column_sums", queries, keys, 30 * random(7, P), live, weight, scale, True)


def test_a_head_without_pilots_has_no_mass() -> None:
    queries, keys, values, live, weight, scale = pilot_arguments(70, "dense", True, 1, torch.float64)
    live[0, 0] = False
    for module in (loops, plain):
        assert not module.pilot_attention(queries, keys, values, live, weight, scale, True)[3][0, 0].any()


def test_a_head_without_keys_gives_zeros() -> None:
    queries, keys, values, live, weight, scale = pilot_arguments(70, "dense", True, 1, torch.float64)
    weight[1, 1] = -torch.inf
    values[1, 1] = 0
    for module in (loops, plain):
        output, lse, _, mass = module.pilot_attention(queries, keys, values, live, weight, scale, True)
        assert not output[1, 1].any()
        assert not lse[1, 1].any()
        assert not mass[1, 1].any()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_nearest_center(n: int, layout: str, dtype: torch.dtype) -> None:
    keys, direction, offset = random(1, n, WIDTH, dtype=dtype, layout=layout), random(2, D, WIDTH), random(3, D, 1)
    direction[..., 1, :], offset[..., 1, :] = direction[..., 3, :], offset[..., 3, :]  # of two alike, the first
    assert_alike("nearest_center", keys, direction.flatten(0, 1).to(dtype), offset.flatten(0, 1).to(dtype))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_product", [False, True])
def test_cluster_sums(n: int, layout: str, with_product: bool) -> None:
    keys, values = random(1, n, WIDTH, layout=layout), random(2, n, VALUE_WIDTH, layout=layout)
    assignment = torch.randint(D, (B, H, n), generator=generator(3))
    assert_alike("cluster_sums", keys, values, random(4, n).abs(), assignment, D, with_product)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_weighted_row(n: int, layout: str, dtype: torch.dtype) -> None:
    assert_alike("weighted_row", random(1, n, WIDTH, dtype=dtype, layout=layout), random(2, n))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("with_product", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_add_cluster_gradients(n: int, layout: str, with_product: bool, dtype: torch.dtype) -> None:
    assignment = torch.randint(D, (B, H, n), generator=generator(3))
    arguments: list[Any] = [random(1, n, WIDTH, dtype=dtype, layout=layout), random(2, D, WIDTH), assignment]
    arguments += [random(4, n).abs()]
    if with_product:
        arguments += [random(5, n, VALUE_WIDTH, dtype=dtype, layout=layout), random(6, VALUE_WIDTH, WIDTH)]
    assert_alike("add_cluster_gradients_", *arguments, tolerance=1e-9 if dtype == torch.float64 else 2**-6)


def test_both_modules_have_the_same_functions() -> None:
    for name in (name for name, x in vars(plain).items() if getattr(x, "__module__", "") == plain.__name__):
        ours, theirs = (inspect.signature(getattr(module, name)) for module in (loops, plain))
        assert ours == theirs


def test_the_module_is_chosen_by_the_device_and_by_who_watches() -> None:
    x, seen = torch.ones(3), []
    assert steps_for(x) is steps_for(torch.nn.Parameter(x)) is loops
    assert steps_for(x.to("meta")) is plain
    torch.func.vmap(lambda each: seen.append(is_eager_cpu(each)) or each)(x[None])
    assert seen == [False]


def test_a_condition_is_known_only_where_its_numbers_may_be_read() -> None:
    assert all_true(torch.tensor([True, True]))
    assert not all_true(torch.tensor([True, False]))
    assert not all_true(torch.ones(2, dtype=torch.bool, device="meta"))
