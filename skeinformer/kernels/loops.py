"""Steps of a sketch on a CPU: loops over pieces that stay in the cache, in one buffer, without gradients.

`plain.py` has the same functions for other devices. Fresh memory costs page faults, so buffers are allocated once and
results are written in place. Heads (b, h, n, p) may lie next to each other in a row of tokens.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from skeinformer.kernels.fused import attend_with_lse
from skeinformer.kernels.rows import LOWEST, batches, gather_rows, is_one_batch, pieces

CACHED = 2**20  # numbers that are worked on at a time
HELD = 2**21  # scores of pilot rows that are held at a time
FEW_SCORES = 2**15  # of which argmax is quick enough
FEWEST_KEYS = 64  # of each head at a time
LARGE = 1e30  # turns a difference of scores into more than the number of a cluster
FAINT = 1e-30  # a sum of squares below has lost digits, or all


def parts_of(count: int, inputs: tuple[Tensor, ...], results: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Yield so many heads at a time of inputs (b, h, n, p) and of results (b h, ...), which have all heads in a row."""
    b, h = inputs[0].shape[:2]
    if all(is_one_batch(x) for x in inputs):
        b, h, inputs = 1, b * h, tuple(x.flatten(0, 1)[None] for x in inputs)
    for i in range(b):
        for start in range(0, h, count):
            stop = min(start + count, h)
            yield *(x[i, start:stop] for x in inputs), *(x[i * h + start : i * h + stop] for x in results)


