"""What each part of the cluster sketch is worth: `python -m benchmarks.ablations TEXT [n]`.

On queries, keys and values of MiniLM (layers 0 to 5 pretrained, layer 0 initialized) every variant's relative spectral
error, mean over heads and draws, is divided by that of Skeinformer with 256 columns and 256 pilots. `variant` is the
sketch with everything in dense matrices and a knob for each choice: to be read and measured, not to be fast.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import tyro
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import start
from skeinformer.attention import ClusterNoise, build, skein_attention
from skeinformer.attention.centers import METRIC_QUERIES, RIDGE
from skeinformer.attention.cluster import SAMPLED_KEYS
from skeinformer.cli.measure import exact_attention, spectral_error
from skeinformer.cli.pretrained import pretrained_qkv
from skeinformer.noise import from_generator, gumbel

DRAWS = 2
SIZES: tuple[dict[str, int], ...] = ({"d": 16, "num_pilots": 16}, {"d": 128, "num_pilots": 64})
CHANGES: dict[str, dict[str, Any]] = {
    "the sketch": {},
    "no linear term": {"linear": "off"},
    "linear term not centered": {"linear": "uncentered"},
    "linear term, factor 1": {"linear": "whole"},
    "linear term, factor by as many other rows": {"linear": "held out"},
    "log weight: number of keys": {"log_weight": "count"},
    "log weight: number and variance": {"log_weight": "variance"},
    "means not weighted by mass": {"weighted": False},
    "centers: uniform": {"centers": "uniform"},
    "centers: by mass": {"centers": "mass"},
    "centers: k-means++ by mass": {"centers": "plus_plus"},
    "no Lloyd step": {"steps": 0},
    "3 Lloyd steps": {"steps": 3},
    "1 Lloyd step over all keys": {"sample": None},
    "centers: those of other tokens, and a step": {"centers": "warm"},
    "plain distance": {"metric": "plain"},
    "metric of the pilots": {"metric": "pilots"},
    "metric of all queries": {"metric": "all"},
    "metric of all queries, not centered": {"metric": "uncentered"},
    "distance in keys and values": {"value_share": 0.5},
    "keys projected to 8 dimensions": {"project": 8},
    "buckets by signs of random projections": {"hashed": True},
    "d/4 heaviest keys kept": {"heavy": 0.25},
    "values by ridge on the pilots": {"ridge": 0.1},
}


@dataclass(frozen=True)
class Ablations:
    """What is each part of the cluster sketch worth?"""

    text: tyro.conf.Positional[Path]
    """A .txt or .parquet file."""
    n: tyro.conf.Positional[int] = 4096
    """Tokens n of the text."""

    def run(self) -> None:
        """Print the table; a line for each input as it is done."""
        results: dict[str, dict[str, float]] = {}
        for name, inputs in study_inputs(self.text, self.n):
            results[name] = errors_of(*inputs)
            print(f"{name}: done", file=sys.stderr, flush=True)
        print(table(results))


class Knobs(NamedTuple):
    """The choices of the sketch. The defaults are the library's."""

    steps: int = 1
    sample: int | None = SAMPLED_KEYS
    centers: str = "importance"
    metric: str = "queries"
    value_share: float = 0.0
    project: int | None = None
    hashed: bool = False
    weighted: bool = True
    heavy: float = 0.0
    log_weight: str = "calibrated"
    linear: str = "fitted"
    ridge: float = 0.0


class Seen(NamedTuple):
    """What the pilot rows J see."""

    rows: Tensor  # (h, P)
    queries: Tensor  # (h, P, p)
    normalizer: Tensor  # (h, P, 1), lse_J
    B_J: Tensor  # (h, P, n)
    output: Tensor  # (h, P, p), B_J V
    mass: Tensor  # (h, n), mean_J b_Jj
    scale: float


class Means(NamedTuple):
    """The clusters."""

    assignment: Tensor  # (h, n)
    share: Tensor  # (h, d, n): the weight of each key within its cluster
    keys: Tensor  # (h, d, p)
    values: Tensor  # (h, d, p)
    mass: Tensor  # (h, d)
    size: Tensor  # (h, d): how many keys


