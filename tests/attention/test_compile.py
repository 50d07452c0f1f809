"""torch.compile(fullgraph=True): one graph, equal to eager with gradients, and the same graph for other mask values."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from skeinformer import METHODS, build, cluster_attention, skein_attention
from tests.helpers import (
    RANDOM,
    VARIANTS,
    draw,
    generator,
    gradients,
    inputs_for,
    lengths_mask,
    map_inputs,
    random_mask,
    slow_but,
    tensors,
)

FEW = [
    pytest.param(name, marks=[] if name in ("cluster", "skeinformer", "bigbird") else [pytest.mark.slow])
    for name in METHODS
]


class Backend:
    """Runs the captured graph as it is, forward and backward, and counts how often one is captured."""

    def __init__(self, name: str = "aot_eager") -> None:
        self.compilations = 0
        self.compiler = torch._dynamo.lookup_backend(name)

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Any:
        self.compilations += 1
        return self.compiler(graph, inputs)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def masks_of(b: int, n: int) -> list[Tensor]:
    """Padding anywhere, right padding, nothing real, nothing padded."""
    return [
        random_mask(b, n, seed=1),
        lengths_mask([n, 3], n),
        torch.zeros(b, n, dtype=torch.bool),
        torch.ones(b, n, dtype=torch.bool),
    ]


@pytest.mark.parametrize("name", slow_but(METHODS, "cluster", "skeinformer", "bigbird", "reformer"))
def test_equals_eager_with_gradients_and_compiles_once_for_all_masks(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, 9, dtype=torch.float32)
    module = VARIANTS[name].build(budget=4)
    noise = draw(module, q, k)
    backend = Backend()
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for mask in masks_of(2, 9):
        masks = {"key_mask": mask, "query_mask": mask}
        output, expected = compiled(q, k, v, noise=noise, **masks), module(q, k, v, noise=noise, **masks)
        torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)
        pairs = zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True)
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert backend.compilations == 1


@pytest.mark.parametrize("name", FEW)
def test_drawing_compiles_too(name: str) -> None:
    """Without a generator the numbers come from torch's global state, inside the graph; without masks too."""
    q, k, v = map_inputs(torch.detach, inputs_for(name, 2, 2, 9, dtype=torch.float32))
    backend = Backend("eager")
    compiled = torch.compile(VARIANTS[name].build(budget=3), fullgraph=True, backend=backend)
    first, second = compiled(q, k, v), compiled(q, k, v)
    assert torch.equal(first, second) == (name not in RANDOM)
    assert first.shape == v.shape
    assert backend.compilations == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VARIANTS if name not in METHODS])
def test_options_compile_in_one_graph(name: str) -> None:
    q, k, v = map_inputs(torch.detach, inputs_for(name, 2, 2, 9, dtype=torch.float32))
    module = VARIANTS[name].build(budget=4)
    noise = draw(module, q, k)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    mask = random_mask(2, 9)
    masks = {"key_mask": mask, "query_mask": mask}
    torch.testing.assert_close(compiled(q, k, v, noise=noise, **masks), module(q, k, v, noise=noise, **masks))


def test_a_seed_compiles_and_stays_deterministic() -> None:
    q, k, v = (x.detach() for x in tensors(2, 2, 9, dtype=torch.float32))
    module = build("skeinformer", head_dim=4, budget=3, seed=5).eval()
    backend = Backend("eager")
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(q, k, v), module(q, k, v))
    torch.testing.assert_close(compiled(q, k, v), module(q, k, v))
    assert backend.compilations == 1


