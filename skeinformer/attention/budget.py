"""How large must d be? The paper leaves it open; the certificate answers it on the inputs at hand."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from skeinformer.attention.certificate import Info, bound_of_mean, estimate_error
from skeinformer.attention.checks import Checks, alone, draw_checks, row_mass, rows_to_draw
from skeinformer.attention.inputs import Inputs, clear_padding, default_scale, prepare
from skeinformer.attention.pilots import Pilots, column_mass, instead, log_square_of
from skeinformer.attention.selection import Selection
from skeinformer.attention.skein import skein_attention
from skeinformer.attention.virtual_keys import VirtualKeys, attend, from_mask
from skeinformer.kernels import pilots as kernels
from skeinformer.kernels.choice import no_autocast
from skeinformer.kernels.rows import gather_rows
from skeinformer.noise import from_generator
from skeinformer.registry import check_choice, check_count, check_number

CHECKS_OF_CHOICE = 64  # rows that all sizes are judged by: they are computed once
# draws of the sketch that have to meet the tolerance: that they do and the next one does not has the probability
# p (1 - p)^12, where p is that of one draw above it. It is at most 12^12 / 13^13 = 0.029 for each size that is tried
NUM_DRAWS = 12

Judge = tuple[Checks, Tensor]  # check rows, and these rows of exact attention, (b, h, C, p_v)


def choose_budget(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tolerance: float,
    statistic: Literal["worst", "mean"] = "worst",
    attention: Callable[..., Any] = skein_attention,
    generator: torch.Generator | None = None,
    num_checks: int = CHECKS_OF_CHOICE,
    **options: Any,
) -> int:
    """The smallest power of two d for which `error_upper` is at most `tolerance` in twelve draws of the sketch.

    The bound is that of the certificate, of the worst example and head, or of their mean. `options` go to `attention`:
    masks, pilots and the rest. Where no d below the number of keys will do, warns and returns that number.
    Time: that of `attention` at each d = 1, 2, 4, ... up to the answer, and again where it meets the tolerance.
    `num_checks` exact rows are computed once for all sizes, and so is each pilot row.
    """
    if not check_number("tolerance", tolerance, "above 0, a relative error such as 0.1") > 0:
        raise ValueError(f"tolerance must be above 0, a relative error such as 0.1, got {tolerance}")
    check_choice("statistic", statistic, ("worst", "mean"))
    check_count("num_checks", num_checks)
    for reserved in ("budget", "return_info", "noise"):
        if reserved in options:
            raise TypeError(f"choose_budget sets {reserved!r} itself; leave it out")
    if options.get("group") is not None:
        raise ValueError("choose_budget works in one process, on tokens that are all here; leave the group out")
    inputs = prepare(query, key, value, options.get("key_mask"), options.get("query_mask"))
    device = query.device if generator is None else generator.device
    seeds = torch.randint(2**62, (1 + NUM_DRAWS,), generator=generator, device=device).tolist()
    draws = [Draw(attention, (query, key, value), options, seed) for seed in seeds[1:]]
    judge: Judge | None = None
    d, n, reached = 1, key.shape[-2], float("inf")
    while d < n:
        for draw in draws:  # the next only where this one meets the tolerance
            output = clear_padding(draw(d), inputs.query_mask)
            judge = judge or make_judge(inputs, output, seeds[0], num_checks, options.get("scale"))
            reached = _upper(estimate_error(output, *judge, None), statistic)
            if not reached <= tolerance:
                break
        else:
            return d
        d *= 2
    if n == 1:
        return 1
    found = f"the bound of the {statistic} error is {reached:.3g}"
    if not output.isfinite().all():
        found = "the output is not finite: look for NaN and inf in query, key and value"
    warnings.warn(
        f"no power of two below n = {n} meets the tolerance {tolerance:g}: for the largest, {d // 2}, {found}; "
        f"returning {n}, all of the keys",
        stacklevel=2,
    )
    return n


class Draw:
    """An attention whose draws are the same at every size, and begin alike: each pilot row is computed once."""

    def __init__(self, attention: Callable[..., Any], tensors: tuple[Tensor, ...], options: Any, seed: int) -> None:
        self.attention, self.tensors, self.options, self.seed = attention, tensors, options, seed
        self.pilots = KeptPilots()

    @torch.no_grad()
    def __call__(self, budget: int) -> Tensor:
        generator = torch.Generator(self.tensors[0].device).manual_seed(self.seed)
        with kept_pilots(self.pilots):
            output: Tensor = self.attention(*self.tensors, budget=budget, generator=generator, **self.options)
        return output


class KeptPilots:
    """The pilots of the last call: those of the next one, on the same tensors, are computed only as far as new."""

    def __init__(self) -> None:
        self.last: Pilots | None = None

    def extend(self, query: Tensor, rows: Selection, source: VirtualKeys, scale: float) -> Pilots:
        """The pilots of `rows`, with what they give to the columns. Ranks of one draw begin with the same rows."""
        last, count = self.last, rows.indices.shape[-1]
        known = 0 if last is None else last.rows.indices.shape[-1]
        if last is None or known > count or not torch.equal(rows.indices[..., :known], last.rows.indices):
            last, known = None, 0
        if last is None or known < count:
            more = Selection(rows.indices[..., known:], rows.live[..., known:])
            queries = gather_rows(query, more.indices)
            formed = kernels.form_rows(
                queries, source.keys, source.values, more.live, source.log_weight, scale, with_mass=True
            )
            new = Pilots(more, queries, *formed)
            new = new._replace(log_square=log_square_of(new, source, scale), mass=column_mass(new, source, scale))
            last = new if last is None else _joined(last, new)
        self.last = last
        return last


def _joined(first: Pilots, second: Pilots) -> Pilots:
    """The pilots of both."""
    pairs = zip(first[1:4], second[1:4], (-2, -2, -1), strict=True)
    queries, output, normalizer = (torch.cat([x, y], dim) for x, y, dim in pairs)
    rows = Selection(*(torch.cat(pair, -1) for pair in zip(first.rows, second.rows, strict=True)))
    (square, mass), (more_square, more_mass) = _columns(first), _columns(second)
    counts = [x.rows.live.sum(-1, keepdim=True).to(mass.dtype) for x in (first, second)]
    mass = (mass * counts[0] + more_mass * counts[1]) / (counts[0] + counts[1]).clamp(min=1)
    return Pilots(rows, queries, output, normalizer, torch.logaddexp(square, more_square), mass)


def _columns(pilots: Pilots) -> tuple[Tensor, Tensor]:
    assert pilots.log_square is not None
    assert pilots.mass is not None
    return pilots.log_square, pilots.mass


@contextmanager
def kept_pilots(pilots: KeptPilots) -> Iterator[None]:
    """Inside, calls on the same tensors, whose draws begin alike, compute each pilot row once. Without gradients."""
    before, instead.compute = instead.compute, pilots.extend
    try:
        yield
    finally:
        instead.compute = before


@torch.no_grad()
def make_judge(inputs: Inputs, output: Tensor, seed: int, size: int, scale: float | None) -> Judge:
    """Check rows, drawn from all real rows by what is guessed of some output, and these rows of exact attention."""
    query, key, value, key_mask, query_mask = inputs
    scale = default_scale(query, scale)
    generator = torch.Generator(query.device).manual_seed(seed)
    u = from_generator((query.shape[0], query.shape[1]), generator=generator, device=query.device)(query.shape[-2])
    with no_autocast(query.device):
        checks = draw_checks(
            u, row_mass(inputs, output, rows_to_draw(query, query_mask, None), scale, alone(inputs)), size
        )
        exact = attend(gather_rows(query, checks.indices), from_mask(key, value, key_mask), scale)
    return checks, exact


def _upper(info: Info, statistic: str) -> float:
    """The bound for the worst example and head, or for the mean over them."""
    if statistic == "worst":
        return float(info.error_upper.max())
    return float(bound_of_mean(info))