def variant(
    query: Tensor,  # (h, n, p)
    key: Tensor,
    value: Tensor,
    noise: ClusterNoise,  # (h, n) each
    other: Tensor | None = None,  # (h, n, p), keys of other tokens, for "warm" centers
    *,
    d: int,
    num_pilots: int,
    **change: Any,
) -> Tensor:
    """The cluster sketch with one choice of Knobs or another, (h, n, p), by dense matrices."""
    knobs = Knobs(**change)
    seen = _look(query, key, value, noise.pilots, num_pilots)
    weight = seen.mass if knobs.weighted else torch.full_like(seen.mass, 1 / key.shape[1])
    assignment = _assign(query, key, value, other, noise, weight, seen, d, knobs)
    means = _means(key, value, weight, seen.mass, assignment, d)
    log_weight = _log_weight(key, means, seen, knobs.log_weight)  # (h, d)
    scores = seen.scale * seen.queries @ means.keys.mT + log_weight[:, None]
    W_J, values = scores.softmax(-1), means.values  # (h, P, d)
    if knobs.ridge:
        values = values + _ridge(W_J, seen.output - W_J @ values, knobs.ridge)
    output = (seen.scale * query @ means.keys.mT + log_weight[:, None]).softmax(-1) @ values
    if knobs.linear != "off":
        fitted = seen
        if knobs.linear == "held out":
            fitted = _look(query, key, value, noise.pilots, num_pilots, skip=num_pilots)
        scores = seen.scale * fitted.queries @ means.keys.mT + log_weight[:, None]
        missed = fitted.output - scores.softmax(-1) @ values
        output = output + _linear_term(query, key, value, weight, means, seen, fitted, missed, knobs.linear)
    return output.scatter(1, seen.rows[..., None].expand_as(seen.output), seen.output)


def _look(query: Tensor, key: Tensor, value: Tensor, u: Tensor, num_pilots: int, skip: int = 0) -> Seen:
    scale = 1 / math.sqrt(query.shape[-1])
    rows = u.topk(skip + num_pilots, -1).indices[:, skip:]
    queries = _take(query, rows)
    scores = scale * queries @ key.mT
    normalizer = scores.logsumexp(-1, keepdim=True)
    B_J = (scores - normalizer).exp()
    return Seen(rows, queries, normalizer, B_J, B_J @ value, B_J.mean(1), scale)


def _assign(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    other: Tensor | None,
    noise: ClusterNoise,
    weight: Tensor,
    seen: Seen,
    d: int,
    knobs: Knobs,
) -> Tensor:
    """The cluster of each key, (h, n)."""
    mass = seen.mass
    root = _root(query, seen.queries, noise.pilots, knobs.metric)  # (h, p, p)
    space = _space(key, root, value, weight, knobs)  # (h, n, r)
    if knobs.hashed:
        return _signs(space, d)
    log_probability = {
        "importance": seen.B_J.square().sum(1).log() / 2 + value.norm(dim=-1).log(),
        "uniform": torch.zeros_like(mass),
        "warm": torch.zeros_like(mass),
        "mass": mass.log(),
        "plus_plus": mass.log(),
    }[knobs.centers]
    ranked = (log_probability + gumbel(noise.centers)).argsort(-1, descending=True)  # (h, n)
    points = _take(space, ranked if knobs.sample is None else ranked[:, : knobs.sample * d])
    found = _plus_plus(space, mass, d) if knobs.centers == "plus_plus" else points[:, :d]
    if knobs.centers == "warm":
        elsewhere = key.flip(1) if other is None else other
        found = _lloyd(_take(elsewhere @ root, ranked[:, : SAMPLED_KEYS * d]), (elsewhere @ root)[:, :d], 1)
    found = _lloyd(points, found, knobs.steps)
    kept = int(knobs.heavy * d)
    if not kept:
        return _nearest(space, found)
    # the clusters of lowest number give way to single keys
    single = torch.arange(kept).expand(len(mass), kept)
    return (_nearest(space, found[:, kept:]) + kept).scatter_(1, mass.topk(kept, -1).indices, single)


