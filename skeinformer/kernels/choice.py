"""Which form of a computation is taken: decided here, by device, graph, gradient mode and precision, for all kernels.

A fast form looks at numbers, writes in place or works by pieces, so it needs tensors at hand on a CPU. The plain form
computes the same, operation by operation: for other devices, compiled and traced graphs, function transforms, and for
autograd where the fast form has no gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

P = ParamSpec("P")
R = TypeVar("R")

_only_plain = False


@contextmanager
def plain_forms() -> Iterator[None]:
    """Inside, every kernel takes its plain form."""
    global _only_plain
    before, _only_plain = _only_plain, True
    try:
        yield
    finally:
        _only_plain = before


def at_hand(x: Tensor) -> bool:
    """Whether x is a plain tensor on a CPU whose numbers may be looked at.

    Not a subclass (fake, distributed), not in a compiled or traced graph, which must not depend on what x holds, nor
    under vmap, grad or a mode that watches operations.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if _only_plain or x.device.type != "cpu" or type(x) not in (Tensor, Parameter):
        return False
    return not torch._C._are_functorch_transforms_active() and torch._C._len_torch_dispatch_stack() == 0


def known(condition: Tensor) -> bool:
    """Whether a condition is known to hold everywhere; False where finding out would mean to wait for a device."""
    return at_hand(condition) and bool(condition.all())


def recorded(*tensors: Tensor) -> bool:
    """Whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The precision of log weights, probabilities and errors: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def by_hand(query: Tensor, value: Tensor) -> bool:
    """Whether attention over merged keys takes its own gradient: at hand, with keys as wide as values."""
    return at_hand(query) and query.shape[-1] == value.shape[-1]


def has_normalizer(query: Tensor) -> bool:
    """Whether the fused kernel for these queries hands over its normalizer and has a gradient to call: the CPU's."""
    return query.device.type == "cpu" and not _only_plain


def takes_float32_weights(query: Tensor) -> bool:
    """Whether the fused kernel takes float32 log weights with these queries.

    With half precision only the CPU's does; others want the mask in the precision of the query, or misread it, and
    rounding a log weight to bfloat16 costs more than the rest of the sketch.
    """
    return query.device.type == "cpu" or query.dtype not in (torch.float16, torch.bfloat16)


def first_derivative_only(backward: Callable[P, R]) -> Callable[P, R]:
    """Decorate the backward pass of an autograd.Function that cannot be differentiated itself: asked to be, it raises.

    Torch's own `once_differentiable` raises only on the way through `.backward()`; elsewhere it gives zeros.
    """

    @wraps(backward)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "sketched attention has no second derivative: call with create_graph=False, or use method='softmax'"
            )
        return backward(*args, **options)

    return checked


def fast_form(
    of: Callable[P, R], *, differentiable: bool = False, half: bool = True
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate the fast form `of` a plain function: a call takes it where it can, and else the plain one.

    The first tensor decides, but for gradients, where all of them do. differentiable: the fast form has a gradient
    of its own. half: it takes half precision too.
    """

    def decorate(fast: Callable[P, R]) -> Callable[P, R]:
        @wraps(fast)
        def chosen(*args: P.args, **options: P.kwargs) -> R:
            tensors = [x for x in (*args, *options.values()) if isinstance(x, Tensor)]
            takes = at_hand(tensors[0]) and (half or tensors[0].dtype == statistics_dtype(tensors[0]))
            if takes and not differentiable:
                takes = not recorded(*tensors)
            return (fast if takes else of)(*args, **options)

        return chosen

    return decorate
