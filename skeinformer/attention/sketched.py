"""Attention with a sketch S in place of an identity, for any family of sketches: Chen et al. (2022), section 3."""

from typing import Any, Literal

import torch
from torch import Tensor

from skeinformer.attention.base import Method, Trace
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.rows import Rows
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask
from skeinformer.checks import check_options, lookup
from skeinformer.kernels.choice import statistics_dtype
from skeinformer.kernels.rows import gather_rows, narrow, saturated
from skeinformer.noise import Rand
from skeinformer.sketch import SKETCHES, Family, Sketch, find
from skeinformer.sketch.base import SparseSketch
from skeinformer.sketch.sampling import subsampling

OPTIONS = ("budget", "sketch", "side")  # the options that do not depend on the sketch


class Sketched(Method):
    """D^-1 A S S^T V (side="columns"), or D^-1 S S^T A V (side="rows"), S one of SKETCHES with `budget` columns.

    Columns are the unreduced form behind Linformer (with a Gaussian S) and the form of Proposition 1 in Chen et al.
    (2022), rows the form in which they read Informer. Both are unbiased and do not normalize rows. Sampling families
    draw real tokens only. "srht" and "very_sparse" have a fixed length: right padding changes S, also with a `seed`.
    Time O(n^2 p), memory O(n p) and what S needs.
    """

    budget: int = 256
    sketch: str = "gaussian"
    side: Literal["columns", "rows"] = "columns"
    sketch_options: tuple[tuple[str, Any], ...] = ()  # names and values

    def __post_init__(self) -> None:
        super().__post_init__()
        names = (name for name, _ in self.sketch_options)
        check_options(f"attention 'sketched' with sketch={self.sketch!r}", names, option_names_of(self.sketch))
        family, options = self.family_and_options()
        family.shapes(1, 1, **options)  # raises for an option of the wrong kind

    @classmethod
    def create(cls, **options: Any) -> "Sketched":
        sketch_options = tuple((name, value) for name, value in options.items() if name not in OPTIONS)
        return cls(**{name: options[name] for name in OPTIONS if name in options}, sketch_options=sketch_options)

    @classmethod
    def option_names(cls, **options: object) -> tuple[str, ...]:
        return (*OPTIONS, *option_names_of(str(options.get("sketch", cls.sketch))))

    def family_and_options(self) -> tuple[Family, dict[str, Any]]:
        """Return the family of S, and its options with the defaults of those that are not set."""
        return find(self.sketch, **dict(self.sketch_options))

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        family, options = self.family_and_options()
        return family.noise(rand, (key if self.side == "columns" else query).shape[-2], self.budget, **options)

    def attend(self, inputs: Inputs, noise: Noise) -> tuple[Tensor, Trace]:
        query, key, value, key_mask, query_mask = inputs[:5]
        source, dtype = from_mask(key, value, key_mask), statistics_dtype(query)
        n, mask = (key.shape[-2], key_mask) if self.side == "columns" else (query.shape[-2], query_mask)
        family, options = self.family_and_options()
        if "log_probability" in options and mask is not None:
            options["log_probability"] = torch.zeros(mask.shape, dtype=dtype, device=key.device).where(mask, -torch.inf)
        sketch = family.build(noise, n, self.budget, dtype=dtype, **options)
        if self.side == "columns":
            return sketch_columns(query, source, sketch, inputs.scale), Trace()
        source = source._replace(keys=key.to(dtype), values=value.to(dtype))
        output = sketch_rows(query.to(dtype), source, query_mask, sketch, inputs.scale)
        return saturated(output, query.dtype).to(query.dtype), Trace()


def option_names_of(sketch: str) -> tuple[str, ...]:
    """Return the options of a sketch that a caller may set; probabilities of tokens are not among them."""
    return tuple(name for name in lookup("sketch", sketch, SKETCHES).defaults if name != "log_probability")


def sketch_columns(query: Tensor, source: VirtualKeys, sketch: Sketch, scale: float) -> Tensor:
    """D^-1 A S S^T V, (b, h, n, p_v): attention over the values S S^T V. The exact D makes it quadratic in time."""
    dtype = statistics_dtype(query)  # weights 1/(d p_i) and sums over d columns overflow half precision
    values = sketch.lift(sketch.apply(source.values.to(dtype)))  # (b, h, n_k, p_v)
    source = VirtualKeys(source.keys.to(dtype), values, source.log_weight)
    return narrow(attend(query.to(dtype), source, scale), query.dtype)


def sketch_sampled_columns(
    query: Tensor, source: VirtualKeys, log_probability: Tensor, u: Tensor, d: int, scale: float
) -> tuple[Tensor, Rows]:
    """Apply `sketch_columns` to d columns drawn by log p, (b, h, n_k), and u, (b, h, d); also return them."""
    dtype = statistics_dtype(query)
    sketch = subsampling((u,), source.keys.shape[-2], d, dtype=dtype, log_probability=log_probability)
    columns = Rows(sketch.index[..., 0], sketch.weight[..., 0] > 0)
    return sketch_columns(query, source, sketch, scale), columns


def sketch_rows(query: Tensor, source: VirtualKeys, query_mask: Tensor | None, sketch: Sketch, scale: float) -> Tensor:
    """D^-1 S S^T A V, (b, h, n, p_v). A sampling S takes d exact rows, time O(d n p), any other the n x n scores."""
    # S S^T of a sampling S is diagonal and commutes with D; other S mix rows of A, whose sums differ by D_j / D_i
    if isinstance(sketch, SparseSketch) and not sketch.by_row and sketch.index.shape[-1] == 1:
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