def _lloyd(points: Tensor, centers: Tensor, steps: int) -> Tensor:
    d = centers.shape[1]
    for _ in range(steps):
        members = F.one_hot(_nearest(points, centers), d).to(points)  # (h, m, d)
        total = members.sum(1)[..., None]
        centers = torch.where(total > 0, members.mT @ points / total.clamp(min=1), centers)
    return centers


def _signs(space: Tensor, d: int) -> Tensor:
    """Locality-sensitive hashing: the signs of floor(log2 d) random projections of the centered keys, (h, n)."""
    bits = int(math.log2(d))
    directions = torch.randn(space.shape[-1], bits, generator=torch.Generator().manual_seed(0)).to(space)
    signs = (space - space.mean(1, keepdim=True)) @ directions > 0
    return (signs.long() << torch.arange(bits)).sum(-1)


def _means(key: Tensor, value: Tensor, weight: Tensor, mass: Tensor, assignment: Tensor, d: int) -> Means:
    member = F.one_hot(assignment, d).to(key)  # (h, n, d)
    weighted = member * weight[..., None]
    share = (weighted / weighted.sum(1, keepdim=True).clamp(min=1e-30)).mT
    return Means(assignment, share, share @ key, share @ value, (mass[:, None] @ member)[:, 0], member.sum(1))


def _log_weight(key: Tensor, means: Means, seen: Seen, choice: str) -> Tensor:
    """What a cluster's score gains, (h, d); -inf for an empty one."""
    scores = seen.scale * seen.queries @ means.keys.mT  # (h, P, d)
    log_weight = means.size.log()
    if choice == "calibrated":
        mean = (scores - seen.normalizer).logsumexp(1) - math.log(scores.shape[1])
        log_weight = means.mass.log() - mean
    elif choice == "variance":
        around = (seen.scale * seen.queries @ key.mT).square() @ means.share.mT - scores.square()  # (h, P, d)
        log_weight = log_weight + around.mean(1) / 2
    return log_weight.where(means.size > 0, -torch.inf)


def _ridge(W_J: Tensor, missed: Tensor, ridge: float) -> Tensor:
    """The change of values, (h, d, p), that mends the pilots best at a price for its size."""
    gram = W_J @ W_J.mT
    size = ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
    change: Tensor = W_J.mT @ torch.linalg.solve(gram + size * torch.eye(W_J.shape[1]), missed)
    return change


def _linear_term(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    means: Means,
    seen: Seen,
    fitted: Seen,
    missed: Tensor,
    choice: str,
) -> Tensor:
    """a s (Q - mean q_J) C, (h, n, p), with the factor a that fits what the rows `fitted` miss."""
    around = (key - _take(means.keys, means.assignment)) * weight[..., None]
    covariance = around.mT @ (value - _take(means.values, means.assignment))  # (h, p, p)
    center = torch.zeros_like(seen.queries[:, :1]) if choice == "uncentered" else seen.queries.mean(1, keepdim=True)
    term = seen.scale * (fitted.queries - center) @ covariance
    along, size = (missed * term).sum((1, 2)), term.square().sum((1, 2))
    factor = torch.ones_like(size) if choice == "whole" else (along / size).clamp(0, 1)
    return factor[:, None, None] * seen.scale * (query - center) @ covariance


def _root(query: Tensor, pilots: Tensor, u: Tensor, metric: str) -> Tensor:
    """R with R R^T the metric, (h, p, p)."""
    p = query.shape[-1]
    if metric == "plain":
        return torch.eye(p).to(query).expand(len(query), p, p)
    asked = {
        "pilots": pilots,
        "queries": _take(query, u.topk(min(METRIC_QUERIES * p, u.shape[-1]), -1, largest=False).indices),
    }.get(metric, query)
    if metric == "uncentered":  # with the queries' negatives the mean is 0
        asked = torch.cat([query, -query], 1)
    asked = asked - asked.mean(1, keepdim=True)
    covariance = asked.mT @ asked  # (h, p, p)
    size = covariance.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None]
    root: Tensor = torch.linalg.cholesky(covariance / size + RIDGE * torch.eye(p).to(query))
    return root


