"""Sketches: random n x d matrices S with E[S S^T] = I, Eq. (1) of Chen et al. (2022), each applied at its own cost.

A family is added by writing its two functions, `noise` and `build`, and one line of SKETCHES.
"""

import torch

from skeinformer import noise as noises
from skeinformer.registry import check_count, check_options, lookup
from skeinformer.sketch.base import Family, Sketch
from skeinformer.sketch.gaussian import gaussian, rademacher, sub_gaussian_noise
from skeinformer.sketch.hadamard import srht, srht_noise
from skeinformer.sketch.sampling import (
    accumulative,
    accumulative_noise,
    subsampling,
    subsampling_noise,
    subsampling_without,
    subsampling_without_noise,
)
from skeinformer.sketch.sparse import sparse_embedding, sparse_embedding_noise, very_sparse, very_sparse_noise

__all__ = ["SKETCHES", "Family", "Sketch", "draw", "find"]

SKETCHES: dict[str, Family] = {
    "subsampling": Family(
        subsampling_noise, subsampling, "Drineas, Kannan, Mahoney 2006", "O(d p)", {"log_probability": None}
    ),
    "subsampling_without": Family(
        subsampling_without_noise,
        subsampling_without,
        "Duffield, Lund, Thorup 2007",
        "O(d p)",
        {"log_probability": None},
    ),
    "gaussian": Family(sub_gaussian_noise, gaussian, "Halko, Martinsson, Tropp 2011", "O(n d p)"),
    "rademacher": Family(sub_gaussian_noise, rademacher, "Achlioptas 2003", "O(n d p)"),
    "srht": Family(srht_noise, srht, "Ailon, Chazelle 2006", "O(n log n p)"),
    "sparse_embedding": Family(
        sparse_embedding_noise, sparse_embedding, "Cohen, Nelson, Woodruff 2016", "O(n s p)", {"num_nonzeros": 4}
    ),
    "very_sparse": Family(
        very_sparse_noise, very_sparse, "Li, Hastie, Church 2006", "O(sqrt(n) d p)", {"density": None}
    ),
    "accumulative": Family(
        accumulative_noise, accumulative, "Chen, Yang 2021", "O(d m p)", {"accumulations": 4, "log_probability": None}
    ),
}


def find(name: str, **options: object) -> tuple[Family, dict[str, object]]:
    """The family called `name`, and all its options: the given ones and the defaults of the others."""
    family = lookup("sketch", name, SKETCHES)
    check_options(f"sketch {name!r}", options, family.defaults)
    return family, {**family.defaults, **options}


def draw(
    name: str,
    n: int,
    d: int,
    *,
    batch: tuple[int, ...] = (),
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    **options: object,
) -> Sketch:
    """A random S, (*batch, n, d), of the family `name`, with E[S S^T] = I.

    The numbers come from `generator`, or from torch's global state; the elements of the batch are independent. `dtype`
    is that of the weights of S (default: torch's), not of what S can be applied to.
    """
    family, options = find(name, **options)
    check_count("n", n)
    check_count("d", d)
    if not isinstance(batch, tuple) or not all(isinstance(size, int) and size >= 0 for size in batch):
        raise TypeError(f"batch must be a tuple of sizes such as (8,), got {batch!r}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point type such as torch.float32, got {dtype!r}")
    rand = noises.from_generator(batch, generator=generator, device=device)
    return family.build(family.noise(rand, n, d, **options), n, d, dtype=dtype, **options)
