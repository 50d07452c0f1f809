"""Virtual keys: a weighted set of keys and values, and softmax attention over it.

Slot j of the set counts with weight exp(log_weight_j): attending to it gives

    softmax_j( s q . k_j + log_weight_j ) v_j .

A padded key has weight 0, a key that stands for c others has weight c, a union of sets is a concatenation. The
contract: an empty slot has log weight -inf and finite contents (a NaN in it would poison the row); the log weight
carries no gradient (one that does takes the kernel that stores the n x m matrix) and is float32, or float64 where the
query is; None stands for weights 1, so that the kernel is spared a mask of zeros; keys and values carry gradients to
everything they were made from. Leading dimensions are free.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class VirtualKeys(NamedTuple):
    """m weighted slots."""

    keys: Tensor  # (..., m, p)
    values: Tensor  # (..., m, p_v)
    log_weight: Tensor | None  # (..., m), None where all weights are 1

    def log_weights(self) -> Tensor:
        """The log weights as a tensor, (..., m)."""
        if self.log_weight is None:
            return self.keys.new_zeros(self.keys.shape[:-1], dtype=statistics_dtype(self.keys))
        return self.log_weight


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The precision of log weights, probabilities and errors: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def from_mask(key: Tensor, value: Tensor, key_mask: Tensor | None = None) -> VirtualKeys:
    """Real keys weigh 1, padding 0. The mask is (..., m), True = real, and broadcasts over heads."""
    if key_mask is None:
        return VirtualKeys(key, value, None)
    log_weight = torch.zeros(key.shape[-2], dtype=statistics_dtype(key), device=key.device).where(key_mask, -torch.inf)
    return VirtualKeys(key, value, log_weight.expand(key.shape[:-1]))


def cat(first: VirtualKeys, second: VirtualKeys) -> VirtualKeys:
    """The union of two sets: attending to it is exact, nothing has to be merged afterwards."""
    return VirtualKeys(
        torch.cat([first.keys, second.keys], -2),
        torch.cat([first.values, second.values], -2),
        torch.cat([first.log_weights(), second.log_weights()], -1),
    )


def attend(query: Tensor, source: VirtualKeys, scale: float) -> Tensor:
    """softmax(s q k^T + log weight) v, (..., n, p_v), on the fused kernel. No live slot gives 0.

    Time O(n m p), memory O(n p).
    """
    if not takes_float32_weights(query) and source.log_weight is not None:
        wide = VirtualKeys(source.keys.float(), source.values.float(), source.log_weight)
        return attend(query.float(), wide, scale).to(query.dtype)
    q, keys, values, log_weight = _kernel_form(query, source)
    output = F.scaled_dot_product_attention(q, keys, values, attn_mask=log_weight, scale=scale)
    return _user_form(output, query, source)


def takes_float32_weights(query: Tensor) -> bool:
    """Whether the fused kernel takes float32 log weights with these queries.

    With half precision only the CPU's does; others want the mask in the precision of the query, or misread it, and
    rounding a log weight to bfloat16 costs more than the rest of the sketch.
    """
    return query.device.type == "cpu" or query.dtype not in (torch.float16, torch.bfloat16)


def attend_with_normalizer(query: Tensor, source: VirtualKeys, scale: float) -> tuple[Tensor, Tensor]:
    """`attend`, and log sum_j exp(s q . k_j + log_weight_j), (..., n), without gradient and 0 where no slot is live.

    The fused CPU kernel hands the normalizer over; elsewhere the n x m scores are formed.
    """
    if query.device.type != "cpu":
        return _attend_unfused(query, source, scale)
    q, keys, values, log_weight = _kernel_form(query, source)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output, normalizer = kernel(q, keys, values, 0.0, False, attn_mask=log_weight, scale=scale)
    output = _user_form(output, query, source)
    return output, normalizer.detach().reshape(output.shape[:-1])


def attend_backward(
    gradient: Tensor, query: Tensor, source: VirtualKeys, output: Tensor, normalizer: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients for query, keys and values, from those of `attend_with_normalizer`'s output. On a CPU, equal widths.

    A row whose normalizer is +inf counts as constant. The results are fresh tensors.
    """
    log_weight = None if source.log_weight is None else source.log_weight[..., None, :]  # (b, h, 1, m)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    query, keys, values = (_widen(x, x.shape[-1]) for x in (query, source.keys, source.values))
    gradients: tuple[Tensor, Tensor, Tensor] = kernel(
        gradient, query, keys, values, output, normalizer, 0.0, False, attn_mask=log_weight, scale=scale
    )
    return gradients


def _attend_unfused(query: Tensor, source: VirtualKeys, scale: float) -> tuple[Tensor, Tensor]:
    dtype = statistics_dtype(query)
    log_weight = source.log_weights().detach()
    scores = scale * (query.to(dtype) @ source.keys.to(dtype).mT) + log_weight[..., None, :]
    empty = (log_weight == -torch.inf).all(-1)[..., None]  # (..., 1)
    scores = scores.masked_fill(empty[..., None], 0)  # (..., n, m)
    normalizer = scores.logsumexp(-1)  # (..., n)
    output = (scores - normalizer[..., None]).exp() @ source.values.to(dtype)
    output = output.to(query.dtype).masked_fill(empty[..., None], 0)  # (..., n, p_v)
    return output, normalizer.detach().masked_fill(empty, 0)


def _kernel_form(query: Tensor, source: VirtualKeys) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What the fused kernels take: four dimensions, values as wide as keys, rows dense in memory."""
    keys, values, log_weight = source
    width = max(query.shape[-1], values.shape[-1])
    if log_weight is not None:
        log_weight = log_weight.detach()[..., None, :]  # (..., 1, m)
    query, keys, values = (_widen(x, width) for x in (query, keys, values))
    if query.dim() == 4:
        return query, keys, values, log_weight
    if log_weight is not None:
        log_weight = log_weight.reshape(-1, 1, *log_weight.shape[-2:])
    query, keys, values = (x.reshape(-1, 1, *x.shape[-2:]) for x in (query, keys, values))  # (prod(...), 1, n, width)
    return query, keys, values, log_weight


def _user_form(output: Tensor, query: Tensor, source: VirtualKeys) -> Tensor:
    """The leading dimensions of the query and the width of the values."""
    return output[..., : source.values.shape[-1]].reshape(*query.shape[:-1], -1)


def _widen(x: Tensor, width: int) -> Tensor:
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()
