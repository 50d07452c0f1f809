"""The frame of sketches: attention over few virtual keys that stand for all, with pilot rows that are exact.

A sketch has m' virtual keys and values made of n by linear maps, K' = M_K K and V' = M_V V. The output

    R = softmax(s Q K'^T + w') V' + Q G,   R_J = softmax(s Q_J K^T + w) V

has three cheap gradients: those of two calls of the fused kernel, and M^T applied to the first one's. G, the slope, is
made of K and V too; its gradient is Q^T dR. By hand there are only these three results, and no dozen
tensors of n rows as autograd has. A row sum of infinity makes the weights of the rows J zero in the first call's
gradient. Where ranks share the sequence, the gradients of virtual keys and of exact rows are summed over them.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from skeinformer.attention.base import Method, Trace
from skeinformer.attention.inputs import Inputs, Noise
from skeinformer.attention.near import Near
from skeinformer.attention.near import attend_backward as near_backward
from skeinformer.attention.pilots import Pilots
from skeinformer.attention.rows import Rows
from skeinformer.attention.virtual_keys import VirtualKeys, from_mask
from skeinformer.kernels.choice import backward_once, is_eager_cpu, needs_grad, statistics_dtype
from skeinformer.kernels.fused import attend_backward, attend_with_lse
from skeinformer.kernels.rows import batches, gather_rows, write_rows_
from skeinformer.noise import Rand

MANY = 1 / 6  # from this share of pilots on, gathering the other rows is quicker than computing all
Gradients = tuple[Tensor, Tensor, Tensor | None]  # of virtual keys, virtual values and slope


class Sketch(NamedTuple):
    """What stands for all keys and values: attention over `virtual` plus Q times the slope, exact rows written over."""

    virtual: VirtualKeys  # (b, h, m', p)
    slope: Tensor | None  # (b, h, p, p_v)
    pilots: Pilots | None  # rows that are written over the output
    saved: tuple[Any, ...]  # tensors or None: how the others depend on keys and values, for `add_gradients_`
    near: Near | None = None  # with it the virtual keys stand for keys far away only, and the output is known


class SketchMethod(Method):
    """A method that attends over virtual keys: it writes `sketch` and `add_gradients_`."""

    takes_group: ClassVar[bool] = True
    noise_along = ("queries", "keys")

    def noise(self, query: Tensor, key: Tensor, rand: Rand) -> Noise:
        """Draw one number for each query and one for each key."""
        return rand(query.shape[-2]), rand(key.shape[-2])

    def sketch(self, inputs: Inputs, noise: Any) -> tuple[Sketch, Trace]:
        """Compute what stands for the keys, without gradients."""
        raise TypeError(f"{type(self).__name__} is no sketch: it does not define `sketch`")

    def add_gradients_(
        self, sketch: Sketch, d_virtual: Gradients, key: Tensor, value: Tensor, d_key: Tensor, d_value: Tensor
    ) -> None:
        """Add to the gradients of keys and values what those of virtual keys, virtual values and slope give to them."""
        raise TypeError(f"{type(self).__name__} is no sketch: it does not define `add_gradients_`")

    def attend(self, inputs: Inputs, noise: Any) -> tuple[Tensor, Trace]:
        """Attend over the sketch; gradients reach query, key and value."""
        with torch.no_grad():
            sketch, trace = self.sketch(inputs, noise)
        return attend_sketched(self, inputs, sketch), trace


def attend_sketched(method: SketchMethod, inputs: Inputs, sketch: Sketch) -> Tensor:
    """Attend over a sketch; gradients reach query, key and value."""
    query, key, value = inputs[:3]
    if not needs_grad(query, key, value):
        return attend_over(sketch, query, inputs.scale, in_place=True)[0]
    output: Tensor = SketchedAttention.apply(query, key, value, method, inputs, sketch)  # type: ignore[no-untyped-call]
    return output


def attend_over(
    sketch: Sketch, query: Tensor, scale: float, *, in_place: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Compute the output, and attention over the virtual keys alone with its lse, as the gradient needs them.

    In place the output takes the memory of the attention over the virtual keys. With a near part there is no such
    attention: its gradient computes all weights again.
    """
    if sketch.near is not None:
        output = sketch.near.output.to(query.dtype)
        if sketch.pilots is not None:
            sketch.pilots.rows.write_(output, sketch.pilots.output)
        return output, None, None
    others = other_rows(sketch.pilots, query)
    whole, query = query, query if others is None else gather_rows(query, others)
    attended, lse = attend_with_lse(query, *sketch.virtual, scale)
    output = attended
    if sketch.slope is not None:
        output = attended if in_place else torch.empty_like(attended)
        for each, q, slope, result in batches(attended, query, sketch.slope, output):
            torch.baddbmm(each, q, slope, out=result)
    if others is not None:
        output = write_rows_(output.new_empty(*whole.shape[:-1], output.shape[-1]), others, output)
    if sketch.pilots is not None:
        sketch.pilots.rows.write_(output, sketch.pilots.output)
    return output, attended, lse


