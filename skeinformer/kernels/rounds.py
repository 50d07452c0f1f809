"""Attention within chunks of sorted tokens, in several rounds, and the merge of the rounds."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from skeinformer.kernels.choice import fast_form, own_backward


class Chunks(NamedTuple):
    """Every round's tokens, sorted by bucket and cut into nc chunks of C slots."""

    source: Tensor  # (b, nc, 2 C, h, r) the tokens of the chunk and of the one before it; any where the slot is empty
    live: Tensor  # (b, nc, 2 C) whether the slot of `source` holds a real key
    place: Tensor  # (b, h, r, n) the slot of each token, chunk * C + offset
    before: Tensor  # (b, nc) the chunk before each; -1 where there is none

    @property
    def token(self) -> Tensor:
        """The tokens of the chunk alone, (b, nc, C, h, r)."""
        return self.source[:, :, : self.source.shape[2] // 2]


def pick(x: Tensor, at: Tensor) -> Tensor:
    """x[i, j, s, at[i, ..., j, s]]: (b, h, r or 1, n, ...), (b, nc, k, h, r) -> (b, nc, k, h, r, ...).

    One index_select over the rows of all heads, many times faster than a gather with an expanded index.
    """
    b, h, rounds, n = x.shape[:4]
    first = n * torch.arange(b * h * rounds, device=x.device).view(b, 1, 1, h, rounds)
    return x.flatten(0, 3).index_select(0, (at + first).flatten()).view(*at.shape, *x.shape[4:])


def by_token(x: Tensor, chunks: Chunks) -> Tensor:
    """Slots back in the order of tokens: (b, nc, C, h, r, ...) -> (b, h, r, n, ...)."""
    b, nc, size, h, rounds = x.shape[:5]
    first = nc * size * torch.arange(b, device=x.device).view(b, 1, 1, 1)
    row = (first + chunks.place) * (h * rounds) + torch.arange(h * rounds, device=x.device).view(h, rounds, 1)
    return x.flatten(0, 4).index_select(0, row.flatten()).view(*row.shape, *x.shape[5:])


def attend_rounds_unfused(
    query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, bias: Tensor, scale: float
) -> Tensor:
    """Attention in every chunk and the merge of the rounds, operation by operation: O(n r C) scores in memory."""
    q, k, v = (x.flatten(3, 4).transpose(2, 3) for x in _read(query, key, value, chunks))  # (b, nc, h r, C or 2 C, p)
    scores = (scale * (q @ k.mT) + bias).clamp(min=torch.finfo(bias.dtype).min)
    z = scores.logsumexp(-1, keepdim=True)
    output = (scores - z).exp().masked_fill(bias == -torch.inf, 0) @ v  # (b, nc, h r, C, p_v)
    output, z = (by_token(x.transpose(2, 3).reshape(*chunks.token.shape, -1), chunks) for x in (output, z))
    return (z.softmax(2) * output).sum(2)


def _read(query: Tensor, key: Tensor, value: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of every slot: (b, nc, C, h, r, p), (b, nc, 2 C, h, r, p), (b, nc, 2 C, h, r, p_v)."""
    keys, values = (pick(x[:, :, None], chunks.source) for x in (key, value))
    return pick(query[:, :, None], chunks.token), keys, values


@fast_form(attend_rounds_unfused, differentiable=True)
def attend_rounds(query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, bias: Tensor, scale: float) -> Tensor:
    """Attention in every chunk on the fused kernel, and the merge of the rounds, with the gradient by hand."""
    width, p_v = max(query.shape[-1], value.shape[-1]), value.shape[-1]  # the fused kernel wants one width
    widened = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    output: Tensor = _AttendRounds.apply(*widened, chunks, bias, scale)  # type: ignore[no-untyped-call]
    return output[..., :p_v]


class _AttendRounds(torch.autograd.Function):
    """`attend_rounds_unfused` on the fused kernel for one width, also for the gradient.

    With w_i = exp(z(i, P_i^(r)) - z(i, P_i)) and the weights a_ij of a round, score_ij has the gradient
    w_i a_ij do_i . (v_j - o_i). That is the kernel's, if it is told that the output of the round was o_i.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, chunks: Chunks, bias: Tensor, scale: float
    ) -> Tensor:
        q, k, v = (_kernel_form(x) for x in _read(query, key, value, chunks))
        bias = bias.flatten(0, 1)  # (b nc, h r or 1, C, 2 C)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        output, z = kernel(q, k, v, 0.0, False, attn_mask=bias, scale=scale)  # (b nc, h r, C, p), (b nc, h r, C)
        w = by_token(z.mT.reshape(chunks.token.shape), chunks).softmax(2)  # (b, h, r, n)
        output = by_token(output.transpose(1, 2).reshape(*chunks.token.shape, -1), chunks)
        output = (w[..., None] * output).sum(2)  # (b, h, n, p)
        ctx.save_for_backward(q, k, v, bias, z, w, output, *chunks)
        ctx.scale = scale
        return output

    @staticmethod
    @own_backward
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, z, w, output, *rest = ctx.saved_tensors
        chunks, (b, h, n, p) = Chunks(*rest), output.shape
        w = pick(w, chunks.token)[..., None]  # (b, nc, C, h, r, 1)
        w.flatten(1, 2)[:, n:] = 0  # empty slots
        gradient, output = (pick(x[:, :, None], chunks.token) for x in (gradient, output))
        gradient, output = _kernel_form(gradient.mul_(w)), _kernel_form(output)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        d_q, d_k, d_v = kernel(gradient, q, k, v, output, z, 0.0, False, attn_mask=bias, scale=ctx.scale)
        d_query = by_token(d_q.transpose(1, 2).reshape(*chunks.token.shape, p), chunks).sum(2)
        row = (chunks.source + n * torch.arange(b * h).view(b, 1, 1, h, 1)).flatten()
        d_key, d_value = (
            x.new_zeros(b * h * n, p).index_add_(0, row, x.transpose(1, 2).reshape(-1, p)) for x in (d_k, d_v)
        )
        return d_query, d_key.view(b, h, n, p), d_value.view(b, h, n, p), None, None, None


def _kernel_form(x: Tensor) -> Tensor:
    """(b, nc, k, h, r, p) -> (b nc, h r, k, p)."""
    return x.flatten(3, 4).flatten(0, 1).transpose(1, 2)
