"""Multiply-adds of a method, counted by torch's FlopCounterMode on tensors that have shapes and no contents.

Matrix products, convolutions and fused attention are counted, a multiply-add once, and a solution with a triangle.
Exponentials, sums, sorting and gathering are not, as in the paper. 65,536 tokens take no longer than 16.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from skeinformer.cli.specs import MethodSpec

Shape = Sequence[int]


def attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Q K^T and its product with V, two operations to a multiply-add: 2 b h n m (p + p_v)."""
    *batch, n, p = query
    return 2 * math.prod(batch) * n * key[-2] * (p + value[-1])


def attention_backward_flops(_: Shape, query: Shape, key: Shape, value: Shape, *__: object, **___: object) -> int:
    """The scores again, then the gradients of the weights, of V, Q and K: 2 b h n m (3 p + 2 p_v)."""
    *batch, n, p = query
    return 2 * math.prod(batch) * n * key[-2] * (3 * p + 2 * value[-1])


def matrix_vector_flops(matrix: Shape, *_: object, **__: object) -> int:
    """A x: two operations for each entry of A."""
    return 2 * math.prod(matrix)


def triangular_flops(matrix: Shape, right: Shape, *_: object, **__: object) -> int:
    """X with L X = B, L triangular: a multiply-add for each entry of half a matrix and each column of B."""
    return math.prod(matrix) * right[-1]


KERNELS = ["flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"]
KERNELS += ["fused_attention_overrideable"]
# names in torch.ops.aten; those that this version of torch knows are counted by its own formula
FORMULAS: dict[str, Callable[..., int]] = {
    **{f"_scaled_dot_product_{kernel}": attention_flops for kernel in (*KERNELS, "attention_math_for_mps")},
    **{f"_scaled_dot_product_{kernel}_backward": attention_backward_flops for kernel in KERNELS},
    "mv": matrix_vector_flops,
    "dot": matrix_vector_flops,
    "linalg_solve_triangular": triangular_flops,
}


def flop_counter() -> FlopCounterMode:
    """Return torch's counter with FORMULAS added: `with flop_counter() as counter: ...; counter.get_total_flops()`."""
    operations = ((getattr(torch.ops.aten, name, None), formula) for name, formula in FORMULAS.items())
    added: dict[Any, Callable[..., int]] = {
        operation: formula
        for operation, formula in operations
        if operation is not None and operation not in flop_registry
    }
    return FlopCounterMode(display=False, custom_mapping=added)


def count_multiply_adds(spec: MethodSpec, n: int, *, head_dim: int = 32, backward: bool = False) -> dict[str, int]:
    """Count the multiply-adds of one head on n tokens, by operation of torch.

    A forward pass in evaluation, or with `backward` the forward and backward pass of a training step, parameters
    included. Keys are the queries, as Reformer needs it; that changes no shape.
    """
    with FakeTensorMode():
        module = spec.build(head_dim, n).train(backward)
        query, value = (torch.empty(1, 1, n, head_dim, requires_grad=backward) for _ in range(2))
        with flop_counter() as counter, torch.set_grad_enabled(backward):
            output = module(query, query, value)
            if backward and output.requires_grad:
                output.backward(torch.empty_like(output))
    counts = counter.get_flop_counts().get("Global", {})
    return {str(operation).removeprefix("aten."): count // 2 for operation, count in counts.items()}