def other_rows(pilots: Pilots | None, query: Tensor) -> Tensor | None:
    """Return the rows that are no pilots, (b, h, n - P), where it is quicker to compute these alone; else None."""
    n, num_pilots = query.shape[-2], 0 if pilots is None else pilots.lse.shape[-1]
    if pilots is None or pilots.rows.here is not None or not n > num_pilots >= MANY * n or not is_eager_cpu(query):
        return None
    others = torch.ones(*query.shape[:-1], dtype=torch.bool).scatter_(-1, pilots.rows.index, False)
    return others.nonzero()[:, -1].view(*query.shape[:2], n - num_pilots)


class SketchedAttention(torch.autograd.Function):
    """Attention over a sketch with its gradient by hand: one for all sketches, devices and numbers of ranks."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, method: SketchMethod, inputs: Inputs, sketch: Sketch
    ) -> Tensor:
        output, attended, lse = attend_over(sketch, query, inputs.scale, in_place=False)
        pilots = sketch.pilots
        if (
            pilots is not None and lse is not None and lse.shape[-1] == query.shape[-2]
        ):  # of all rows: not of `other_rows` alone
            pilots.rows.fill_(lse, torch.inf)
        rows = () if pilots is None else (*pilots.rows, *pilots[1:])
        key_mask = None if inputs.key_mask is None else inputs.key_mask.clone()  # the caller may change it
        near = () if sketch.near is None else (*sketch.near[2:5], *sketch.near.neighbors)
        # all that was drawn too: a checkpoint that draws again would otherwise mix two draws
        ctx.save_for_backward(
            query, key, value, key_mask, attended, lse, *sketch.virtual, sketch.slope, *rows, *near, *sketch.saved
        )
        ctx.method, ctx.scale, ctx.world, ctx.num_rows = method, inputs.scale, inputs.world, len(rows)
        ctx.window, ctx.num_near = 0 if sketch.near is None else sketch.near.window, len(near)
        return output

    @staticmethod
    @backward_once
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, key_mask, attended, lse, keys, values, log_weight, slope, *rest = ctx.saved_tensors
        rows, rest = rest[: ctx.num_rows], rest[ctx.num_rows :]
        pilots = Pilots(Rows(*rows[:3]), *rows[3:]) if rows else None
        near, saved = rest[: ctx.num_near], tuple(rest[ctx.num_near :])
        part = Near(ctx.window, gradient, near[0], near[1], near[2], tuple(near[3:])) if near else None
        sketch = Sketch(VirtualKeys(keys, values, log_weight), slope, pilots, saved, part)
        inputs = Inputs(query, key, value, key_mask, None, ctx.scale, ctx.world)
        gradients = sketch_backward(ctx.method, inputs, sketch, attended, lse, gradient)
        return *(g.to(x.dtype) for g, x in zip(gradients, (query, key, value), strict=True)), None, None, None


def sketch_backward(
    method: SketchMethod, inputs: Inputs, sketch: Sketch, attended: Tensor, lse: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of query, key and value from that of the output; lse is inf in exact rows."""
    query, key, value, key_mask, _, scale, world = inputs
    pilots, dtype = sketch.pilots, statistics_dtype(query)
    if sketch.near is None:
        d_query, sums = virtual_gradients(sketch, query, scale, attended, lse, gradient)
        d_tokens = None
    else:
        d_query, d_tokens, sums = near_gradients(inputs, sketch, sketch.near, gradient)
    if pilots is not None:
        sums.append(pilots.rows.take(gradient))  # (b, h, P, p_v)
    d_keys, d_values, *sums = world.sum("gradients", *(x.to(dtype) for x in sums))
    if pilots is None:
        d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
    else:  # what exact rows give to their queries, and to the keys of this rank
        source = from_mask(key, value, key_mask)
        rows_gradient = sums.pop().to(query.dtype)
        _, queries, output, lse = pilots
        d_rows, d_key, d_value = attend_backward(rows_gradient, queries, *source, output, lse, scale)
        (d_rows,) = world.sum("rows", d_rows)
        pilots.rows.write_(d_query, d_rows.to(d_query.dtype))
    if d_tokens is not None:
        d_key, d_value = d_tokens[0].add_(d_key), d_tokens[1].add_(d_value)
    method.add_gradients_(sketch, (d_keys, d_values, sums[0] if sums else None), key, value, d_key, d_value)
    return d_query, d_key, d_value


