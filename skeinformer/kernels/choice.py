"""Which form of a computation is taken: decided here, by device, graph, gradient mode and precision, for all kernels.

A fast form looks at numbers, writes in place or works by pieces, so it needs tensors at hand on a CPU. The plain form
computes the same, operation by operation: for other devices, compiled and traced graphs, function transforms, and for
autograd where the fast form has no gradient.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.nn import Parameter

P = ParamSpec("P")
R = TypeVar("R")

_only_plain = False

HALF = {torch.bfloat16: 3, torch.float16: 2}  # columns that hold a float32: of 8 bits each, and of 11
ALIGNED = 8  # the kernels of CUDA take widths that are multiples of it
WIDEST = 256  # the widest keys that the flash kernel takes
NO_SECOND_DERIVATIVE = (
    "this attention has no second derivative: call with create_graph=False, or use exact attention (method='softmax', "
    "'sdpa' in a model of transformers) inside "
    "`with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)`"
)
FUSED = "ScaledDotProduct"  # begins the name of what a fused kernel records


class Route(NamedTuple):
    """How a fused kernel is called, and which."""

    weights: Literal["none", "mask", "columns"]
    """As what it gets the log weights: there are none, a row that is added to the scores, columns of the keys."""
    columns: int
    """How many columns."""
    width: int
    """Of queries, keys and values as it gets them."""
    normalizer: Literal["cpu", "flash", "efficient", "scores"]
    """Which kernel hands over the log of the row sums; "scores": none does, and the scores are formed."""
    infinite: bool
    """Whether it takes a weight of -inf, also in all slots of a row; else a slot is empty by a large finite number."""


def route(
    device: str, dtype: torch.dtype, width: int, value_width: int, weighted: bool, *, recent: bool = True
) -> Route:
    """The call for tensors on a type of device: a pure function, whose table is in docs/devices.md.

    width, value_width: p of queries and keys, and p_v. weighted: whether there are log weights. recent: whether a GPU
    has compute capability 8 (Ampere) or more; older ones have no flash kernel and none for bfloat16.
    """
    if device == "cpu":
        return Route("mask" if weighted else "none", 0, max(width, value_width), "cpu", True)
    columns = HALF.get(dtype, 0) if weighted else 0
    weights: Literal["none", "mask", "columns"] = "none" if not weighted else "columns" if columns else "mask"
    width = max(width + columns, value_width)
    if device != "cuda":
        return Route(weights, columns, width, "scores", False)
    width = -(-width // ALIGNED) * ALIGNED
    if dtype == torch.float64 or (dtype == torch.bfloat16 and not recent):
        return Route(weights, columns, width, "scores", False)
    flash = dtype in HALF and recent and width <= WIDEST
    return Route(weights, columns, width, "flash" if flash else "efficient", False)


def route_of(query: Tensor, values: Tensor, log_weight: Tensor | None) -> Route:
    """`route` for these tensors; inside `plain_forms` no kernel hands over its normalizer."""
    kind, recent = query.device.type, True
    if kind == "cuda" and torch.cuda.is_available():
        recent = torch.cuda.get_device_properties(query.device).major >= 8
    found = route(kind, query.dtype, query.shape[-1], values.shape[-1], log_weight is not None, recent=recent)
    return found._replace(normalizer="scores") if _only_plain else found


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
    if watched() or _only_plain:
        return False
    return x.device.type == "cpu" and type(x) in (Tensor, Parameter)


def watched() -> bool:
    """Whether a compiler, a tracer, vmap, grad or a mode that watches operations looks at what is computed."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return True
    return torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack() != 0


def known(condition: Tensor) -> bool:
    """Whether a condition is known to hold everywhere; False where finding out would mean to wait for a device."""
    return at_hand(condition) and bool(condition.all())


def holds(condition: bool) -> bool:
    """A condition on sizes; in a program that is exported for many lengths, whether it holds at all of them."""
    if not torch.compiler.is_exporting():
        return condition
    # imported here: it brings sympy, half of the time that `import skeinformer` takes beyond torch's
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def recorded(*tensors: Tensor) -> bool:
    """Whether autograd records what is computed from these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The precision of log weights, probabilities and errors: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast off: inputs of a method have been cast already, and statistics keep their precision.

    A graph says so even where it is off already: it may run where it is on.
    """
    on = torch.amp.is_autocast_available(device.type) and (watched() or torch.is_autocast_enabled(device.type))
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def by_hand(query: Tensor, value: Tensor) -> bool:
    """Whether attention over merged keys takes its own gradient: at hand, with keys as wide as values."""
    return at_hand(query) and query.shape[-1] == value.shape[-1]


def in_one_operation(query: Tensor, value: Tensor) -> bool:
    """Whether a sketch is one operation of the graph that is being compiled: on a CPU, where its fast forms then run.

    Not in an exported graph, which others are to run, nor under vmap or grad.
    """
    if not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    if _only_plain or query.device.type != "cpu" or query.shape[-1] != value.shape[-1]:
        return False
    return torch._C._functorch.get_dynamic_layer_stack_depth() == 0


def own_backward(backward: Callable[P, R]) -> Callable[P, R]:
    """Decorate the backward pass of an autograd.Function of ours. It cannot be differentiated: asked to be, it raises.

    Torch's own `once_differentiable` raises only on the way through `.backward()`; elsewhere it gives zeros. Autocast
    is off, as in the forward pass: inputs have their precision already.
    """

    @wraps(backward)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        gradient = next(x for x in args if isinstance(x, Tensor))
        with no_autocast(gradient.device):
            return backward(*args, **options)

    return checked


def first_derivative(output: Tensor) -> Tensor:
    """What a fused kernel returned, also in another shape: asked for its second derivative it says what to do.

    Torch's kernel has none. What torch computes operation by operation has one, and is left as it is.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return output
    node = output.grad_fn
    for _ in range(4):  # the kernel, and what cuts, turns and copies its output
        if node is None:
            break
        if node.name().startswith(FUSED):
            node.register_prehook(_refuse_second_derivative)
            break
        node = node.next_functions[0][0] if node.next_functions else None
    return output


def only_plain_kernel() -> bool:
    """Whether the caller wants `SDPBackend.MATH` alone, for its second derivatives; not asked in a compiled graph."""
    if torch.compiler.is_compiling():
        return False
    fused = (torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_cudnn_sdp_enabled)
    return not any(enabled() for enabled in fused)


def _refuse_second_derivative(gradients: tuple[Tensor, ...]) -> None:
    if torch.is_grad_enabled():  # the backward pass is recorded
        raise RuntimeError(NO_SECOND_DERIVATIVE)


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


def exporting() -> bool:
    """Whether a graph is being exported, in which lengths may be symbols that stand for all of them."""
    return torch.compiler.is_exporting()
