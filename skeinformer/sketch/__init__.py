"""Sketches: random n x d matrices S with E[S S^T] = I, Eq. (1) of Chen et al. (2022), each applied at its own cost.

A new family is a function that builds S from uniform numbers, and one row of SKETCHES.
"""

from functools import partial

import torch

from skeinformer.checks import check_count, check_options, lookup
from skeinformer.noise import from_generator, normal, sign
from skeinformer.sketch.base import Family, Sketch
from skeinformer.sketch.dense import independent_entries, padded_length, srht
from skeinformer.sketch.sampling import accumulative, accumulative_shapes, subsampling, subsampling_without
from skeinformer.sketch.sparse import sparse_embedding, sparse_embedding_shapes, very_sparse, very_sparse_shapes

__all__ = ["SKETCHES", "Family", "Sketch", "draw", "find"]

SAMPLING: dict[str, object] = {"log_probability": None}
GAUSSIAN, RADEMACHER = (partial(independent_entries, transform=transform) for transform in (normal, sign))
# fmt: off
SKETCHES: dict[str, Family] = {
    "subsampling": Family(
        lambda n, d, **_: ((d,),), subsampling, "Drineas, Kannan, Mahoney 2006", "O(d p)", SAMPLING, double=True),
    "subsampling_without": Family(
        lambda n, d, **_: ((n,),), subsampling_without, "Duffield, Lund, Thorup 2007", "O(d p)", SAMPLING, double=True),
    "gaussian": Family(lambda n, d: ((n, d),), GAUSSIAN, "Halko, Martinsson, Tropp 2011", "O(n d p)"),
    "rademacher": Family(lambda n, d: ((n, d),), RADEMACHER, "Achlioptas 2003", "O(n d p)"),
    "srht": Family(lambda n, d: ((n,), (padded_length(n),)), srht, "Ailon, Chazelle 2006", "O(n log n p)"),
    "sparse_embedding": Family(
        sparse_embedding_shapes, sparse_embedding, "Cohen, Nelson, Woodruff 2016", "O(n s p)", {"num_nonzeros": 4}),
    "very_sparse": Family(
        very_sparse_shapes, very_sparse, "Li, Hastie, Church 2006", "O(sqrt(n) d p)", {"density": None}, double=True),
    "accumulative": Family(accumulative_shapes, accumulative, "Chen, Yang 2021", "O(d m p)",
        {"accumulations": 4, **SAMPLING}, double=True),
}
# fmt: on


def find(name: str, **options: object) -> tuple[Family, dict[str, object]]:
    """Return the family called `name` and all of its options, with defaults for those that are missing."""
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
    """Draw a random n x d matrix S with E[S S^T] = I.

    Args:
        name: One of SKETCHES, such as "srht".
        n: Rows of S, the length of what it is applied to.
        d: Columns of S, the length of the result.
        batch: Leading dimensions of S; its elements are independent draws.
        generator: Source of the random numbers; torch's global generator if None.
        device: Device of S.
        dtype: Type of the numbers in S, torch's default if None. S can be applied to tensors of any floating type.
        **options: Options of the family, as in its row of SKETCHES.

    Returns:
        The sketch, with methods `apply`, `lift` and `dense`.

    Raises:
        ValueError: If the name is unknown, or a size or an option is out of range.
        TypeError: If the family has no such option, or an argument has the wrong type.

    Example:
        >>> sketch = draw("srht", n=1000, d=64)
        >>> sketch.apply(torch.randn(1000, 32)).shape
        torch.Size([64, 32])
    """
    family, options = find(name, **options)
    check_count("n", n)
    check_count("d", d)
    if not isinstance(batch, tuple) or not all(isinstance(size, int) and size >= 0 for size in batch):
        raise TypeError(f"batch must be a tuple of sizes such as (8,), got {batch!r}")
    dtype = dtype or torch.get_default_dtype()
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating point type such as torch.float32, got {dtype!r}")
    rand = from_generator(batch, generator=generator, device=device)
    return family.build(family.noise(rand, n, d, **options), n, d, dtype=dtype, **options)
