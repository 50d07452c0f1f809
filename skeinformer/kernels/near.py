"""Attention to the keys nearby, exactly, and to means that stand for all other keys.

Tokens lie in blocks of w. A query sees its own block and both neighbours, 3 w keys, exactly. It sees all other keys as
d means, one for each cluster, and no key counts twice: what is near is taken out of the means. With o_j the share of
key j in the mean of its cluster c(j), so that k_c = sum_{c(j) = c} o_j k_j, block B sees of cluster c

    share_Bc = 1 - sum_{j near B, c(j) = c} o_j
    k_Bc = (k_c - sum_{j near B, c(j) = c} o_j k_j) / share_Bc,    v_Bc alike,    w_Bc = w_c + log share_Bc

and nothing where share_Bc is almost 0. Scores of near keys and far means lie next to each other in one buffer, so that
attention takes two products, a softmax in place, and two products. Time O(n (3 w + d) p); memory beyond that of the
results does not depend on n. The gradient computes the weights again; shares and log weights are constants:

    dk_c = sum_B dk_Bc / share_Bc,    dk_j += -o_j sum_{B near j} dk_Bc(j) / share_Bc(j).
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.rows import LOWEST, is_one_batch

SCORES = 2**19  # that are worked on at a time
HELD = 2**20  # numbers of tokens and far means that are worked on at a time
LEAST_SHARE = 1e-3  # of a cluster that is far from a block: of less, rounding would leave little


class Tokens(NamedTuple):
    """Consecutive tokens, with their part in the means of clusters."""

    key: Tensor  # (b, h, l, p)
    value: Tensor  # (b, h, l, p_v)
    cluster: Tensor  # (b, h, l)
    share: Tensor  # (b, h, l), of each token in the mean of its cluster; 0 for padding
    removed: Tensor | None  # (b, h, l), LOWEST for padding and else 0


class Means(NamedTuple):
    """The means of clusters, and their log weights."""

    keys: Tensor  # (b, h, d, p)
    values: Tensor  # (b, h, d, p_v)
    log_weight: Tensor  # (b, h, d)


class Blocks(NamedTuple):
    """The places of tokens: nb blocks of w places with queries, and one more on each side."""

    window: int  # w
    num_blocks: int  # nb, those with queries
    first: int  # the place of the first of all tokens
    first_query: int  # the place of the first query


_Part = tuple[slice, slice]  # heads and blocks of a piece


class _Piece(NamedTuple):
    """What k blocks of g heads see."""

    heads: tuple[int, slice]  # the example, and the heads
    blocks: slice
    key: Tensor  # (g, (k + 2) w, p)
    value: Tensor  # (g, (k + 2) w, p_v)
    row: Tensor  # (g (k + 2) w), of each place in sums by head, block and cluster
    share: Tensor  # (g, (k + 2) w, 1)
    removed: Tensor  # (g, (k + 2) w), LOWEST where there is no key, else 0
    incomplete: tuple[slice, ...]  # the blocks that see places without a key
    far: Tensor  # (g, k, d, p + p_v): mean keys and values
    far_log_weight: Tensor  # (g, k, d)
    far_share: Tensor  # (g, k, d, 1), infinite where nothing is far


def attend_near(query: Tensor, tokens: Sequence[Tokens], means: Means, blocks: Blocks, scale: float) -> Tensor:
    """Attend to near keys and far means, without gradients: (b, h, n, p) -> (b, h, n, p_v).

    tokens: at least all that the blocks see, one after the other. The result has the precision of the means.
    """
    w, output = blocks.window, means.values.new_empty(*query.shape[:-1], means.values.shape[-1])
    (query, result), tokens, means = _merge_heads([query, output], tokens, means)
    buffers = _Buffers(output)
    for piece in _pieces(tokens, means, blocks, buffers):
        queries = _rows(piece, blocks, query, buffers, "queries")
        results = _rows(piece, blocks, result, buffers, "results")
        for part in _parts(queries, piece.far):
            keys, values = _seen(piece, part, w, buffers)
            weights = _weights(piece, part, queries[part], keys, scale, buffers)
            torch.bmm(weights, values, out=results[part].flatten(0, 1))
        _write_rows(piece, blocks, result, results)
    return output


def attend_near_backward(
    gradient: Tensor, query: Tensor, tokens: Sequence[Tokens], means: Means, blocks: Blocks, scale: float
) -> tuple[Tensor, list[list[Tensor]], list[Tensor]]:
    """Return the gradients of queries, of key and value for each of `tokens`, and of mean keys and values.

    gradient: that of the result. Gradients of keys and values do not contain what these get through the means.
    """
    dtype, (p, p_v) = means.keys.dtype, (query.shape[-1], means.values.shape[-1])
    d_query, d_means = means.keys.new_empty(query.shape), [torch.zeros_like(x) for x in means[:2]]
    d_tokens = [[x.new_zeros(x.shape, dtype=dtype) for x in each[:2]] for each in tokens]
    results = [d_query, *d_means, *(x for each in d_tokens for x in each)]
    (gradient, query, dq, *totals), tokens, means = _merge_heads([gradient, query, *results], tokens, means)
    buffers = _Buffers(d_query)
    for piece in _pieces(tokens, means, blocks, buffers):
        d_rows, queries = (
            _rows(piece, blocks, x, buffers, name) for x, name in ((gradient, "d_rows"), (query, "queries"))
        )
        d_queries = _rows(piece, blocks, dq, buffers, "results")
        d_near, d_far = _piece_backward(piece, d_rows, queries, d_queries, scale, buffers)
        _write_rows(piece, blocks, dq, d_queries)
        d_far /= piece.far_share
        for total, part in zip(totals[:2], torch.split(d_far.sum(1), [p, p_v], -1), strict=True):
            total[piece.heads] += part
        # what is near is subtracted from the means
        sums = buffers.get("sums", len(d_far), d_far.shape[1] + 2, *d_far.shape[2:]).zero_()
        for shift in range(3):
            sums[:, shift : shift + d_far.shape[1]] -= d_far
        through_means = sums.view(-1, p + p_v).index_select(0, piece.row)
        d_near.addcmul_(through_means.view_as(d_near), piece.share)
        for i, theirs, mine in _overlaps(tokens, piece.blocks.start * blocks.window, d_near.shape[1], blocks.first):
            for total, part in zip(totals[2 + 2 * i :], torch.split(d_near[:, mine], [p, p_v], -1), strict=False):
                total[piece.heads][:, theirs] += part
    return d_query.mul_(scale), d_tokens, d_means


def _rows(piece: _Piece, blocks: Blocks, x: Tensor, buffers: "_Buffers", name: str) -> Tensor:
    """Return the rows of x, (b, h, n, p), of some blocks: (g, k, w, p), zeros in places without a query.

    They are a view of x, or a copy where some are missing or x has another precision than the buffers.
    """
    begin, end, before, after = _query_range(piece, blocks, x.shape[2])
    rows, (w, size) = x[piece.heads][:, begin:end], (blocks.window, before + end - begin + after)
    if before or after or x.dtype != buffers.like.dtype:
        copy = buffers.get(name, len(rows), size, x.shape[-1])
        copy[:, :before], copy[:, size - after :] = 0, 0
        copy[:, before : size - after] = rows
        rows = copy
    return rows.view(len(rows), size // w, w, x.shape[-1])


def _write_rows(piece: _Piece, blocks: Blocks, x: Tensor, rows: Tensor) -> None:
    """Write what `_rows` returned back to x, unless it is a view of x."""
    begin, end, before, after = _query_range(piece, blocks, x.shape[2])
    if before or after:
        x[piece.heads][:, begin:end] = rows.flatten(1, 2)[:, before : before + end - begin]


def _query_range(piece: _Piece, blocks: Blocks, n: int) -> tuple[int, int, int, int]:
    """Return which of n queries lie in these blocks, and how many places are free before and after them."""
    start, stop = (
        (block + 1) * blocks.window - blocks.first_query for block in (piece.blocks.start, piece.blocks.stop)
    )
    begin, end = max(start, 0), min(stop, n)
    return begin, end, begin - start, stop - end


def _piece_backward(
    piece: _Piece, gradient: Tensor, query: Tensor, d_query: Tensor, scale: float, buffers: "_Buffers"
) -> tuple[Tensor, Tensor]:
    """Write the gradient of queries but for the scale; return those of all places and far means, keys and values."""
    g, k, w, p = query.shape
    d_near, d_far = piece.key.new_zeros(g, (k + 2) * w, piece.far.shape[-1]), torch.empty_like(piece.far)
    for part in _parts(query, piece.far):
        (heads, at), dr, q = part, gradient[part].flatten(0, 1), query[part].flatten(0, 1)
        keys, values = _seen(piece, part, w, buffers)
        weights = _weights(piece, part, query[part], keys, scale, buffers)
        d_values = torch.bmm(weights.mT, dr, out=buffers.get("d_values", *values.shape))
        d_scores = torch.bmm(dr, values.mT, out=buffers.get("d_scores", *weights.shape))
        torch.ops.aten._softmax_backward_data.out(d_scores, weights, -1, weights.dtype, grad_input=d_scores)
        torch.bmm(d_scores, keys, out=d_query[part].flatten(0, 1))
        d_keys = torch.bmm(d_scores.mT, q, out=buffers.get("d_keys", *keys.shape)).mul_(scale)
        for columns, each in zip((slice(p), slice(p, None)), (d_keys, d_values), strict=True):
            each = each.view(*query[part].shape[:2], *each.shape[1:])
            d_far[(*part, slice(None), columns)] = each[:, :, 3 * w :]
            for third in range(3):  # windows overlap
                places = d_near[heads].view(-1, k + 2, w, d_near.shape[-1])
                places = places[:, at.start + third : at.stop + third, :, columns]
                places += each[:, :, third * w : (third + 1) * w]
    return d_near, d_far


def _seen(piece: _Piece, part: _Part, w: int, buffers: "_Buffers") -> tuple[Tensor, Tensor]:
    """Return the keys and values that some blocks see, near ones first: (g k, 3 w + d, p) and (g k, 3 w + d, p_v)."""
    (heads, at), far, p = part, piece.far[part], piece.key.shape[-1]
    seen = []
    for name, near, means in (("keys", piece.key, far[..., :p]), ("values", piece.value, far[..., p:])):
        both = buffers.get(name, *far.shape[:2], 3 * w + far.shape[2], near.shape[-1])
        both[:, :, : 3 * w], both[:, :, 3 * w :] = _windows(near[heads], w)[:, at], means
        seen.append(both.flatten(0, 1))
    return seen[0], seen[1]


def _weights(piece: _Piece, part: _Part, query: Tensor, keys: Tensor, scale: float, buffers: "_Buffers") -> Tensor:
    """Compute the attention weights of some blocks: (g, k, w, p) -> (g k, w, 3 w + d)."""
    (heads, at), (g, k, w, _) = part, query.shape
    weights = buffers.get("weights", g * k, w, keys.shape[1])  # the batched product needs dense results
    torch.baddbmm(weights, query.flatten(0, 1), keys.mT, beta=0, alpha=scale, out=weights)
    scores = weights.view(g, k, w, -1)
    scores[..., 3 * w :] += piece.far_log_weight[part][:, :, None]
    removed = _windows(piece.removed[heads], w)
    for those in piece.incomplete:
        first, last = max(those.start, at.start), min(those.stop, at.stop)
        if first < last:
            scores[:, first - at.start : last - at.start, :, : 3 * w] += removed[:, first:last, None]
    return torch.softmax(weights, -1, out=weights)


class _Buffers:
    """Memory by name that is used again and again: fresh memory costs page faults."""

    def __init__(self, like: Tensor) -> None:
        self.like, self.held = like, dict[str, Tensor]()

    def get(self, name: str, *shape: int) -> Tensor:
        size = math.prod(shape)
        if name not in self.held or self.held[name].numel() < size:
            self.held[name] = self.like.new_empty(size)
        return self.held[name][:size].view(shape)


def _merge_heads(
    tensors: list[Tensor], tokens: Sequence[Tokens], means: Means
) -> tuple[list[Tensor], list[Tokens], Means]:
    """View (b, h, ...) as (1, b h, ...) where none of them needs a copy for it."""
    if not all(is_one_batch(x) for x in (*tensors, *(x for each in tokens for x in each[:2]))):
        return tensors, list(tokens), means
    flat = [Tokens(*(None if x is None else x.flatten(0, 1)[None] for x in each)) for each in tokens]  # type: ignore[arg-type]
    return [x.flatten(0, 1)[None] for x in tensors], flat, Means(*(x.flatten(0, 1)[None] for x in means))


def _pieces(tokens: Sequence[Tokens], means: Means, blocks: Blocks, buffers: _Buffers) -> Iterator[_Piece]:
    """Cut heads and blocks into pieces that fit into the cache."""
    (examples, h, d, p), w = means.keys.shape, blocks.window
    per_block = (d + w) * (p + means.values.shape[-1])
    k = min(max(HELD // per_block, 1), blocks.num_blocks)
    g = min(max(HELD // (per_block * k), 1), h)
    for example in range(examples):
        for head in range(0, h, g):
            for start in range(0, blocks.num_blocks, k):
                at = slice(start, min(start + k, blocks.num_blocks))
                yield _piece((example, slice(head, min(head + g, h))), at, tokens, means, blocks, buffers)


def _piece(
    heads: tuple[int, slice], at: slice, tokens: Sequence[Tokens], means: Means, blocks: Blocks, buffers: _Buffers
) -> _Piece:
    """Put tokens in their places, and compute the far means of some blocks and heads."""
    mean_keys, mean_values, log_weight = (x[heads] for x in means)
    (g, d, p), width, w, k = (
        mean_keys.shape,
        mean_keys.shape[-1] + mean_values.shape[-1],
        blocks.window,
        at.stop - at.start,
    )
    size, last = (k + 2) * w, blocks.first + sum(each.key.shape[2] for each in tokens)
    key, value = buffers.get("key", g, size, p), buffers.get("value", g, size, width - p)
    share, removed = buffers.get("share", g, size, 1), buffers.get("removed", g, size)
    cluster = torch.zeros(g, size, dtype=torch.long, device=key.device)
    removed.fill_(LOWEST)
    for x in (key, value, share):
        x[:, : max(blocks.first - at.start * w, 0)] = 0
        x[:, max(last - at.start * w, 0) :] = 0
    for i, theirs, mine in _overlaps(tokens, at.start * w, size, blocks.first):
        for x, source in zip((key, value, cluster, share[..., 0], removed), tokens[i], strict=True):
            x[:, mine] = 0 if source is None else source[heads][:, theirs]
    # sums of o_j [k_j, v_j, 1] by head, block and cluster
    weighted = buffers.get("weighted", g, size, width + 1)
    for part, source in zip(torch.split(weighted, [p, width - p, 1], -1), (key, value, share), strict=True):
        torch.mul(source, share, out=part) if source is not share else part.copy_(share)
    block = torch.arange(size, device=key.device) // w + (k + 2) * torch.arange(g, device=key.device)[:, None]
    row = (block * d + cluster).view(-1)
    sums = buffers.get("sums", g, k + 2, d, width + 1).zero_()
    sums.view(-1, width + 1).index_add_(0, row, weighted.view(-1, width + 1))
    totals = torch.cat([mean_keys, mean_values, torch.ones_like(mean_keys[..., :1])], -1)[:, None]
    far = torch.sub(totals, sums[:, :-2], out=buffers.get("far", g, k, d, width + 1))
    far.sub_(sums[:, 1:-1]).sub_(sums[:, 2:])
    far_share = far[..., -1:]
    is_far = far_share > LEAST_SHARE
    far_log_weight = torch.where(is_far, log_weight[:, None, :, None] + far_share.clamp(min=LEAST_SHARE).log(), LOWEST)
    far_share = far_share.where(is_far, torch.inf)
    far = far[..., :-1].div_(far_share)
    is_masked = any(each.removed is not None for each in tokens)
    leading, trailing = -(-blocks.first // w) - at.start, (last // w) - 2 - at.start
    ends = (slice(0, max(leading, 0)), slice(max(trailing, 0), k))
    incomplete = (slice(0, k),) if is_masked else ends
    return _Piece(heads, at, key, value, row, share, removed, incomplete, far, far_log_weight[..., 0], far_share)


def _overlaps(tokens: Sequence[Tokens], start: int, size: int, first: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield which tokens lie in places from `start` on: their number, where they are there, and where they go."""
    for i, each in enumerate(tokens):
        length = each.key.shape[2]
        begin, end = max(start, first), min(start + size, first + length)
        if begin < end:
            yield i, slice(begin - first, end - first), slice(begin - start, end - start)
        first += length


def _parts(query: Tensor, far: Tensor) -> Iterator[_Part]:
    """Yield heads, and blocks of them, whose scores fit into the cache: of one head, or all blocks of some heads."""
    g, k, w = query.shape[:3]
    size = w * (3 * w + far.shape[-2])
    step = max(SCORES // size, 1)
    heads = max(step // k, 1)
    for head in range(0, g, heads):
        for start in range(0, k, step):
            yield slice(head, min(head + heads, g)), slice(start, min(start + step, k))


def _windows(x: Tensor, w: int) -> Tensor:
    """View the places that each block sees: (g, (k + 2) w, ...) -> (g, k, 3 w, ...)."""
    (g, size), (each, step, *rest) = x.shape[:2], x.stride()
    return x.as_strided((g, size // w - 2, 3 * w, *x.shape[2:]), (each, w * step, step, *rest), x.storage_offset())
