"""Which form a computation takes: decided by device, gradient mode and precision, in one place.

On a CPU some steps run as loops over pieces that stay in the cache and write in place (`loops.py`), elsewhere operation
by operation (`plain.py`). Compiled graphs and transforms see neither: an attention is one operation of theirs.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

P = ParamSpec("P")
R = TypeVar("R")

NO_SECOND_DERIVATIVE = (
    "this attention has no second derivative: call with create_graph=False, or use exact attention (method='softmax', "
    "in transformers 'sdpa') inside `with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)`"
)
FUSED = "ScaledDotProduct"  # the name of the graph node of a fused kernel begins with it


def is_eager_cpu(x: Tensor) -> bool:
    """Whether x is a plain tensor on a CPU, outside of graphs, transforms and modes that watch operations."""
    return x.device.type == "cpu" and type(x) in (Tensor, Parameter) and not is_traced()


def is_traced() -> bool:
    """Whether a compiler, a tracer, a function transform or a dispatch mode watches what is computed."""
    return is_captured() or torch._C._get_tracing_state() is not None or torch._C._len_torch_dispatch_stack() != 0


def is_captured() -> bool:
    """Whether the call becomes part of a compiled or exported graph, or runs under vmap or grad of torch.func."""
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def all_true(condition: Tensor) -> bool:
    """Whether a condition is known to hold everywhere; False where finding out would mean to wait for a device."""
    return is_eager_cpu(condition) and bool(condition.all())


def holds(condition: bool) -> bool:
    """Decide a condition on sizes; in a program that is exported for many lengths, whether it holds at all of them."""
    if not torch.compiler.is_exporting():
        return condition
    # imported here: it loads sympy, half of the time that `import skeinformer` takes in addition to torch's
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(condition)


def needs_grad(*tensors: Tensor) -> bool:
    """Whether autograd records what is computed from these tensors."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the precision of log weights, probabilities and errors: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off: inputs of a method have been cast already, and statistics keep their precision."""
    # a graph turns it off even where it is off already: the graph may run where it is on
    on = torch.amp.is_autocast_available(device.type) and (is_traced() or torch.is_autocast_enabled(device.type))
    return torch.autocast(device.type, enabled=False) if on else nullcontext()


def backward_once(backward: Callable[P, R]) -> Callable[P, R]:
    """Decorate a backward pass to raise if it is differentiated, where torch's `once_differentiable` may give zeros."""

    @wraps(backward)
    def checked(*args: P.args, **options: P.kwargs) -> R:
        _raise_if_recorded()
        with no_autocast(next(x.device for x in args if isinstance(x, Tensor))):
            return backward(*args, **options)

    return checked


def constant_in_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function as `torch.compiler.assume_constant_result` does, without loading the compiler on import."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def flat(x: object) -> list[object]:
    """Return the items of nested tuples."""
    return [item for each in x for item in flat(each)] if isinstance(x, tuple) else [x]


def built_once(build: Callable[..., R]) -> Callable[..., R]:
    """Decorate a function that builds an object: equal constants, also in graphs, give the same object."""
    objects = SimpleNamespace()  # a compiler guards one attribute, and would guard all keys of a dict

    @constant_in_graphs  # a compiler must not trace how the object is built: it reads the object by its name
    def name_of(*constants: object) -> str:
        # as text 1 and True differ, and a name has no dots; other objects, as a class or a group, may share their text
        others = [id(x) for x in flat(constants) if not isinstance(x, str | int | float | None)]
        name = "_" + repr((constants, others)).encode().hex()
        if not hasattr(objects, name):
            setattr(objects, name, (build(*constants), constants))  # these live as long, so that no id is used twice
            if len(vars(objects)) > 1024:
                delattr(objects, next(iter(vars(objects))))
        return name

    @wraps(build)
    def get(*constants: object) -> R:
        return cast(R, getattr(objects, name_of(*constants))[0])

    return get


def forbid_double_backward(output: Tensor) -> Tensor:
    """Return what a fused kernel returned; its second derivative, which torch does not have, raises a clear error."""
    node, steps = None if is_captured() else output.grad_fn, 4  # the kernel, and what slices and copies its output
    while node is not None and steps and not node.name().startswith(FUSED):
        node, steps = node.next_functions[0][0] if node.next_functions else None, steps - 1
    if node is not None and steps:
        node.register_prehook(_raise_if_recorded)
    return output


def only_math_backend() -> bool:
    """Whether the caller wants `SDPBackend.MATH` alone, for its second derivatives; never in a compiled graph."""
    fused = "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_cudnn_sdp_enabled"
    return not torch.compiler.is_compiling() and not any(getattr(torch._C, enabled)() for enabled in fused)


def _raise_if_recorded(*_: object) -> None:
    if torch.is_grad_enabled():  # the backward pass is recorded
        raise RuntimeError(NO_SECOND_DERIVATIVE)


class _Suppressed(threading.local):
    """Whether this thread is inside one of our attentions: `sketched` ignores the fused kernel's calls made there."""

    def __init__(self) -> None:  # in every thread; a compiler would not see a default of the class become an attribute
        self.now = False


_suppressed = _Suppressed()


def is_suppressed() -> bool:
    return _suppressed.now


@contextmanager
def suppress_sdpa_mode() -> Iterator[None]:
    """Let `skeinformer.sketched` ignore the calls of this block."""
    before, _suppressed.now = _suppressed.now, True
    try:
        yield
    finally:
        _suppressed.now = before
