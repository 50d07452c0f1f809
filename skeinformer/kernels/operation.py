"""A sketch over merged keys as one operation of a graph that is compiled for a CPU.

Given the plain forms of a sketch, a compiler writes a loop for each handful of their operations and compiles it, which
takes most of a minute for the cluster sketch. The fast forms are there already. So in such a graph a sketch over merged
keys is one operation, which takes the fast forms, and its gradient another. Numbers are those of a call without the
compiler. Exported graphs, other devices and function transforms have the plain forms.
"""

from ast import literal_eval
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from skeinformer.kernels.choice import in_one_operation, known, no_autocast, recorded
from skeinformer.kernels.merge import (
    SIZE,
    Estimate,
    Kept,
    MergePlan,
    Source,
    attend_others,
    merged_backward,
    merged_forward,
    merged_of,
)

SketchInputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Query, key, value, and the masks of keys and queries."""


class Operation(NamedTuple):
    """What an operation has to know of a method: plain functions, and what it is told."""

    options: type[Any]
    plan: Callable[[SketchInputs, Sequence[Tensor], Any, bool], MergePlan]
    """From inputs, noise, options, and whether gradients will be asked for."""
    source: Callable[[SketchInputs, Any], tuple[Source, float]]
    """From inputs and options, what the plan has of them: the source, and s."""
    merge: type[Any]
    """The method's Merge, a NamedTuple."""
    estimate: Callable[[Any], Estimate]
    """What estimates the gradients, without what was drawn for it."""


OPERATIONS: dict[str, Operation] = {}
"""By the full name of the method's class."""


def as_operation(name: str, given: SketchInputs, noise: Sequence[Tensor], options: tuple[Any, ...]) -> Tensor | None:
    """The method's output by one operation of the graph that is being compiled; None where it had better be no such."""
    query, key, value, key_mask, query_mask = given
    if not in_one_operation(query, value):
        return None
    arguments = (query, key, value, key_mask, query_mask, list(noise), name, repr(tuple(options)))
    output: Tensor = sketch_with_kept(*arguments)[0] if recorded(query, key, value) else sketch(*arguments)
    return output


@torch.library.custom_op("skeinformer::sketch", mutates_args=())
def sketch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    noise: Sequence[Tensor],
    name: str,
    options: str,
) -> Tensor:
    """The output."""
    with torch.no_grad(), no_autocast(query.device):
        given = (query, key, value, key_mask, query_mask)
        plan = OPERATIONS[name].plan(given, noise, _read(name, options), False)
        return attend_others(query, merged_of(plan)[0], plan.scale, in_place=True)[0].contiguous()


@sketch.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: object) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


@torch.library.custom_op("skeinformer::sketch_with_kept", mutates_args=())
def sketch_with_kept(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    noise: Sequence[Tensor],
    name: str,
    options: str,
) -> list[Tensor]:
    """The output, and what its gradient needs: Kept, what was drawn for the estimate, the Merge."""
    given = (query, key, value, key_mask, query_mask)
    return _own(_forward(given, noise, name, options), (*given, *noise))


@sketch_with_kept.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    noise: Sequence[Tensor],
    name: str,
    options: str,
) -> list[Tensor]:
    found = _forward((query, key, value, key_mask, query_mask), noise, name, options)
    return [query.new_empty(0) if x is None else x.new_empty(x.shape) for x in found]


@torch.library.custom_op("skeinformer::sketch_backward", mutates_args=())
def sketch_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    found: Sequence[Tensor],
    name: str,
    options: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, from what `sketch_with_kept` found."""
    read, operation = _read(name, options), OPERATIONS[name]
    output, *rest = (x if x.dim() > 1 else None for x in found)
    assert output is not None
    of_merge = len(rest) - len(operation.merge._fields)
    kept, drawn, merge = Kept(*rest[:SIZE]), rest[SIZE:of_merge], operation.merge(*rest[of_merge:])  # type: ignore[arg-type]
    if kept.full is not None and known(~kept.full):
        kept = kept._replace(full=None)
    estimate = operation.estimate(read)._replace(drawn=tuple(x for x in drawn if x is not None)) if drawn else None
    with torch.no_grad(), no_autocast(query.device):
        source, scale = operation.source((query, key, value, key_mask, None), read)
        d_query, d_key, d_value = merged_backward(gradient, source, output, kept, merge, estimate, scale)
    return d_query.contiguous(), d_key.contiguous(), d_value.contiguous()


@sketch_backward.register_fake
def _(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _forward(given: SketchInputs, noise: Sequence[Tensor], name: str, options: str) -> list[Tensor | None]:
    query, _, _, key_mask, _ = given
    with torch.no_grad(), no_autocast(query.device):
        plan = OPERATIONS[name].plan(given, noise, _read(name, options), True)
        full = plan.full
        if full is None and plan.estimated and key_mask is not None:  # as where it cannot be known
            full = key_mask.new_zeros(len(query), 1, 1, 1)
        merged, _ = merged_of(plan)
        output, kept = merged_forward(query, merged, full, plan.scale)
    return [output, *kept, *(() if merged.estimate is None else merged.estimate.drawn), *merged.merge]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, key_mask, _, noise, name, options = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, key_mask, *output)
    ctx.name, ctx.options, ctx.num_noise = name, options, len(noise)


def _gradient(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Any, ...]:
    query, key, value, key_mask, *found = ctx.saved_tensors
    results = sketch_backward(gradients[0], query, key, value, key_mask, found, ctx.name, ctx.options)
    return *results, None, None, [None] * ctx.num_noise, None, None


sketch_with_kept.register_autograd(_gradient, setup_context=_keep)


def _own(tensors: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> list[Tensor]:
    """The tensors, dense and each in memory of its own, as an operation has to return them; empty for None."""
    taken = {x.untyped_storage().data_ptr() for x in given if x is not None}
    results = []
    for x in tensors:
        x = torch.empty(0) if x is None else x.contiguous()
        if x.storage_offset() or (x.numel() and x.untyped_storage().data_ptr() in taken):
            x = x.clone()
        taken.add(x.untyped_storage().data_ptr())
        results.append(x)
    return results


@lru_cache(maxsize=256)
def _read(name: str, options: str) -> Any:
    return OPERATIONS[name].options(*literal_eval(options))
