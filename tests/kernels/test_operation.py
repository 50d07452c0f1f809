"""A sketch as one operation of a compiled graph: what it computes, and where it is not one."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from skeinformer import build
from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.cluster import Cluster
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.merged import full_name
from skeinformer.kernels.operation import sketch, sketch_with_kept
from tests.helpers import draw, gradients, random_mask, slow_but, tensors

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "skeinformer": ("skeinformer", {"num_pilots": 3}),
    "many pilots": ("skeinformer", {"num_pilots": 12}),
    "no pilots": ("skeinformer", {"columns": "uniform", "reuse_pilots": False, "row_norm": "simple"}),
    "gradients by queries": ("skeinformer", {"num_pilots": 12, "gradient": "queries"}),
    "cluster": ("cluster", {"num_pilots": 3}),
    "cluster, many pilots": ("cluster", {"num_pilots": 12, "first_order": False}),
    "cluster, gradients by queries": ("cluster", {"num_pilots": 12, "gradient": "queries"}),
}


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """Keeps the graphs that it is given to compile, and runs them as they are."""

    def __init__(self) -> None:
        self.operations: list[str] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.operations += [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)


FIRST = ("skeinformer", "cluster", "cluster, gradients by queries")


@pytest.mark.parametrize("masked", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", slow_but(CASES, *FIRST))
def test_the_numbers_are_those_without_a_compiler(case: str, masked: bool) -> None:
    """Forward to the bit; one graph with one operation, also without gradients."""
    method, options = CASES[case]
    q, k, v = tensors(2, 2, 40, p=8, dtype=torch.float32)
    module = build(method, head_dim=8, budget=6, **options)
    given: dict[str, Any] = {"noise": draw(module, q, k)}
    if masked:
        given |= {"key_mask": random_mask(2, 40), "query_mask": random_mask(2, 40, seed=1)}
    graphs = Graphs()
    compiled = torch.compile(module, fullgraph=True, backend=graphs)
    output, expected = compiled(q, k, v, **given), module(q, k, v, **given)
    assert len(graphs.operations) < 25
    assert torch.equal(output, expected)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.equal(compiled(q, k, v, **given), expected)


@pytest.mark.parametrize("case", CASES)
def test_the_operations_keep_what_they_promise_to_torch(case: str) -> None:
    """Shapes without numbers, no memory that is another's, gradients registered."""
    method, options = CASES[case]
    q, k, v = tensors(1, 2, 40, p=8, dtype=torch.float32)
    module, mask = build(method, head_dim=8, budget=6, **options), random_mask(1, 40)[:, None]
    noise = list(draw(module, q, k))
    arguments = (q, k, v, mask, mask, noise, full_name(type(module)), repr(tuple(module.options)))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(sketch_with_kept, arguments, test_utils=checks)
    torch.library.opcheck(sketch, (*map(torch.detach, (q, k, v)), *arguments[3:]), test_utils=checks)


class Doubled(Cluster):
    """Computes something else than the class that it is made of."""

    @staticmethod
    def compute(inputs: Inputs, noise: Any, options: Any) -> tuple[Tensor, Trace]:
        output, trace = Cluster.compute(inputs, noise, options)
        return 2 * output, trace


def test_a_subclass_with_another_computation_is_not_that_operation() -> None:
    assert Doubled.as_operation is Attention.as_operation
    q, k, v = tensors(1, 2, 40, p=8, dtype=torch.float32)
    module = Doubled(head_dim=8, budget=6)
    noise = draw(module, q, k)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, noise=noise), module(q, k, v, noise=noise))


def test_values_of_another_width_are_no_operation() -> None:
    q, k, v = tensors(1, 2, 40, p=8, p_v=6, dtype=torch.float32)
    module = build("cluster", head_dim=8, budget=6)
    noise = draw(module, q, k)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v, noise=noise), module(q, k, v, noise=noise), rtol=1e-4, atol=1e-5)