def test_info_compiles() -> None:
    q, k, v = (x.detach() for x in tensors(2, 2, 40, dtype=torch.float32))
    noise = draw(build("skeinformer", head_dim=4, budget=4), q, k)
    options: dict[str, Any] = {"budget": 4, "num_checks": 8, "return_info": True, "noise": noise}
    compiled = torch.compile(skein_attention, fullgraph=True, backend="eager")
    mask = random_mask(2, 40)
    output, info = compiled(q, k, v, key_mask=mask, query_mask=mask, **options)
    expected, expected_info = skein_attention(q, k, v, key_mask=mask, query_mask=mask, **options)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(info, expected_info, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", slow_but(METHODS, "cluster", "skeinformer"))
@pytest.mark.parametrize(
    "given", [pytest.param(True, id="noise given"), pytest.param(False, id="noise drawn", marks=pytest.mark.slow)]
)
def test_lengths_need_no_graph_of_their_own(name: str, given: bool) -> None:
    """With the defaults of torch.compile a second length makes the length symbolic, and that graph serves all."""
    module = VARIANTS[name].build(budget=4).eval()
    backend = Backend("eager")
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for n in (37, 50, 90):
        q, k, v = map_inputs(torch.detach, inputs_for(name, 2, 2, n, n + 3, dtype=torch.float32))
        masks = {"key_mask": random_mask(2, k.shape[2]), "query_mask": random_mask(2, n)}
        noise = draw(module, q, k) if given else None
        output = compiled(q, k, v, noise=noise, **masks)
        if given:
            torch.testing.assert_close(output, module(q, k, v, noise=noise, **masks))
        assert output.shape == (2, 2, n, 4)
    assert backend.compilations <= 2


def test_autocast_compiles() -> None:
    q, k, v = (x.detach() for x in tensors(2, 2, 9, dtype=torch.float32))
    module = build("skeinformer", head_dim=4, budget=4)
    noise = draw(module, q, k)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = compiled(q, k, v, noise=noise)
        assert torch.equal(output, module(q, k, v, noise=noise))
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
def test_estimated_gradients_compile_inside_autocast(name: str) -> None:
    """With values of another width, which no operation takes whole: the backward pass once left autocast on."""
    q, k, v = (x.detach().requires_grad_() for x in tensors(2, 2, 60, p=8, p_v=5, dtype=torch.float32))
    module = build(name, head_dim=8, budget=6, gradient="queries")
    noise = draw(module, q, k)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        results = [
            [output, *gradients(output, (q, k, v))] for f in (compiled, module) for output in [f(q, k, v, noise=noise)]
        ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02 * float(theirs.detach().abs().max()))


def test_estimated_gradients_compile_for_all_lengths() -> None:
    """Also where the budget is an argument of the graph: the number of virtual queries is a whole number of it."""
    module = build("cluster", head_dim=8, budget=30, gradient="queries")

    def attend(q: Tensor, k: Tensor, v: Tensor, noise: Any, budget: int) -> Tensor:
        return cluster_attention(q, k, v, noise=noise, budget=budget, gradient="queries")

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="eager")
    for n in (60, 100):
        q, k, v = (x.detach().requires_grad_() for x in tensors(1, 2, n, p=8, p_v=5, dtype=torch.float32))
        noise = draw(module, q, k)
        results = [gradients(f(q, k, v, noise, 30), (q, k, v)) for f in (compiled, attend)]
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_inductor(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, 9, dtype=torch.float32)
    module = VARIANTS[name].build(budget=4)
    noise = draw(module, q, k)
    mask = random_mask(2, 9)
    masks = {"key_mask": mask, "query_mask": mask}
    compiled = torch.compile(module, fullgraph=True)
    output, expected = compiled(q, k, v, noise=noise, **masks), module(q, k, v, noise=noise, **masks)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_generator_outside_a_compiled_module_draws_the_noise() -> None:
    """A generator cannot enter a graph; the noise that it draws can, and gives the same result."""
    q, k, v = (x.detach() for x in tensors(2, 2, 9, dtype=torch.float32))
    module = build("skeinformer", head_dim=4, budget=4)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    output = compiled(q, k, v, noise=draw(module, q, k, seed=3))
    torch.testing.assert_close(output, module(q, k, v, generator=generator(3)))
