"""Multiply-adds of every method, counted while nothing is computed, beside the FLOPs table of Chen et al. (2022).

torch's `FlopCounterMode` sees each operation and its shapes. It knows matrix products and convolutions, counts a
multiply-add as two operations and a fused CPU attention as none; the paper counts a multiply-add once and names the
leading term. Here formulas are added for the fused kernels that torch leaves out, and results are halved. Fake tensors
have shapes and no contents, so that n = 65536 takes a fraction of a second, also for quadratic methods. What is not a
product of matrices is not counted, here as in the paper: exponentials, sums, sorting, gathering, factorizations. A
solution with a triangle is counted.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.profiler import profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from skeinformer.attention import METHODS, build
from skeinformer.checks import check_count
from skeinformer.lab.contender import OFFERED, Contender, parse_all
from skeinformer.lab.measure.memory import quiet_profiler
from skeinformer.lab.records import Record, machine

Shape = Sequence[int]


class LeadingTerm(NamedTuple):
    """Multiply-adds of one head as a function of n tokens, budget d and head width p."""

    text: str
    multiply_adds: Callable[[int, int, int], int]


STANDARD = LeadingTerm("2 n^2 p", lambda n, d, p: 2 * n * n * p)
INFORMER = LeadingTerm("3 n d p", lambda n, d, p: 3 * n * d * p)
# the paper's table "The leading terms of FLOPs in computing attention"; Reformer and the ablations are not in it
PAPER: dict[str, LeadingTerm] = {
    "softmax": STANDARD,
    "softmax_dropout": STANDARD,
    "bigbird": LeadingTerm("5 n d p", lambda n, d, p: 5 * n * d * p),
    "performer": LeadingTerm("3 n d p", lambda n, d, p: 3 * n * d * p),
    "nystromformer": LeadingTerm("4 n d p", lambda n, d, p: 4 * n * d * p),
    "linformer": LeadingTerm("4 n d p", lambda n, d, p: 4 * n * d * p),
    "informer": INFORMER,
    "informer_mask": INFORMER,
    "skeinformer": LeadingTerm("4 n d p", lambda n, d, p: 4 * n * d * p),
}


def attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Q K^T and its product with V, two operations to a multiply-add: 2 b h n m (p + p_v)."""
    *batch, n, p = query
    return 2 * math.prod(batch) * n * key[-2] * (p + value[-1])


def attention_backward_flops(_: Shape, query: Shape, key: Shape, value: Shape, *__: object, **___: object) -> int:
    """The scores once more, then the gradients of the weights, of V, Q and K: 2 b h n m (3 p + 2 p_v)."""
    *batch, n, p = query
    return 2 * math.prod(batch) * n * key[-2] * (3 * p + 2 * value[-1])


def matrix_vector_flops(matrix: Shape, *_: object, **__: object) -> int:
    """A x: two operations for each entry of A."""
    return 2 * math.prod(matrix)


def triangular_flops(matrix: Shape, right: Shape, *_: object, **__: object) -> int:
    """X with L X = B, L triangular: a multiply-add for each entry of half a matrix and each column of B."""
    return math.prod(matrix) * right[-1]


# names in torch.ops.aten; those that this version of torch knows already are counted by its own formula
FORMULAS: dict[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": attention_flops,
    "_scaled_dot_product_flash_attention": attention_flops,
    "_scaled_dot_product_efficient_attention": attention_flops,
    "_scaled_dot_product_cudnn_attention": attention_flops,
    "_scaled_dot_product_fused_attention_overrideable": attention_flops,
    "_scaled_dot_product_attention_math_for_mps": attention_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward_flops,
    "_scaled_dot_product_flash_attention_backward": attention_backward_flops,
    "_scaled_dot_product_efficient_attention_backward": attention_backward_flops,
    "_scaled_dot_product_cudnn_attention_backward": attention_backward_flops,
    "_scaled_dot_product_fused_attention_overrideable_backward": attention_backward_flops,
    "mv": matrix_vector_flops,
    "dot": matrix_vector_flops,
    "linalg_solve_triangular": triangular_flops,
}


