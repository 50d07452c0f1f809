"""An attention as one operation of a graph: what torch.compile, torch.export and torch.func see of it.

A compiler would take most of a minute to trace a sketch, and an exported program would have to hold for all lengths. So
a call is one opaque operation, which runs the method as without a graph. Its gradient is another, which computes the
forward pass again from inputs, noise and seed. Under vmap the mapped dimension becomes part of the batch.
"""

from ast import literal_eval
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import fields
from functools import lru_cache
from importlib import import_module
from operator import index
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor

from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.kernels.choice import NO_SECOND_DERIVATIVE, all_true, no_autocast, suppress_sdpa_mode
from skeinformer.noise import from_seed

if TYPE_CHECKING:  # base.py imports this file
    from skeinformer.attention.base import Method

ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? key_mask, Tensor? query_mask, "
    "Tensor[] noise, SymInt? seed, float scale, str method"
)
BACKWARD = f"(Tensor gradient, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)"


def attend_in_graph(spec: str, inputs: Inputs, noise: Noise | None, seed: int | None) -> Tensor:
    """Compute (b, h, n, p_v) by one operation, with this noise, or with the noise of the seed."""
    numbers = list(noise or ())
    seed = None if noise is not None or seed is None else seed % 2**32  # all of it that a draw depends on
    if torch._C._are_functorch_transforms_active():  # the gradient that is registered for an operation is not for them
        output: Tensor = _Transformed.apply(*inputs[:5], seed, inputs.scale, spec, *numbers)  # type: ignore[no-untyped-call]
        return output
    output = attention_operation(*inputs[:5], numbers, seed, inputs.scale, spec)
    return output


def spec_of(method: "Method") -> str:
    """Write a method as text, which a graph holds as a constant."""
    values = tuple(getattr(method, field.name) for field in fields(method))
    # integers of numpy have another repr
    values = tuple(index(x) if isinstance(x, SupportsIndex) and not isinstance(x, bool) else x for x in values)
    return f"{type(method).__module__}:{type(method).__qualname__}:{values!r}"


@lru_cache(maxsize=256)
def from_spec(spec: str) -> "Method":
    """Return the method that `spec_of` wrote."""
    module, name, values = spec.split(":", 2)
    kind: Any = import_module(module)
    for part in name.split("."):
        if not hasattr(kind, part):
            raise TypeError(f"a compiled graph finds {name} by its name: define it at the top level of a module")
        kind = getattr(kind, part)
    return cast("Method", kind(*literal_eval(values)))


@torch.library.custom_op("skeinformer::attention", mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor")
def attention_operation(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
    """The output of a method."""
    with torch.no_grad():
        output = _attend(query, key, value, *arguments)
    output = output.contiguous()  # an operation promises its layout, and must not return what it was given
    inputs = [x.untyped_storage().data_ptr() for x in (query, key, value)]
    return output.clone() if output.untyped_storage().data_ptr() in inputs else output


@attention_operation.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("skeinformer::attention_backward", mutates_args=(), schema=BACKWARD)
def attention_backward(gradient: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value."""
    query, key, value, *rest = arguments
    with torch.enable_grad(), _autograd_inside():
        query, key, value = (x.detach().requires_grad_() for x in (query, key, value))
        output = _attend(query, key, value, *rest)
        with torch.no_grad():
            gradients = torch.autograd.grad(output, (query, key, value), gradient, materialize_grads=True)
    d_query, d_key, d_value = (x.contiguous() for x in gradients)
    return d_query, d_key, d_value


@attention_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _refuse(ctx: Any, *gradients: Tensor) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


attention_backward.register_autograd(_refuse)


def _autograd_inside() -> AbstractContextManager[object]:
    """Let autograd record inside of an operation, where torch skips it even with gradients enabled."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor", "ADInplaceOrView"):
        excluded = excluded.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    return cast("AbstractContextManager[object]", torch._C._ForceDispatchKeyGuard(included, excluded))


def _attend(query: Tensor, key: Tensor, value: Tensor, *arguments: Any) -> Tensor:
    key_mask, query_mask, noise, seed, scale, spec = arguments
    key_mask, query_mask = (None if x is None or all_true(x) else x for x in (key_mask, query_mask))
    inputs = Inputs(query, key, value, key_mask, query_mask, scale)
    method = from_spec(spec)
    if seed is not None:
        noise = method.noise(query, key, from_seed((query.shape[0], query.shape[1]), seed, device=query.device))
    with suppress_sdpa_mode(), no_autocast(query.device):
        return method.attend(inputs, tuple(noise))[0]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, key_mask, query_mask, noise, *rest = inputs
    ctx.save_for_backward(query, key, value, key_mask, query_mask, *noise)
    ctx.num_noise, ctx.rest = len(noise), rest


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    query, key, value, key_mask, query_mask, *noise = ctx.saved_tensors
    gradients = attention_backward(gradient, query, key, value, key_mask, query_mask, noise, *ctx.rest)
    return *gradients, None, None, [None] * ctx.num_noise, None, None, None


attention_operation.register_autograd(_backward, setup_context=_save)


class _Transformed(torch.autograd.Function):
    """The operation with its gradient, as vmap and grad of torch.func take it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        output: Tensor = attention_operation(*arguments[:5], list(arguments[8:]), *arguments[5:8])
        return output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, (*inputs[:5], inputs[8:], *inputs[5:8]), output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        query, key, value, key_mask, query_mask, *noise = ctx.saved_tensors
        arguments = (gradient, query, key, value, key_mask, query_mask, *ctx.rest, *noise)
        gradients = _TransformedBackward.apply(*arguments)  # type: ignore[no-untyped-call]
        return *gradients, *[None] * (5 + ctx.num_noise)


class _TransformedBackward(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        d_query, d_key, d_value = attention_backward(*arguments[:6], list(arguments[9:]), *arguments[6:9])
        return d_query, d_key, d_value

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise RuntimeError(NO_SECOND_DERIVATIVE)


@attention_operation.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> tuple[Tensor, int]:
    output = attention_operation(*_folded(info.batch_size, in_dims, arguments))
    return output.unflatten(0, (info.batch_size, -1)), 0


@attention_backward.register_vmap
def _(info: Any, in_dims: Any, *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, int, int]]:
    gradients = attention_backward(*_folded(info.batch_size, in_dims, arguments))
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in gradients), (0, 0, 0)


def _folded(size: int, in_dims: Any, arguments: Sequence[Any]) -> list[Any]:
    """Make the mapped dimension of every tensor the first part of its batch dimension."""

    def fold(x: Any, dim: Any) -> Any:
        if isinstance(x, Tensor):
            x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)
        if isinstance(x, list | tuple):
            dims = dim if isinstance(dim, list | tuple) else [dim] * len(x)
            return [fold(each, at) for each, at in zip(x, dims, strict=True)]
        return x

    return [fold(x, dim) for x, dim in zip(arguments, in_dims, strict=True)]
