"""Errors name what was expected, what came and what to do."""

from typing import Any

import pytest
import torch

from skeinformer.noise import from_generator
from skeinformer.sketch import SKETCHES, draw, find

NAMES = list(SKETCHES)


def test_unknown_option() -> None:
    with pytest.raises(TypeError, match=r"'sparse_embedding' has no option 'num_nonzero'; did you mean 'num_nonzeros'"):
        draw("sparse_embedding", 8, 2, num_nonzero=2)
    with pytest.raises(TypeError, match=r"'gaussian' has no option 'log_probability'\. Its options: none"):
        draw("gaussian", 8, 2, log_probability=torch.zeros(8))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "d"), [(0, 2), (8, 0), (-1, 2), (8, -3)])
def test_sizes_below_one(name: str, n: int, d: int) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got"):
        draw(name, n, d)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("sparse_embedding", {"num_nonzeros": 0}, ValueError, "num_nonzeros must be at least 1"),
        ("accumulative", {"accumulations": 0}, ValueError, "accumulations must be at least 1"),
        ("very_sparse", {"density": 0.0}, ValueError, r"density must be in \(0, 1\], got 0.0"),
        ("very_sparse", {"density": 1.5}, ValueError, r"density must be in \(0, 1\], got 1.5"),
        ("very_sparse", {"density": "low"}, TypeError, "density must be a number"),
        ("subsampling", {"log_probability": torch.zeros(7)}, ValueError, r"shape \(7,\), expected \(..., 8\)"),
        ("subsampling", {"log_probability": [0.5] * 8}, TypeError, "floating point tensor.*got list"),
        ("subsampling_without", {"log_probability": torch.ones(8, dtype=torch.int64)}, TypeError, "got torch.int64"),
        ("accumulative", {"log_probability": torch.zeros(8, device="meta")}, ValueError, "is on meta.*device='meta'"),
        ("gaussian", {"dtype": torch.int32}, TypeError, "dtype must be a floating point type.*got torch.int32"),
        ("gaussian", {"batch": 4}, TypeError, r"batch must be a tuple of sizes such as \(8,\), got 4"),
    ],
)
def test_wrong_options(name: str, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        draw(name, 8, 2, **options)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arguments_of_a_sketch(name: str) -> None:
    sketch = draw(name, 8, 3)
    with pytest.raises(ValueError, match=r"apply takes shape \(..., n, p\) with n = 8, got \(2, 7, 3\)"):
        sketch.apply(torch.ones(2, 7, 3))
    with pytest.raises(ValueError, match=r"lift takes shape \(..., d, p\) with d = 3, got \(8, 3\)"):
        sketch.lift(torch.ones(8, 3))
    with pytest.raises(TypeError, match=r"apply takes a floating point tensor, got torch.int64; convert"):
        sketch.apply(torch.ones(8, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"lift got a tensor on meta, but the sketch is on cpu"):
        sketch.lift(torch.ones(3, 2, device="meta"))


@pytest.mark.parametrize("name", NAMES)
def test_noise_of_other_sizes_raises(name: str) -> None:
    family, options = find(name)
    noise = family.noise(from_generator((2,)), 8, 3, **options)
    with pytest.raises(ValueError, match=r"noise has shape \(2, .*draw it with the same n, d and options"):
        family.build(noise, 20, 5, dtype=torch.float32, **options)
    with pytest.raises(ValueError, match=r"expected \d noise tensors, got \d"):
        family.build((*noise, noise[0]), 8, 3, dtype=torch.float32, **options)
