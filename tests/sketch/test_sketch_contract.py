"""Properties of every family of sketches: adjoint maps, gradients, broadcasting, dtypes, draws from noise, cost."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from skeinformer.noise import from_generator, from_seed
from skeinformer.sketch import SKETCHES, Sketch, draw, find
from tests.cases import cases
from tests.helpers import LargestTensor, generator, slow_but

NAMES = list(SKETCHES)
SAMPLING = [name for name in NAMES if "log_probability" in SKETCHES[name].defaults]
DENSE = {"gaussian", "rademacher"}  # S has n d non-zero entries, so applying it costs O(n d p)
SIZES = [(1, 1), (1, 5), (2, 3), (7, 3), (13, 13), (9, 20), (64, 5)]


def seeded(name: str, n: int, d: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> Sketch:
    return draw(name, n, d, generator=generator(seed), dtype=dtype, **options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "d"), SIZES)
def test_apply_and_lift_are_products_with_the_dense_matrix(name: str, n: int, d: int) -> None:
    sketch = seeded(name, n, d, batch=(3,))
    x, y = torch.randn(3, n, 4, dtype=torch.float64), torch.randn(3, d, 4, dtype=torch.float64)
    dense = sketch.dense()
    assert (sketch.n, sketch.d, dense.shape) == (n, d, (3, n, d))
    assert_close(sketch.apply(x), dense.mT @ x)
    assert_close(sketch.lift(y), dense @ y)


@settings(max_examples=cases(25))
@given(
    n=st.integers(1, 40),
    d=st.integers(1, 40),
    p=st.integers(0, 4),
    name=st.sampled_from(NAMES),
    seed=st.integers(0, 99),
)
def test_adjoint(n: int, d: int, p: int, name: str, seed: int) -> None:
    sketch = seeded(name, n, d, seed=seed)
    x = torch.randn(n, p, dtype=torch.float64, generator=generator(seed + 1))
    y = torch.randn(d, p, dtype=torch.float64, generator=generator(seed + 2))
    sketched, lifted = sketch.apply(x), sketch.lift(y)
    assert sketched.shape == (d, p)
    assert lifted.shape == (n, p)
    assert_close((sketched * y).sum(), (x * lifted).sum())


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    sketch = seeded(name, 6, 4, batch=(2,))
    x = torch.randn(2, 6, 3, dtype=torch.float64, requires_grad=True)
    y = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)  # broadcast over the batch of S
    assert torch.autograd.gradcheck(sketch.apply, (x,))
    assert torch.autograd.gradcheck(sketch.lift, (y,))
    gradient = torch.autograd.grad(sketch.apply(x).sum(), x)[0]
    assert_close(gradient, sketch.lift(torch.ones(2, 4, 3, dtype=torch.float64)))


@pytest.mark.parametrize("name", NAMES)
def test_batch_dimensions_broadcast(name: str) -> None:
    sketch = seeded(name, 7, 3, batch=(2, 3))
    single = seeded(name, 7, 3)
    for leading in [(), (3,), (2, 1), (5, 2, 3)]:
        x, y = torch.randn(*leading, 7, 2, dtype=torch.float64), torch.randn(*leading, 3, 2, dtype=torch.float64)
        assert_close(sketch.apply(x), sketch.dense().mT @ x)
        assert_close(sketch.lift(y), sketch.dense() @ y)
        assert_close(single.apply(x), single.dense().mT @ x)
        assert_close(single.lift(y), single.dense() @ y)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_result_has_the_dtype_of_the_argument_and_long_sums_are_accurate(name: str, dtype: torch.dtype) -> None:
    sketch = seeded(name, 1000, 5, dtype=torch.float32)
    x, y = torch.randn(1000, 2).to(dtype), torch.randn(5, 2).to(dtype)
    dense = sketch.dense().double()
    # sums in float32 or better, and one rounding of the result
    summation = 30 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    for result, matrix, argument in [(sketch.apply(x), dense.mT, x), (sketch.lift(y), dense, y)]:
        assert result.dtype == dtype
        exact, terms = matrix @ argument.double(), matrix.abs() @ argument.double().abs()
        assert ((result.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + summation * terms).all()


@pytest.mark.parametrize("name", NAMES)
def test_same_generator_same_draw(name: str) -> None:
    first = draw(name, 20, 6, batch=(4,), generator=generator(3)).dense()
    assert torch.equal(first, draw(name, 20, 6, batch=(4,), generator=generator(3)).dense())
    assert not torch.equal(first, draw(name, 20, 6, batch=(4,), generator=generator(4)).dense())
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize("name", NAMES)
def test_an_element_of_the_batch_equals_a_sketch_of_its_own_noise(name: str) -> None:
    family, options = find(name)
    batch, n, d = (2, 3), 11, 4
    noise = family.noise(from_generator(batch, generator=generator()), n, d, **options)
    if name in SAMPLING:
        options["log_probability"] = torch.randn(*batch, n).masked_fill(torch.rand(*batch, n) < 0.4, -torch.inf)
    together = family.build(noise, n, d, dtype=torch.float64, **options).dense()
    for i, j in [(0, 0), (0, 2), (1, 1)]:
        own = {key: value[i, j] if isinstance(value, Tensor) else value for key, value in options.items()}
        single = family.build(tuple(u[i, j] for u in noise), n, d, dtype=torch.float64, **own)
        assert torch.equal(together[i, j], single.dense())


@pytest.mark.parametrize("name", ["gaussian", "rademacher", "sparse_embedding", *SAMPLING])
def test_right_padding_does_not_change_seeded_rows(name: str) -> None:
    family, options = find(name)
    n, longer, d = 10, 17, 6
    log_probability = torch.randn(n, generator=generator())
    matrices = []
    for length in (n, longer):
        if name in SAMPLING:
            padded = torch.full((length,), -torch.inf)
            padded[:n] = log_probability
            options["log_probability"] = padded
        noise = family.noise(from_seed((2, 3), 7), length, d, **options)
        matrices.append(family.build(noise, length, d, dtype=torch.float32, **options).dense())
    short, long = matrices
    assert short.shape == (2, 3, n, d)
    assert_close(long[..., :n, :], short, rtol=0, atol=0)
    if name in SAMPLING:
        assert (long[..., n:, :] == 0).all()


@pytest.mark.parametrize("name", slow_but(NAMES, "gaussian", "accumulative"))
def test_compiles_into_one_graph(name: str) -> None:
    family, options = find(name)
    n, d = 12, 5
    noise = family.noise(from_generator((2,), generator=generator()), n, d, **options)
    if name in SAMPLING:
        options["log_probability"] = torch.randn(2, n).masked_fill(
            torch.arange(n) > torch.tensor([[3], [9]]), -torch.inf
        )

    def product(x: Tensor, noise: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
        sketch = family.build(noise, x.shape[-2], d, dtype=torch.float32, **options)
        return sketch.lift(sketch.apply(x))

    torch._dynamo.reset()
    x = torch.randn(2, n, 3, requires_grad=True)
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    result, expected = compiled(x, noise, options), product(x, noise, options)
    assert_close(result, expected)
    gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in (result, expected)]
    assert_close(gradients[0], gradients[1])


@pytest.mark.parametrize("name", NAMES)
def test_drawing_compiles_without_a_generator(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: draw(name, 12, 5).apply(x), fullgraph=True, backend="eager")
    assert compiled(torch.ones(12, 2)).isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_matrix_is_never_formed(name: str) -> None:
    n, d, p = 4096, 64, 2
    x, y = torch.randn(n, p, requires_grad=True), torch.randn(d, p, requires_grad=True)
    with LargestTensor() as largest:
        sketch = draw(name, n, d, generator=generator())
        (sketch.apply(x).sum() + sketch.lift(y).sum()).backward()
    if name in DENSE:
        assert largest.size == n * d
    else:
        assert largest.size < n * d / 4


@pytest.mark.parametrize("name", SAMPLING)
def test_applying_a_sample_touches_only_the_sample(name: str) -> None:
    sketch = draw(name, 4096, 16, generator=generator())
    x = torch.randn(4096, 8)
    with LargestTensor() as largest:
        sketch.apply(x)
    accumulations = 4 if name == "accumulative" else 1
    assert largest.size == 16 * accumulations * 8
    touched = sketch.dense().ne(0).any(-1)
    assert int(touched.sum()) <= 16 * accumulations
    assert_close(sketch.apply(torch.where(touched[:, None], x, torch.nan)), sketch.apply(x))