def _space(key: Tensor, root: Tensor, value: Tensor, weight: Tensor, knobs: Knobs) -> Tensor:
    """Where distances are measured: the keys, mapped and extended."""
    space = key @ root
    if knobs.project is not None:
        directions = torch.randn(key.shape[-1], knobs.project, generator=torch.Generator().manual_seed(0))
        space = space @ directions.to(space)
    if knobs.value_share:
        spread = [
            (weight[..., None] * (x - weight[:, None] @ x).square()).sum((1, 2), keepdim=True) for x in (space, value)
        ]
        space = torch.cat([space, knobs.value_share * (spread[0] / spread[1]).sqrt() * value], -1)
    return space


def _nearest(x: Tensor, centers: Tensor) -> Tensor:
    return (x @ centers.mT - centers.square().sum(-1)[:, None] / 2).argmax(-1)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))


def _plus_plus(x: Tensor, mass: Tensor, d: int) -> Tensor:
    """k-means++ centers (Arthur and Vassilvitskii 2007): each drawn by mass times squared distance to those before."""
    generator = torch.Generator().manual_seed(0)
    centers = _take(x, mass.multinomial(1, generator=generator))
    distance = (x - centers).square().sum(-1)
    while centers.shape[1] < d:
        new = _take(x, (mass * distance).clamp(min=1e-38).multinomial(1, generator=generator))
        centers, distance = torch.cat([centers, new], 1), torch.minimum(distance, (x - new).square().sum(-1))
    return centers


def study_inputs(text: Path, n: int) -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor, Tensor]]]:
    """The seven inputs by name: queries, keys and values of the first n tokens, and the keys of the next n."""
    for weights, layer in (("initialized", 0), *(("pretrained", layer) for layer in range(6))):
        qkv = pretrained_qkv(n, layer=layer, text=text, weights=weights)
        _, other, _ = pretrained_qkv(n, offset=n, layer=layer, text=text, weights=weights)
        yield f"{'layer' if weights == 'pretrained' else weights} {layer}", (*qkv, other)


def mean_error(output: Tensor, truth: Tensor) -> float:
    """The relative spectral error, mean over heads."""
    return float(spectral_error(output, truth).mean())


@torch.no_grad()
def errors_of(query: Tensor, key: Tensor, value: Tensor, other: Tensor) -> dict[str, float]:
    """Errors of V-mean, of the library at both sizes and of every variant, each over Skeinformer's, mean over draws."""
    truth = exact_attention(query, key, value)
    errors: dict[str, float] = {"V-mean": mean_error(value.mean(-2, keepdim=True).expand_as(truth), truth)}
    skein = 0.0
    for seed in range(DRAWS):
        generator = torch.Generator().manual_seed(seed)
        output = skein_attention(query, key, value, budget=256, generator=generator)
        skein += mean_error(output, truth) / DRAWS
        rand = from_generator((query.shape[0], query.shape[1]), generator=generator)
        noise = ClusterNoise(rand(query.shape[2]), rand(key.shape[2]))
        for size in SIZES:
            d, num_pilots = size["d"], size["num_pilots"]
            module = build("cluster", head_dim=query.shape[-1], budget=d, num_pilots=num_pilots)
            outputs = {"library": module(query, key, value, noise=noise)}
            flat = ClusterNoise(*(x[0] for x in noise))
            for name, change in CHANGES.items():
                outputs[name] = variant(query[0], key[0], value[0], flat, other[0], **{**size, **change})[None]
            for name, output in outputs.items():
                label = f"{d}/{num_pilots} {name}"
                errors[label] = errors.get(label, 0.0) + mean_error(output, truth) / DRAWS
    return {name: error / skein for name, error in errors.items()}


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Markdown: a row for each variant, a column for each input, and the geometric mean over inputs."""
    lines = [f"| variant | {' | '.join(results)} | geometric mean |", "|---" * (len(results) + 2) + "|"]
    for name in next(iter(results.values())):
        row = [errors[name] for errors in results.values()]
        mean = math.exp(sum(map(math.log, row)) / len(row))
        lines.append(f"| {name} | {' | '.join(f'{x:.3f}' for x in row)} | {mean:.3f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(start(Ablations))
