"""What a few exact rows over many keys, pilots and virtual queries, give to queries, keys and values, by pieces.

With E the weights of the keys before they are normalized, z = E 1, G the gradient of the rows' output and g = G / z,

    D = E * (g V^T)        S = D - E * (D 1) / z        dV = E^T g        dK = s S^T Q        dQ = s S K

are four products, and a fifth for rows whose queries get a gradient. The fused kernel makes seven: it also forms the
output, and the scores twice. It holds no scores; here a piece of E and one of D are held, at most HELD numbers each.
"""

import torch
from torch import Tensor

from skeinformer.kernels.choice import at_hand, fast_form
from skeinformer.kernels.fused import row_gradients
from skeinformer.kernels.pilots import HELD, PIECE
from skeinformer.kernels.ranges import LOWEST
from skeinformer.kernels.rows import batches

FEWEST_ROWS = 16  # a piece has as many rows of each of its heads, or all: with fewer, products are slow
MANY_ROWS = 32  # from as many rows on a piece is laid out as (n, rows), where sums over keys are quicker


@fast_form(row_gradients)
def given_by_rows(
    queries: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor | None, gradient: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """`row_gradients`, by pieces where these can be taken."""
    given = (queries, keys, values, log_weight, gradient, scale)
    return gradients_by_pieces(*given)[1:] if takes_pieces(queries, keys) else row_gradients(*given)


def takes_pieces(queries: Tensor, keys: Tensor) -> bool:
    """Whether `gradients_by_pieces` takes these: at hand, of one precision, and not too long.

    Every thread works on a head of its own, so that pieces of FEWEST_ROWS rows for each must not exceed HELD.
    """
    fits = FEWEST_ROWS * torch.get_num_threads() * keys.shape[-2] <= HELD
    return fits and at_hand(keys) and keys.dtype == queries.dtype


def gradients_by_pieces(
    queries: Tensor,  # (b, h, d, p)
    keys: Tensor,  # (b, h, n, p)
    values: Tensor,  # (b, h, n, p_v)
    log_weight: Tensor | None,  # (b, h, n)
    gradient: Tensor,  # (b, h, d, p_v), G
    scale: float,
    asking: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the first `asking` queries, (b, h, asking, p), of keys and of values, dense in memory."""
    n, d, threads = keys.shape[-2], queries.shape[-2], torch.get_num_threads()
    assert d > 0, "there are no rows"
    shapes = (queries[..., :asking, :].shape, keys.shape, values.shape)
    d_queries, d_keys, d_values = (keys.new_empty(shape) for shape in shapes)
    weights = [] if log_weight is None else [log_weight.expand(keys.shape[:-1])[..., None]]
    most = max(asking, d - asking)
    heads = max(PIECE // (most * n), threads)
    rows = max(PIECE // (heads * n), min(HELD // (heads * n), MANY_ROWS), FEWEST_ROWS)
    blocks = [*_slices(0, asking, rows), *_slices(asking, d, rows)]
    held = keys.new_empty(2, 0)  # one piece of memory: a fresh one costs more than a sum
    for batch in batches(d_queries, d_keys, d_values, queries, keys, values, gradient, *weights):
        for dq, dk, dv, all_q, k, v, all_g, *w in zip(*(torch.split(x, heads) for x in batch), strict=True):
            for at in blocks:
                beta = 0 if at.start == 0 else 1  # at first nothing is there to be added to
                q, g = scale * all_q[:, at], all_g[:, at]
                size = q.shape[:-1].numel() * n
                held = held if held.shape[-1] >= size else held.new_empty(2, size)
                E, D = (_laid_out(x[:size], len(q), n, most >= MANY_ROWS) for x in held)  # (heads, rows, n)
                _product(q, k.mT, E)
                for each in w:
                    E += each.mT
                E.sub_(E.amax(-1, keepdim=True).clamp(min=LOWEST)).exp_()
                z = E.sum(-1, keepdim=True)
                z = z.where(z > 0, 1)  # no live key: E is 0
                dv.baddbmm_(E.mT, g / z, beta=beta)
                _product(g / z, v.mT, D).mul_(E)
                S = D.addcmul_(E, D.sum(-1, keepdim=True) / z, value=-1)
                dk.baddbmm_(S.mT, q, beta=beta)
                if at.stop <= asking:
                    torch.mul(S @ k, scale, out=dq[:, at])
    return d_queries, d_keys, d_values


def _slices(start: int, stop: int, size: int) -> list[slice]:
    return [slice(i, min(i + size, stop)) for i in range(start, stop, size)]


def _laid_out(held: Tensor, heads: int, n: int, by_keys: bool) -> Tensor:
    """(heads * rows * n,) as (heads, rows, n): row by row, or the rows of a key side by side."""
    return held.view(heads, n, -1).mT if by_keys else held.view(heads, -1, n)


def _product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """left @ right into `out`, which is laid out either way: (B, r, p), (B, p, n), (B, r, n)."""
    if out.stride(-1) == 1:
        return torch.bmm(left, right, out=out)
    torch.bmm(right.mT, left.mT, out=out.mT)
    return out
