"""Attention with a sketch S in place of an identity: D^-1 A S S^T V, or D^-1 S S^T A V, for any family of sketches.

The sketching framework of Chen et al. (2022), section 3. `side="columns"` is the unreduced form behind Linformer (with
a Gaussian S) and the form in which Proposition 1 holds; the exact D makes it quadratic in time. `side="rows"` is the
form in which the paper reads Informer. Both are unbiased, as E[S S^T] = I, and do not normalize rows.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import OF_THE_MODULE, Attention, Trace
from skeinformer.attention.inputs import Inputs, Noise, default_scale
from skeinformer.attention.selection import Selection
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.ranges import narrow, saturated
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import Rand, only_shapes
from skeinformer.registry import check_options, lookup
from skeinformer.sketch import SKETCHES, Sketch, find
from skeinformer.sketch.base import SparseColumns
from skeinformer.sketch.sampling import subsampling

SketchedSide = Literal["columns", "rows"]


class SketchedOptions(NamedTuple):
    """What sketched attention is told beside its inputs and the options of its sketch."""

    budget: int = 256
    sketch: str = "gaussian"
    side: SketchedSide = "columns"
    scale: float | None = None


class Sketched(Attention):
    """D^-1 A S S^T V (side="columns"), or D^-1 S S^T A V (side="rows"), S one of SKETCHES with `budget` columns.

    Sampling families draw real tokens only. "srht" and "very_sparse" are matrices of a given length: for them a `seed`
    makes evaluation deterministic, but right padding changes S. Time O(n^2 p), memory O(n p) and what S needs.
    """

    Options = SketchedOptions
    deciding = ("sketch",)

    def __init__(self, **given: Any) -> None:
        names = (*SketchedOptions._fields, *OF_THE_MODULE)
        own = {name: value for name, value in given.items() if name in names}
        super().__init__(**own)
        sketch_options = {name: value for name, value in given.items() if name not in names}
        known = self.option_names(sketch=self.options.sketch)
        check_options(f"attention 'sketched' with sketch={self.options.sketch!r}", sketch_options, known)
        self.family, self.sketch_options = find(self.options.sketch, **sketch_options)
        self.family.noise(only_shapes(()), 1, 1, **self.sketch_options)  # raises for an option of the wrong kind

    @classmethod
    def option_names(cls, **options: object) -> tuple[str, ...]:
        sketch = str(options.get("sketch", SketchedOptions().sketch))
        defaults = lookup("sketch", sketch, SKETCHES).defaults
        return (*SketchedOptions._fields, *(name for name in defaults if name != "log_probability"))

    def draw_noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        n = (key if self.options.side == "columns" else query).shape[-2]
        return self.family.noise(rand, n, self.budget, **self.sketch_options)

    def attend(self, inputs: Inputs, noise: tuple[Tensor, ...]) -> tuple[Tensor, Trace]:
        query, key, value, key_mask, query_mask = inputs
        scale, given = default_scale(query, self.options.scale), query.dtype
        source, dtype = from_mask(key, value, key_mask), statistics_dtype(query)
        if self.options.side == "columns":
            return sketch_columns(query, source, self._build(noise, key, key_mask), scale), Trace()
        source = source._replace(keys=key.to(dtype), values=value.to(dtype))
        sketch = self._build(noise, query, query_mask)
        output = sketch_rows(query.to(dtype), source, query_mask, sketch, scale)
        return saturated(output, given).to(given), Trace()

    def _build(self, noise: tuple[Tensor, ...], x: Tensor, mask: Tensor | None) -> Sketch:
        options, dtype = dict(self.sketch_options), statistics_dtype(x)
        if "log_probability" in options and mask is not None:
            options["log_probability"] = torch.zeros(mask.shape, dtype=dtype, device=x.device).where(mask, -torch.inf)
        return self.family.build(noise, x.shape[-2], self.budget, dtype=dtype, **options)


def sketch_columns(query: Tensor, source: VirtualKeys, sketch: Sketch, scale: float) -> Tensor:
    """D^-1 A S S^T V, (b, h, n, p_v): attention over the values S S^T V."""
    dtype = statistics_dtype(query)  # weights 1/(d p_i) and sums over d columns overflow half precision
    values = sketch.lift(sketch.apply(source.values.to(dtype)))  # (b, h, n_k, p_v)
    output = attend(query.to(dtype), VirtualKeys(source.keys.to(dtype), values, source.log_weight), scale)
    return narrow(output, query.dtype)


def sketch_sampled_columns(
    query: Tensor, source: VirtualKeys, log_probability: Tensor, u: Tensor, d: int, scale: float
) -> tuple[Tensor, Selection]:
    """`sketch_columns` with d columns sub-sampled by given probabilities (Definition 1), and which they are.

    log_probability: (b, h, n_k), up to a constant. u: (b, h, d), uniform numbers.
    """
    dtype = statistics_dtype(query)
    sketch = subsampling((u,), source.keys.shape[-2], d, dtype=dtype, log_probability=log_probability)
    columns = Selection(sketch.index[..., 0], sketch.weight[..., 0] > 0)
    return sketch_columns(query, source, sketch, scale), columns


def sketch_rows(query: Tensor, source: VirtualKeys, query_mask: Tensor | None, sketch: Sketch, scale: float) -> Tensor:
    """D^-1 S S^T A V, (b, h, n, p_v).

    A sampling S makes S S^T diagonal: it commutes with D, and d exact rows are scaled, time O(d n p). Any other S mixes
    rows of A whose sums differ by D_j / D_i, in time and memory O(n^2); ratios beyond e^40 are cut off.
    """
    if isinstance(sketch, SparseColumns) and sketch.index.shape[-1] == 1:
        rows = attend(gather_rows(query, sketch.index[..., 0].expand(*query.shape[:2], -1)), source, scale)
        return sketch.lift(sketch.weight * rows)
    scores = scale * (query @ source.keys.mT) + source.log_weights()[..., None, :]  # (b, h, n, n_k)
    scores = scores.clamp(min=torch.finfo(scores.dtype).min)
    log_sum = scores.logsumexp(-1, keepdim=True)  # (b, h, n, 1), log D
    largest = log_sum.detach().amax(-2, keepdim=True)
    rows = (log_sum - largest).exp() * (scores.softmax(-1) @ source.values)  # A V, scaled
    if query_mask is not None:
        rows = rows.masked_fill(~query_mask[..., None], 0)
    return sketch.lift(sketch.apply(rows)) * (largest - log_sum).clamp(max=40).exp()