def pilot_attention(
    queries: Tensor, keys: Tensor, values: Tensor, live: Tensor | None, w: Tensor | None, scale: float, with_mass: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Exact rows b_J of attention and what they give to each key: B_J V, lse, log sum_J b_ji^2, mean_J b_ji if wanted.

    Queries are (b, h, P, p), `live` (b, h, P) or None where all rows are, and the log weights w (b, h, n) or None. Sums
    are over live rows, those of squares without weights. Large rows stay in the fused kernel, not in the cache.
    """
    (b, h, num_rows, _), n = queries.shape, keys.shape[-2]
    if num_rows * n > HELD:
        output, lse = attend_with_lse(queries, keys, values, w, scale)
        return output, lse, *column_sums(queries, keys, lse, live, w, scale, with_mass)
    output, lse = values.new_empty(b * h, num_rows, values.shape[-1]), values.new_empty(b * h, num_rows, 1)
    squares, mass = (values.new_empty(b * h, 1, n) for _ in range(2))
    more = []
    if live is not None:
        counted = live.view(b * h, 1, num_rows).to(values.dtype)
        more = [counted, counted / counted.sum(-1, keepdim=True).clamp_(min=1)]
    if w is not None:
        more.append(w.reshape(b * h, 1, n))
    heads = min(max(CACHED // (num_rows * n), torch.get_num_threads()), 8 * HELD // (num_rows * n), b * h)
    buffer = values.new_empty(heads, num_rows, n)
    results = (output, lse, squares, mass, *more)
    for q, k, v, o, z, square, m, *rest in parts_of(heads, (queries, keys, values), results):
        rows = buffer if len(q) == len(buffer) else buffer[: len(q)]
        torch.baddbmm(rows, q, k.transpose(1, 2), beta=0, alpha=scale, out=rows)  # (heads, P, n)
        if w is not None:
            rows.add_(rest[-1]).clamp_(min=LOWEST)
        largest = rows.amax(-1, keepdim=True)  # (heads, P, 1)
        torch.softmax(rows, -1, out=rows)
        torch.sub(largest, rows.amax(-1, keepdim=True).log_(), out=z)  # the largest weight is exp(largest - lse)
        torch.bmm(rows, v, out=o)
        if live is None:
            if with_mass:
                torch.mean(rows, 1, keepdim=True, out=m)
            torch.sum(torch.mul(rows, rows, out=rows), 1, keepdim=True, out=square)
        else:
            torch.bmm(rest[1], rows, out=m)
            torch.bmm(rest[0], torch.mul(rows, rows, out=rows), out=square)
    output, lse = output.view(b, h, num_rows, -1), lse.view(b, h, num_rows)
    squares, mass = squares.view(b, h, n), mass.view(b, h, n)
    if w is not None:  # where nothing is live, rows and lse are 0
        empty, padding = lse < LOWEST / 2, w == -torch.inf
        output.masked_fill_(empty[..., None], 0)
        lse.masked_fill_(empty, 0)
        mass.masked_fill_(padding, 0)
        squares.masked_fill_(padding, 1)
    if squares.amin().item() < FAINT:
        squares, _ = column_sums(queries, keys, lse, live, w, scale, False)
        return output, lse, squares, mass if with_mass else None
    squares.log_()
    if w is not None:
        squares -= 2 * w.where(~padding, 0)
    return output, lse, squares, mass if with_mass else None


def column_sums(
    queries: Tensor, keys: Tensor, lse: Tensor, live: Tensor | None, w: Tensor | None, scale: float, with_mass: bool
) -> tuple[Tensor, Tensor | None]:
    """log sum_J b_ji^2, less the weights, and mean_J b_ji if wanted, (b, h, n), from the logs of the rows' sums."""
    (b, h, num_rows, _), n, dtype = queries.shape, keys.shape[-2], lse.dtype
    log_square, log_mass = (lse.new_empty(b * h, n) for _ in range(2))
    minus_lse = -lse if live is None else (-lse).where(live, -torch.inf).clamp_(min=LOWEST)
    minus_lse = minus_lse.reshape(b * h, num_rows, 1)
    buffer = lse.new_empty(0)
    for q, k, z, squares, masses in parts_of(b * h, (queries, keys), (minus_lse, log_square, log_mass)):
        q = q.to(dtype) * scale
        step = max(CACHED // (len(q) * num_rows), FEWEST_KEYS)
        for start in range(0, n, step):
            piece = k[:, start : start + step].to(dtype)
            size = len(q) * num_rows * piece.shape[1]
            buffer = buffer if buffer.numel() >= size else buffer.new_empty(size)
            scores = torch.bmm(q, piece.transpose(1, 2), out=buffer[:size].view(len(q), num_rows, -1))
            scores.add_(z)
            largest = scores.amax(1, keepdim=True)  # (B, 1, step)
            total = torch.sum(scores.sub_(largest).exp_(), 1, out=masses[:, start : start + step])
            total.log_().add_(largest[:, 0])
            total = torch.sum(scores.square_(), 1, out=squares[:, start : start + step])
            total.log_().add_(largest[:, 0], alpha=2)
    log_square, log_mass = log_square.view(b, h, n), log_mass.view(b, h, n)
    if not with_mass:
        return log_square, None
    if w is not None:
        log_mass += w
    count = torch.tensor(num_rows) if live is None else live.sum(-1, keepdim=True)  # (b, h, 1)
    return log_square, log_mass.sub_(count.clamp(min=1).to(dtype).log()).exp_().masked_fill_(count == 0, 0)


def nearest_center(keys: Tensor, direction: Tensor, offset: Tensor) -> Tensor:
    """argmax_c k . direction_c - offset_c / 2: (b, h, n, p), (B, d, p), (B, d, 1) -> (b, h, n), for B = b h heads."""
    (b, h, n, _), d = keys.shape, direction.shape[-2]
    if b * h * n * d < FEW_SCORES:
        scores = torch.baddbmm(offset, direction, keys.flatten(0, 1).transpose(1, 2), beta=-0.5)  # (B, d, n)
        return scores.argmax(1).view(b, h, n)
    # argmax is slow: scores less the largest, times a large number, less the number of the center, have as their
    # largest minus the number of the nearest center
    minus_number = torch.arange(0, -d, -1, dtype=direction.dtype)[:, None]  # (d, 1)
    index = direction.new_empty(b * h, n)
    heads = max(min(2 * CACHED // (d * FEWEST_KEYS), b * h), 1)
    step = min(max(2 * CACHED // (d * heads), FEWEST_KEYS), n)  # keys of each head at a time
    buffer = direction.new_empty(heads * d * step)
    for k, w, c, result in parts_of(heads, (keys,), (direction, offset, index)):
        for start in range(0, n, step):
            piece, written = k[:, start : start + step], result[:, start : start + step]
            scores = buffer[: len(piece) * d * piece.shape[1]].view(len(piece), d, -1)  # (heads, d, step)
            torch.baddbmm(c, w, piece.transpose(1, 2), beta=-0.5, out=scores)
            scores.sub_(scores.amax(1, keepdim=True))
            torch.amax(torch.add(minus_number, scores, alpha=LARGE, out=scores), 1, out=written)
    return index.neg_().long().clamp_(0, d - 1).view(b, h, n)  # NaN becomes some cluster


def cluster_sums(
    keys: Tensor, values: Tensor, weight: Tensor, assignment: Tensor, d: int, with_product: bool
) -> tuple[Tensor, Tensor | None]:
    """Sums over clusters of w_j [k_j, v_j], (B, d, p + p_v), and sum_j w_j k_j v_j^T, (B, p, p_v), if wanted."""
    (b, h, n, p), width = keys.shape, keys.shape[-1] + values.shape[-1]
    sums = weight.new_zeros(b * h * d, width)
    product = weight.new_empty(b * h, p, width - p)
    row = assignment.view(b * h, n) + torch.arange(0, b * h * d, d)[:, None]  # of a cluster among those of all heads
    weights = weight.reshape(b * h, n, 1)
    heads = min(max(CACHED // (n * width), 1), b * h)
    buffer = weight.new_empty(heads, n, width)
    for k, v, w, cluster, result in parts_of(heads, (keys, values), (weights, row, product)):
        both = buffer if len(k) == len(buffer) else buffer[: len(k)]
        weighted_keys = torch.mul(k, w, out=both[..., :p])
        torch.mul(v, w, out=both[..., p:])
        sums.index_add_(0, cluster.flatten(), both.view(-1, width))
        if with_product:
            torch.bmm(weighted_keys.transpose(1, 2), v.to(weight.dtype), out=result)
    return sums.view(b * h, d, width), product if with_product else None


def weighted_row(x: Tensor, weight: Tensor) -> Tensor:
    """sum_i weight_i x_i, in the precision of the weights: (b, h, n, p), (b, h, n) -> (b, h, 1, p)."""
    b, h, n, p = x.shape
    row, weights = weight.new_empty(b * h, 1, p), weight.reshape(b * h, 1, n)
    for rows, w, result in parts_of(b * h, (x.to(weight.dtype),), (weights, row)):
        torch.bmm(w, rows, out=result)
    return row.view(b, h, 1, p)


def add_cluster_gradients_(
    total: Tensor, y: Tensor, assignment: Tensor, weight: Tensor, x: Tensor | None = None, across: Tensor | None = None
) -> None:
    """total_j += w_j (y_c(j) + x_j across), in place, a few heads at a time: y (b, h, d, p), across (b, h, p_v, p)."""
    factors = [] if x is None or across is None else [x, across]
    for added, mine, cluster, w, *product in pieces(CACHED // 2, total, y, assignment, weight, *factors):
        each = gather_rows(mine, cluster)
        if product:
            for part, rows, by in batches(each, product[0].to(each.dtype), product[1]):
                part.baddbmm_(rows, by)
        if added.dtype == w.dtype:
            added.addcmul_(w[..., None], each)
        else:  # small weights and large sums meet in the wider precision
            added += each.mul_(w[..., None]).to(added.dtype)