def flop_counter() -> FlopCounterMode:
    """torch's counter with FORMULAS added: `with flop_counter() as counter: ...; counter.get_total_flops()`."""
    operations = ((getattr(torch.ops.aten, name, None), formula) for name, formula in FORMULAS.items())
    added: dict[Any, Callable[..., int]] = {
        operation: formula
        for operation, formula in operations
        if operation is not None and operation not in flop_registry
    }
    return FlopCounterMode(display=False, custom_mapping=added)


PRODUCTS: dict[str, Callable[..., int]] = {  # by the shapes of their arguments
    "mm": lambda a, b, *rest: 2 * a[0] * a[1] * b[1],
    "addmm": lambda c, a, b, *rest: 2 * a[0] * a[1] * b[1],
    "bmm": lambda a, b, *rest: 2 * a[0] * a[1] * a[2] * b[2],
    "baddbmm": lambda c, a, b, *rest: 2 * a[0] * a[1] * a[2] * b[2],
    **FORMULAS,
}


def executed_flops(run: Callable[[], object]) -> int:
    """FLOPs of the products of dense matrices that `run` really computes; calls it once.

    On a CPU some methods take a path of their own, which a count by shape does not see.
    """
    with quiet_profiler(), profile(record_shapes=True) as profiler:
        run()
    events = profiler.kineto_results.events() if profiler.kineto_results else []
    named = ((PRODUCTS.get(event.name().removeprefix("aten::")), event) for event in events)
    return sum(formula(*event.shapes()) for formula, event in named if formula is not None)


def count_multiply_adds(
    name: str, n: int, *, budget: int | None = 256, head_dim: int = 32, backward: bool = False, **options: Any
) -> dict[str, int]:
    """Multiply-adds of one head of `name` on n tokens, by operation of torch.

    A forward pass in evaluation; with `backward`, the forward and backward pass of a training step, parameters
    included. Self-attention on the CPU's kernels, p_v = p. Keys are the queries, as Reformer asks; that changes no
    shape.
    """
    with FakeTensorMode():
        module = build(name, head_dim=head_dim, max_len=n, budget=budget, table=OFFERED, **options).train(backward)
        query, value = (torch.empty(1, 1, n, head_dim, requires_grad=backward) for _ in range(2))
        with flop_counter() as counter, torch.set_grad_enabled(backward):
            output = module(query, query, value)
            if backward and output.requires_grad:
                output.backward(torch.empty_like(output))
    counts = counter.get_flop_counts().get("Global", {})
    return {str(operation).removeprefix("aten."): count // 2 for operation, count in counts.items()}


def flop_records(
    *,
    methods: Sequence[str] = (),
    lengths: Sequence[int] = (1024, 4096, 16384, 65536),
    budget: int = 256,
    head_dim: int = 32,
    backward: bool = False,
) -> Iterator[Record]:
    """A Record for every length and method, all of METHODS by default: counted multiply-adds, the paper's, their ratio.

    methods: names, with options as in `parse`. The paper's table, and so the ratio, is about the forward pass of
    methods without options.
    """
    contenders = parse_all(methods) or [Contender(name) for name in METHODS]
    if not lengths:
        raise ValueError("lengths is empty; give at least one sequence length")
    for argument, values in (("length", lengths), ("budget", [budget]), ("head_dim", [head_dim])):
        for value in values:
            check_count(argument, value)
    common: Record = {"kind": "flops", "head_dim": head_dim, **machine()}
    for n in lengths:
        for contender in contenders:
            size, options = contender.settings(budget)
            count = partial(count_multiply_adds, contender.method, n, budget=size, head_dim=head_dim, **options)
            forward, both = sum(count().values()), sum(count(backward=True).values()) if backward else None
            term = None if contender.options else PAPER.get(contender.method)
            paper = None if term is None else term.multiply_adds(n, budget, head_dim)
            yield {
                **common,
                "method": contender.method,
                "options": contender.options_text,
                "budget": size,
                "n": n,
                "multiply_adds": forward,
                "multiply_adds_with_backward": both,
                "paper": paper,
                "paper_term": None if term is None else term.text,
                "ratio": None if paper is None else forward / paper,
            }
