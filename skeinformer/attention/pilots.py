"""Pilot rows and importance: which queries are computed exactly, and which keys matter to them.

Lines 1 to 5 of Algorithm 1 of Chen et al. (2022). Everything that selects is in log space and carries no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.virtual_keys import VirtualKeys, attend_with_normalizer, statistics_dtype
from skeinformer.noise import gumbel
from skeinformer.kernels.rows import gather_rows, is_one_batch, plain_cpu

EMPTY = -1e30  # the log weight of a pilot that is none: a finite stand-in for -inf
CACHED = 2**19  # scores that are worked on at a time
HELD = 2**21  # scores of one head that may be held
FAINT = 1e-30  # a sum of squares below has lost digits, or all
FAINTEST = 30.0  # a value of norm 0 counts as e^-30 of the largest: it adds nothing to B V, but its key has mass


class Selection(NamedTuple):
    """Distinct indices in order of rank; `live` is False where there were fewer candidates than places."""

    indices: Tensor  # (..., k)
    live: Tensor  # (..., k)

    def marked(self, size: int) -> Tensor:
        """The indices as (..., size), -1 for an empty slot."""
        index = self.indices.where(self.live, -1)
        return torch.nn.functional.pad(index, (0, size - index.shape[-1]), value=-1)


class Pilots(NamedTuple):
    """Rows J of the attention, exact."""

    rows: Selection  # (b, h, P)
    queries: Tensor  # (b, h, P, p)
    output: Tensor  # (b, h, P, p_v), B_J V
    normalizer: Tensor  # (b, h, P), log of the row sums of A
    log_square: Tensor | None = None  # (b, h, n), log sum_J b_ji^2 where it came with the rest
    mass: Tensor | None = None  # (b, h, n), mean_J b_ji where it was asked for and came with the rest


def top(score: Tensor, k: int) -> Selection:
    """The k largest scores; -inf never counts as chosen."""
    values, index = score.topk(min(k, score.shape[-1]), -1)
    return Selection(index, values > -torch.inf)


def uniform_rows(u: Tensor, mask: Tensor | None, k: int) -> Selection:
    """k real positions, uniformly without replacement: the largest of their uniform numbers. O(n).

    The paper draws pilots with replacement; without concentrates at least as well (Hoeffding 1963) and cannot hold a
    row twice. The next ranks of the same numbers are a uniform sample of the rest.
    """
    return top(u if mask is None else u.where(mask, -torch.inf), k)


def compute_pilots(
    query: Tensor, rows: Selection, source: VirtualKeys, scale: float, *, with_mass: bool = False
) -> Pilots:
    """B_J V and the row sums, lines 2 and 3. Time O(P n p), memory O((P + n) p).

    Where the rows of a head fit into the cache, no gradient is recorded and the precision is that of statistics, they
    are formed: each score is computed once, for the output, for Eq. (5) and for the columns' mass if that is asked for.
    Else they stay inside the fused kernel.
    """
    queries = gather_rows(query, rows.indices)  # (b, h, P, p)
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in (query, source.keys, source.values))
    small = queries.shape[-2] * source.keys.shape[-2] <= HELD
    if small and not recorded and plain_cpu(query) and query.dtype == statistics_dtype(query):
        return Pilots(rows, queries, *_form_rows(queries, rows.live, source, scale, with_mass))
    output, normalizer = attend_with_normalizer(queries, source, scale)
    return Pilots(rows, queries, output, normalizer)


def _form_rows(
    queries: Tensor, live: Tensor, source: VirtualKeys, scale: float, with_mass: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """B_J V, the normalizers, log sum_J b_ji^2 over live pilots, or None where it is too small for its precision, and
    mean_J b_ji if asked for.

    A few heads at a time, one per thread or more, in one piece of memory: a fresh one costs more than a sum.
    """
    if queries.dim() == 4 and not (is_one_batch(source.keys) and is_one_batch(source.values)):
        return _form_rows_by_example(queries, live, source, scale, with_mass)
    *batch, num_pilots, width = queries.shape
    m, p_v = source.values.shape[-2:]
    queries = queries.reshape(-1, num_pilots, width) * scale  # (B, P, p)
    keys, values = source.keys.reshape(-1, m, width), source.values.reshape(-1, m, p_v)
    weighted = source.log_weight is not None
    log_weight = source.log_weights().reshape(-1, 1, m) if weighted else None
    output = values.new_empty(len(queries), num_pilots, p_v)
    normalizer = values.new_empty(len(queries), num_pilots, 1)
    squares = values.new_empty(len(queries), 1, m)
    mass = values.new_empty(len(queries), 1, m) if with_mass else None
    live = live.reshape(-1, num_pilots, 1)
    heads = min(max(CACHED // (num_pilots * m), torch.get_num_threads()), 8 * HELD // (num_pilots * m), len(queries))
    held = values.new_empty(heads, num_pilots, m)
    for i in range(0, len(queries), heads):
        at = slice(i, i + heads)
        scores = torch.bmm(queries[at], keys[at].mT, out=held[: len(queries) - i])  # (heads, P, m)
        if log_weight is not None:
            scores += log_weight[at]
        largest = scores.amax(-1, keepdim=True)  # (heads, P, 1)
        if weighted:
            largest.clamp_(min=EMPTY)
        row_sum = scores.sub_(largest).exp_().sum(-1, keepdim=True)
        if weighted:
            largest.masked_fill_(row_sum == 0, 0)  # nothing is live: an output of 0 and a normalizer of 0
            row_sum.masked_fill_(row_sum == 0, 1)
        torch.bmm(scores, values[at], out=output[at]).div_(row_sum)
        torch.add(largest, row_sum.log(), out=normalizer[at])
        inverse = row_sum.reciprocal_().mul_(live[at])
        if mass is not None:
            torch.bmm(inverse.mT, scores, out=mass[at])
        torch.bmm(inverse.square_().mT, scores.square_(), out=squares[at])
    faint = squares < FAINT if log_weight is None else (squares < FAINT) & (log_weight > -torch.inf)
    log_square = None if bool(faint.any()) else squares.log_()
    if log_square is not None and log_weight is not None:
        log_square -= 2 * log_weight.where(log_weight > -torch.inf, 0)
    shape = (*batch, num_pilots)
    log_square = None if log_square is None else log_square.view(*batch, m)
    mass = None if mass is None else mass.div_(live.sum(-2, keepdim=True).clamp(min=1)).view(*batch, m)
    return output.view(*shape, p_v), normalizer.view(shape), log_square, mass


def _form_rows_by_example(
    queries: Tensor, live: Tensor, source: VirtualKeys, scale: float, with_mass: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """`_form_rows`, one example after the other: keys and values need not be copied into one batch."""
    parts = []
    for i in range(len(queries)):
        log_weight = None if source.log_weight is None else source.log_weight[i]
        example = VirtualKeys(source.keys[i], source.values[i], log_weight)
        parts.append(_form_rows(queries[i], live[i], example, scale, with_mass))
    outputs, normalizers, *columns = zip(*parts, strict=True)
    known = [[column for column in of_all if column is not None] for of_all in columns]
    log_square, mass = (torch.stack(of_all) if len(of_all) == len(parts) else None for of_all in known)
    return torch.stack(outputs), torch.stack(normalizers), log_square, mass


@torch.no_grad()
def log_importance(pilots: Pilots, source: VirtualKeys, scale: float) -> Tensor:
    """log p_i of Eq. (5), up to a constant: 1/2 log sum_J b_ji^2 + log |v_i|; -inf for empty slots, else finite.

    A slot of weight w has a column w times as large. Time O(P n p), memory O(n).
    """
    log_square = pilots.log_square  # (b, h, n)
    if log_square is None:
        log_square = log_column_squares(pilots, source.keys, scale)
    norm: Tensor = torch.linalg.vector_norm(source.values, dim=-1, dtype=log_square.dtype)  # (b, h, n)
    log_norm = norm.log().clamp(-100, 100)
    log_norm = torch.maximum(log_norm, log_norm.amax(-1, keepdim=True) - FAINTEST)
    log_probability = log_norm + log_square / 2
    return log_probability if source.log_weight is None else log_probability + source.log_weight


@torch.no_grad()
def column_mass(pilots: Pilots, source: VirtualKeys, scale: float) -> Tensor:
    """mean_J b_ji, what the live pilots give to each slot on average: (b, h, n), 0 for empty slots."""
    if pilots.mass is not None:
        return pilots.mass
    count = pilots.rows.live.sum(-1, keepdim=True).clamp(min=1)  # (b, h, 1)
    log_sums = log_column_sums(pilots, source.keys, scale, power=1)
    log_mass = log_sums + source.log_weights() - count.to(log_sums.dtype).log()
    return log_mass.exp().where(pilots.rows.live.any(-1, keepdim=True), 0)


def log_column_squares(pilots: Pilots, keys: Tensor, scale: float) -> Tensor:
    """log sum_J (exp(s q_J . k_i) / (row sum of J))^2 for every key, (..., n): what each column weighs in Eq. (5)."""
    return log_column_sums(pilots, keys, scale, power=2)


@torch.no_grad()
def log_column_sums(pilots: Pilots, keys: Tensor, scale: float, *, power: int) -> Tensor:
    """log sum_J (exp(s q_J . k_i) / (row sum of J))^power over live pilots for every key: (..., n).

    It is the normalizer of attention the other way round: keys ask, pilot queries answer, with scale and log weights
    -log(row sum) times the power. On a CPU it is summed over pieces of the keys that stay in the cache; in a compiled
    graph, where pieces would tie it to one n, and elsewhere the fused kernel does it, with a product too many.
    """
    dtype = statistics_dtype(keys)
    log_weight = torch.where(pilots.rows.live, -power * pilots.normalizer.to(dtype), -torch.inf)  # (..., P)
    if not plain_cpu(keys):
        transposed = VirtualKeys(pilots.queries, pilots.queries, log_weight)
        return attend_with_normalizer(keys, transposed, power * scale)[1]
    *batch, num_pilots, width = pilots.queries.shape
    queries = pilots.queries.to(dtype).reshape(-1, num_pilots, width) * (power * scale)  # (B, P, p)
    log_weight = log_weight.clamp(min=EMPTY).reshape(-1, num_pilots, 1)  # (B, P, 1)
    log_square = log_weight.new_empty(len(queries), keys.shape[-2])  # (B, n)
    step = max(CACHED // (len(queries) * num_pilots), 64)
    held = queries.new_empty(len(queries) * num_pilots * step)  # one piece of memory: a fresh one costs more than a sum
    for piece, result in zip(torch.split(keys, step, -2), torch.split(log_square, step, -1), strict=True):
        scores = held[: len(queries) * num_pilots * piece.shape[-2]].view(len(queries), num_pilots, -1)  # (B, P, step)
        piece = piece.to(dtype).reshape(len(queries), -1, width)  # (B, step, p)
        torch.bmm(queries, piece.mT, out=scores).add_(log_weight)
        largest = scores.amax(-2, keepdim=True)  # (B, 1, step)
        torch.sum(scores.sub_(largest).exp_(), -2, out=result).log_().add_(largest[:, 0])
    return log_square.reshape(*batch, -1)


@torch.no_grad()
def sample_without_replacement(log_probability: Tensor, u: Tensor, d: int) -> Selection:
    """d distinct indices with probabilities p, line 5: the d largest of log p + Gumbel noise. O(n), fixed shapes."""
    return top(log_probability + gumbel(u), d)
