"""A sketch for each head by the error that is accepted: the cheapest rung of a ladder that keeps it, or exact.

Heads differ: one is sketched well with 16 clusters, another needs its near keys, a third is too peaked for any sketch.
For each example and head some check rows are computed exactly. The cheapest rung is tried on all heads, on the check
rows alone. From its clusters and the exact rows one can tell what the other rungs will probably leave, so that they are
tried only where they promise enough. A head gets a rung where the bound of its error is within the tolerance
(`certificate.py`); where none is, it is exact. The choice has no gradient. It depends on the example, the seed, the
options and the length of the call, padding included, and may differ from step to step of a training.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import NUM_CHECKS, Call, Method, Trace, attend_once
from skeinformer.attention.certificate import ExactRows, Info, estimate_error
from skeinformer.attention.check_rows import Checks, draw_checks, rows_to_draw
from skeinformer.attention.cluster import Cluster, ClusterNoise, Clusters
from skeinformer.attention.costs import CLUSTER_COSTS, is_faster, pairs_of_sketch
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.sketch_method import Sketch, attend_sketched
from skeinformer.attention.virtual_keys import attend, attend_with_lse, from_mask
from skeinformer.checks import check_count, check_number
from skeinformer.kernels.choice import needs_grad, statistics_dtype
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import Rand

TOLERANCE = 0.1  # the default: see docs/tolerance.md
GAIN = 0.35  # the error of a sketch is about in proportion to d^-GAIN
HOPE = 1.5  # a rung that costs nothing is tried where it promises at most so many times the tolerance
TRIALS = 6  # the first rung is tried where exact attention takes so many times as long
FITTED = 0.8  # the linear term, which `near_rows` leaves out, takes about a fifth off the error


class Rung(NamedTuple):
    """A cluster sketch that a head may get."""

    budget: int
    num_pilots: int
    window: int

    def __str__(self) -> str:
        return f"{'window + ' if self.window else ''}{self.budget} clusters"

    def method(self) -> Cluster:
        return Cluster(budget=self.budget, num_pilots=self.num_pilots, window=self.window)

    def pairs(self, n: int, n_k: int, head_dim: int, training: bool, device: str) -> int:
        """Return its cost, in pairs of a query and a key of exact attention."""
        cost = CLUSTER_COSTS[training]
        return pairs_of_sketch(cost, n, n_k, head_dim, self.budget, self.num_pilots, self.window, device)


# the sketches that a head may get; the cheapest must have no window: from its clusters follows what the others promise
LADDER = (Rung(16, 16, 0), Rung(128, 64, 0), Rung(16, 16, 64), Rung(128, 64, 64))
EXACT = -1  # in place of the number of a rung


class AdaptiveNoise(NamedTuple):
    """Uniform numbers in (0, 1)."""

    pilots: Tensor  # (b, h, n), as of the cluster sketch
    centers: Tensor  # (b, h, n_k), likewise
    checks: Tensor  # (b, h, n), which rows are computed exactly


class AdaptiveInfo(NamedTuple):
    """What each head got, and how far off it is."""

    rung: Tensor  # (b, h) the number of the rung in the ladder, -1 for exact attention
    error: Tensor  # (b, h) estimated relative Frobenius error of the output
    error_se: Tensor  # (b, h) its standard error
    error_upper: Tensor  # (b, h) a bound of the error


class _Judge(NamedTuple):
    """Check rows of m heads, and what is exact there."""

    checks: Checks  # (m, 1, C)
    queries: Tensor  # (m, 1, C, p)
    exact: Tensor  # (m, 1, C, p_v)

    def of(self, heads: Tensor) -> "_Judge":
        rows, (chance, candidates) = self.checks.rows, self.checks[1:]
        rows = rows._replace(index=rows.index[heads], live=None if rows.live is None else rows.live[heads])
        return _Judge(Checks(rows, chance[heads], candidates[heads]), self.queries[heads], self.exact[heads])

    def error(self, rows: Tensor) -> Info:
        """Estimate the error of outputs from their check rows, (m, 1, C, p_v)."""
        drawn = ExactRows(rows, self.exact, self.checks.rows.is_live())
        return estimate_error(drawn, self.checks, None, rows.isfinite().all(-1).all(-1))


class Adaptive(Method):
    """The cheapest of some cluster sketches whose error is within a tolerance, for each example and head; else exact.

    Args:
        tolerance: The relative Frobenius error of each head's output that is accepted.
        num_checks: How many rows are computed exactly to estimate the error.
        only_faster: Leave out sketches that take longer than exact attention at this length.
    """

    budget: int = None  # type: ignore[assignment]  # the rungs have their own
    tolerance: float = TOLERANCE
    num_checks: int = NUM_CHECKS
    only_faster: bool = True

    ladder: ClassVar[tuple[Rung, ...]] = LADDER

    def __post_init__(self) -> None:
        super().__post_init__()
        if not check_number("tolerance", self.tolerance, "above 0, a relative error such as 0.1") > 0:
            raise ValueError(f"tolerance must be above 0, a relative error such as 0.1, got {self.tolerance}")
        check_count("num_checks", self.num_checks)

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        return AdaptiveNoise(rand(query.shape[-2]), rand(key.shape[-2]), rand(query.shape[-2]))

    @classmethod
    def name_of(cls, number: int) -> str:
        """Return the name of a rung by its number."""
        return "exact" if number == EXACT else str(cls.ladder[number])

    def rungs(self, n: int, n_k: int, head_dim: int, training: bool, device: str) -> list[tuple[int, Rung]]:
        """Return the rungs that can be used at these sizes, with their numbers, the cheapest first."""
        priced = [
            (rung.pairs(n, n_k, head_dim, training, device), i, rung)
            for i, rung in enumerate(self.ladder)
            if not rung.window or n == n_k
        ]
        if self.only_faster:  # to be tried on all heads, the first must be cheap: it may be of use to few of them
            priced = [each for each in priced if is_faster(each[0], n, n_k)]
            priced = priced if self.is_faster(n, n_k, head_dim, training, device) else []
        return [(i, rung) for _, i, rung in sorted(priced, key=lambda each: each[0])]

    def is_faster(self, n: int, n_k: int, head_dim: int, training: bool, device: str) -> bool:
        plain = [rung for rung in self.ladder if not rung.window]
        costs = [rung.pairs(n, n_k, head_dim, training, device) for rung in plain]
        return not self.only_faster or any(is_faster(TRIALS * pairs, n, n_k) for pairs in costs)

    def attend(self, inputs: Inputs, noise: Any) -> tuple[Tensor, Trace]:
        query, key, value = inputs[:3]
        (b, h, n, p), n_k = query.shape, key.shape[2]
        rungs = self.rungs(n, n_k, p, needs_grad(query, key, value), query.device.type)
        rung = torch.full((b, h), EXACT, device=query.device)
        if not rungs:
            return attend(query, from_mask(key, value, inputs.key_mask), inputs.scale), Trace(details=rung)
        heads = _one_head_each(inputs)
        parts = self.climb(heads, ClusterNoise(*(x.flatten(0, 1)[:, None] for x in noise[:2])), noise[2], rungs)
        for number, which, _ in parts:
            rung.view(-1)[which] = number
        return _joined([(which, output) for _, which, output in parts], value.new_empty(0), (b, h)), Trace(details=rung)

    def climb(
        self, inputs: Inputs, noise: ClusterNoise, u: Tensor, rungs: Sequence[tuple[int, Rung]]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """Return for each rung in use its number, its heads and their output, (m', 1, n, p_v); inputs: (m, 1, n, p)."""
        with torch.no_grad():
            judge = draw_judge(inputs, u.flatten(0, 1)[:, None], self.num_checks)
        left = torch.arange(len(inputs.query), device=inputs.query.device)
        parts, promise, found = [], dict[int, Tensor](), dict[tuple[int, int], tuple[Tensor, Clusters]]()
        for number, rung in rungs:
            tried = left
            if promise:
                clusters_found = rung._replace(window=0) if rung[:2] in found else None
                hope = (HOPE - self.share_of_exact(rung, clusters_found, inputs)) * self.tolerance
                tried = left[promise[rung.window][left] * rung.budget**-GAIN <= hope]
            if not len(tried):
                continue
            some, seen, method = _heads_of(inputs, tried), judge.of(tried), rung.method()
            with torch.no_grad():
                heads, clusters = found.get(rung[:2], (None, None))
                if heads is None or clusters is None or not torch.isin(tried, heads).all():
                    heads, clusters = tried, method.find_clusters(some, _heads_of(noise, tried))
                    found[rung[:2]] = heads, clusters
                sketch, _ = method.merge(some, take(clusters, torch.searchsorted(heads, tried), len(heads)))
                error = seen.error(rows_of(sketch, seen, some))
                good = error.error_upper[:, 0] <= self.tolerance
                if not promise:
                    windows = {each.window for _, each in rungs}
                    promise = first_promise(some, seen, sketch, error, rung, windows)
            if good.any():
                index = good.nonzero()[:, 0]
                some, sketch = _heads_of(some, index), take(sketch, index, len(tried))
                parts.append((number, tried[index], attend_sketched(method, some, sketch)))
            left = left[~torch.isin(left, tried[good])]
        for head in left[:, None]:  # one by one: a view needs no copy
            at = slice(int(head), int(head) + 1)
            mask = None if inputs.key_mask is None else inputs.key_mask[at]
            source = from_mask(inputs.key[at], inputs.value[at], mask)
            parts.append((EXACT, head, attend(inputs.query[at], source, inputs.scale)))
        return parts

    def share_of_exact(self, rung: Rung, without: Rung | None, inputs: Inputs) -> float:
        """Return the time of a rung as a share of that of exact attention, without what another has computed."""
        (n, p), n_k = inputs.query.shape[2:], inputs.key.shape[2]
        sizes = (n, n_k, p, needs_grad(*inputs[:3]), inputs.query.device.type)
        pairs = rung.pairs(*sizes) - (0 if without is None else without.pairs(*sizes))
        return min(pairs / (n * n_k), 1.0)

    def info(self, inputs: Inputs, trace: Trace, error: Info) -> AdaptiveInfo:
        return AdaptiveInfo(trace.details, *error)


def draw_judge(inputs: Inputs, u: Tensor, size: int) -> _Judge:
    """Draw check rows, half of them by how far their queries are from the mean, and compute them exactly."""
    query, n = inputs.query, inputs.query.shape[2]
    candidates = rows_to_draw(query, inputs.query_mask, None).to(u.dtype)
    wide = query.to(statistics_dtype(query))
    distance = torch.linalg.vector_norm(wide - wide.mean(2, keepdim=True), dim=-1) * candidates  # (m, 1, n)
    distance = distance.nan_to_num(0, 0, 0)
    shares = [x / x.sum(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) for x in (candidates, distance)]
    checks = draw_checks(inputs.world, u, shares[0] + shares[1], size, n)
    queries = gather_rows(query, checks.rows.index)
    return _Judge(checks, queries, attend(queries, from_mask(inputs.key, inputs.value, inputs.key_mask), inputs.scale))


def rows_of(sketch: Sketch, judge: _Judge, inputs: Inputs) -> Tensor:
    """Return the check rows of a sketch's output, (m, 1, C, p_v), but for pilots, which would be exact."""
    if sketch.near is not None:
        return gather_rows(sketch.near.output, judge.checks.rows.index)
    rows, _ = attend_with_lse(judge.queries, sketch.virtual, inputs.scale)
    return rows if sketch.slope is None else rows + judge.queries @ sketch.slope


def first_promise(
    inputs: Inputs, judge: _Judge, sketch: Sketch, error: Info, rung: Rung, windows: set[int]
) -> dict[int, Tensor]:
    """Guess the errors of other rungs, (m), from the first: by window that of a sketch with one cluster."""
    scale = rung.budget**GAIN
    promise = {0: error.error[:, 0] * scale}
    for window in windows - {0}:
        promise[window] = judge.error(near_rows(inputs, judge, sketch, window)).error[:, 0] * (scale * FITTED)
    return promise


def near_rows(inputs: Inputs, judge: _Judge, sketch: Sketch, window: int) -> Tensor:
    """Guess the check rows of a sketch with a window from one without: near keys exactly, clusters for what is left.

    The sum of the weights is taken from exact attention, and the means of clusters are not corrected for what is near.
    """
    rows, w, dtype = judge.checks.rows.index[:, 0], window, sketch.saved[1].dtype
    queries = judge.queries[:, 0].to(dtype) * inputs.scale
    log_weight = from_mask(inputs.key, inputs.value, inputs.key_mask).log_weight
    assignment, weight, total = (x.view(len(rows), -1) for x in sketch.saved[:3])
    share, n = weight / total.gather(-1, assignment), inputs.key.shape[2]
    output = torch.empty_like(judge.exact[:, 0], dtype=dtype)
    far = torch.baddbmm(sketch.virtual.log_weights(), queries, sketch.virtual.keys[:, 0].to(dtype).mT)  # (m, C, d)
    near_share, mass = torch.zeros_like(far), torch.empty_like(output[..., :1])
    places = (rows // w - 1)[..., None] * w + torch.arange(3 * w, device=rows.device)  # (m, C, 3 w)
    inside, places = (places >= 0) & (places < n), places.clamp(0, n - 1)
    buffer = queries.new_empty(rows.shape[1], n)
    for head in range(len(rows)):  # one by one: the scores of a head stay in the cache
        at, key, value = places[head], inputs.key[head, 0].to(dtype), inputs.value[head, 0].to(dtype)
        scores = torch.mm(queries[head], key.T, out=buffer)
        if log_weight is not None:
            scores += log_weight[head]
        weights = torch.softmax(scores, -1, out=scores).gather(-1, at).mul_(inside[head])
        mass[head, :, 0] = weights.sum(-1)
        torch.mm(scores.zero_().scatter_add_(-1, at, weights), value, out=output[head])
        near_share[head].scatter_add_(-1, assignment[head][at], share[head][at] * inside[head])
    far += (1 - near_share).clamp_(min=1e-6).log_()
    values = sketch.virtual.values[:, 0].to(dtype)
    return (output + (1 - mass) * (far.softmax(-1) @ values))[:, None].to(judge.exact.dtype)


def take(x: Any, index: Tensor, count: int) -> Any:
    """Return some of `count` heads of all tensors of nested tuples, whose first dimension they are."""
    if len(index) == count:
        return x
    if isinstance(x, Tensor):
        return x[index]
    if isinstance(x, tuple):
        parts = [take(each, index, count) for each in x]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def _one_head_each(inputs: Inputs) -> Inputs:
    """Make each example and head an example of its own: (b, h, n, p) -> (b h, 1, n, p)."""
    h = inputs.query.shape[1]
    tensors = [x.flatten(0, 1)[:, None] for x in inputs[:3]]
    masks = [None if x is None else x.expand(-1, h, -1).flatten(0, 1)[:, None] for x in inputs[3:5]]
    return inputs._replace(query=tensors[0], key=tensors[1], value=tensors[2], key_mask=masks[0], query_mask=masks[1])


def _heads_of(x: Any, index: Tensor) -> Any:
    """Return the heads `index` of all tensors of a tuple; the tuple itself where these are all."""
    if len(index) == len(x[0]):
        return x
    return type(x)(*(each[index] if isinstance(each, Tensor) else each for each in x))


def _joined(parts: Sequence[tuple[Tensor, Tensor]], like: Tensor, shape: tuple[int, int]) -> Tensor:
    """Put the outputs of heads into their places: (b, h, n, p_v)."""
    if len(parts) == 1:
        output = parts[0][1]
    elif needs_grad(*(x for _, x in parts)):
        output = torch.cat([x for _, x in parts])[torch.cat([which for which, _ in parts]).argsort()]
    else:
        output = like.new_empty(shape[0] * shape[1], *parts[0][1].shape[1:])
        for which, part in parts:
            output[which] = part.to(output.dtype)
    return output.view(*shape, *output.shape[2:])


def adaptive_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tolerance: float = TOLERANCE,
    num_checks: int = NUM_CHECKS,
    only_faster: bool = True,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    scale: float | None = None,
    noise: Noise | None = None,
    generator: torch.Generator | None = None,
    return_info: bool = False,
) -> Any:
    """Approximate softmax(s Q K^T) V within a relative error of each head, by the cheapest sketch that keeps it.

    Heads for which no sketch does are exact. Calls of few tokens are exact: no sketch would be faster.

    Args:
        query, key, value: (b, h, n, p), (b, h, n_k, p) and (b, h, n_k, p_v).
        tolerance, num_checks, only_faster: Options of `Adaptive`.
        key_mask: (b, n_k), True where a key is real.
        query_mask: (b, n), True where a query is real; rows of other queries are zero.
        scale: s, 1/sqrt(p) by default.
        noise: An AdaptiveNoise, instead of drawing.
        generator: Where numbers are drawn from; torch's global state by default.
        return_info: Whether to return (output, AdaptiveInfo) with what each head got and its estimated error.

    Returns:
        The output, (b, h, n, p_v), or with `return_info` the output and an AdaptiveInfo.

    Raises:
        ValueError: Shapes, devices or values do not fit; the message names which.
        TypeError: An argument has the wrong type.

    Example:
        >>> output, info = adaptive_attention(q, k, v, tolerance=0.2, return_info=True)
        >>> info.rung
    """
    options = (None, tolerance, num_checks, only_faster)
    call = Call(query, key, value, key_mask, query_mask, scale, None, noise, generator)
    return attend_once(Adaptive, options, call, return_info, num_checks, None)
