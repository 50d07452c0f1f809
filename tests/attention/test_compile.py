"""torch.compile(fullgraph=True) of what is no single operation: methods with parameters, certificates, and inductor."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from skeinformer import METHODS, skein_attention
from tests.helpers import VARIANTS, draw, generator, gradients, inputs_for, masks_for, random_mask, slow_but, tensors

WITH_PARAMETERS = [name for name in VARIANTS if any(True for _ in VARIANTS[name].build().parameters())]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_same(compiled: Any, module: Any, inputs: tuple[Tensor, ...], tolerance: float, **options: Any) -> None:
    """The output and the gradients of inputs and parameters are those of the module."""
    inputs = (*inputs, *module.parameters())
    output, expected = (each(*inputs[:3], **options) for each in (compiled, module))
    pairs = [(output, expected), *zip(gradients(output, inputs), gradients(expected, inputs), strict=True)]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", WITH_PARAMETERS)
def test_methods_with_parameters_are_traced(name: str) -> None:
    """In one graph for masks of any values, and one more for other lengths."""
    module, backend = VARIANTS[name].build(budget=4), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for n in (9, 20, 31):
        inputs = inputs_for(name, 2, 2, n)
        for mask in (random_mask(2, n, seed=1), torch.zeros(2, n) > 0, torch.ones(2, n) > 0):
            assert_same(compiled, module, inputs, 1e-9, noise=draw(module, *inputs[:2]), **masks_for(name, mask, mask))
    assert backend.frame_count <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_inductor(name: str) -> None:
    inputs, mask = inputs_for(name, 2, 2, 9, dtype=torch.float32), random_mask(2, 9)
    module = VARIANTS[name].build(budget=4)
    compiled = torch.compile(module, fullgraph=True)
    assert_same(compiled, module, inputs, 1e-4, noise=draw(module, *inputs[:2]), **masks_for(name, mask, mask))


@pytest.mark.parametrize("name", slow_but(["cluster", "skeinformer", "performer"], "cluster"))
def test_a_certificate_is_traced(name: str) -> None:
    q, k, v = (x.detach() for x in tensors(2, 2, 40))
    module, mask = VARIANTS[name].build(budget=4), random_mask(2, 40)
    options = {"noise": draw(module, q, k), "num_checks": 8, "key_mask": mask, "query_mask": mask}
    compiled = torch.compile(module.certify, fullgraph=True, backend="eager")
    (output, info), (expected, expected_info) = (each(q, k, v, **options) for each in (compiled, module.certify))
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(info, expected_info, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_generator_draws_outside_of_the_graph() -> None:
    """A generator cannot enter a graph. The noise that it draws can, and gives the same result."""
    q, k, v = (x.detach() for x in tensors(2, 2, 9))
    noise = VARIANTS["skeinformer"].build(budget=4).sample_noise(q, k, generator=generator(3))
    output = torch.compile(skein_attention, fullgraph=True, backend="eager")(q, k, v, budget=4, noise=noise)
    torch.testing.assert_close(output, skein_attention(q, k, v, budget=4, generator=generator(3)))