def virtual_gradients(
    sketch: Sketch, query: Tensor, scale: float, attended: Tensor, lse: Tensor, gradient: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the query, and of virtual keys, virtual values and slope if there is one."""
    pilots, slope, dtype, whole = sketch.pilots, sketch.slope, statistics_dtype(query), query
    others = other_rows(pilots, query)
    query, d_output = (x if others is None else gather_rows(x, others) for x in (query, gradient))
    d_query, *sums = attend_backward(d_output, query, *sketch.virtual, attended, lse, scale)
    if slope is not None:
        d_slope = slope_gradient_(d_query, d_output, query, slope)
        if pilots is not None and others is None:
            d_slope -= pilots.rows.take(whole).to(dtype).mT @ pilots.rows.take(gradient).to(dtype)
        sums.append(d_slope)
    if others is not None:
        d_query = write_rows_(d_query.new_empty(whole.shape), others, d_query)
    return d_query, sums


def near_gradients(
    inputs: Inputs, sketch: Sketch, near: Near, gradient: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor], list[Tensor]]:
    """Return the gradients of the query, of near keys and values, and those of `virtual_gradients`."""
    if sketch.pilots is not None:
        gradient = gradient.clone()
        rows = sketch.pilots.rows
        rows.write_(gradient, gradient.new_zeros(*rows.index.shape, gradient.shape[-1]))
    d_query, d_key, d_value, *sums = near_backward(inputs, sketch.virtual, near, gradient)
    if sketch.slope is not None and near.center is not None:
        d_slope = slope_gradient_(d_query, gradient, inputs.query, sketch.slope)
        d_slope -= near.center.mT.to(d_slope.dtype) @ gradient.to(d_slope.dtype).sum(-2, keepdim=True)
        sums.append(d_slope)
    return d_query, (d_key, d_value), sums


def slope_gradient_(d_query: Tensor, gradient: Tensor, query: Tensor, slope: Tensor) -> Tensor:
    """Add to the query's gradient what it gets through Q G, and return that of the slope G, (b, h, p, p_v)."""
    dtype = statistics_dtype(query)  # in float16 a sum over all queries leaves the range
    d_slope = torch.empty_like(slope, dtype=dtype)
    for dq, dr, g, q, result in batches(d_query, gradient, slope.to(d_query.dtype), query, d_slope):
        dq.baddbmm_(dr.to(dq.dtype), g.mT)
        torch.bmm(q.to(dtype).mT, dr.to(dtype), out=result)
    return d_slope
