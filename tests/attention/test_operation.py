"""In a graph or a transform an attention is one operation, with the numbers and gradients that it has outside."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from skeinformer import METHODS, build, cluster_attention, skein_attention
from skeinformer.attention import Attention, Cluster
from skeinformer.attention.inputs import prepare
from skeinformer.attention.operation import attention_backward, attention_operation
from tests.helpers import (
    RANDOM,
    VARIANTS,
    draw,
    generator,
    gradients,
    inputs_for,
    lengths_mask,
    map_inputs,
    map_noise,
    masks_for,
    random_mask,
    slow_but,
    tensors,
)

FEW = ("cluster", "skeinformer", "performer", "bigbird")
WITH_PARAMETERS = {name for name in METHODS if any(True for _ in VARIANTS[name].build().parameters())}
OPERATIONS = [name for name in METHODS if name not in WITH_PARAMETERS]
RANDOM_ONES = [name for name in OPERATIONS if name in RANDOM]
ONE = ["skeinformer.attention.default"]


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def operations(graph: torch.fx.GraphModule) -> list[str]:
    """The names of our operations in a graph and in the graphs within it, which autocast makes."""
    nodes = (node for part in graph.modules() if isinstance(part, torch.fx.GraphModule) for node in part.graph.nodes)
    return [str(node.target) for node in nodes if str(node.target).startswith("skeinformer.")]


class Compiler:
    """`torch.compile` to graphs that run as they are, and which operations of ours are in them."""

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self.forward: list[list[str]] = []
        self.backward: list[list[str]] = []
        backend = aot_autograd(fw_compiler=self.compiler(self.forward), bw_compiler=self.compiler(self.backward))
        self.compiled = torch.compile(function, fullgraph=True, backend=backend, **options)

    def compiler(self, seen: list[list[str]]) -> Callable[..., Any]:
        def compile_graph(graph: torch.fx.GraphModule, _: Any) -> Any:
            seen.append(operations(graph))
            return make_boxed_func(graph.forward)

        return compile_graph

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.compiled(*arguments, **options)


def assert_close(ours: Any, theirs: Any, tolerance: float = 1e-9) -> None:
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def results(attend: Callable[..., Tensor], inputs: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    output = attend(*inputs, **options)
    return [output, *gradients(output, inputs)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", slow_but(OPERATIONS, *FEW))
def test_a_compiled_graph(name: str, dynamic: bool) -> None:
    """One operation forward and one backward, compiled once for masks of any values: nothing real, nothing padded."""
    inputs = inputs_for(name, 2, 2, 9)
    module = VARIANTS[name].build(budget=4)
    noise, compiled = draw(module, *inputs[:2]), Compiler(module, dynamic=dynamic)
    for mask in (random_mask(2, 9), lengths_mask([9, 3], 9), torch.zeros(2, 9) > 0, torch.ones(2, 9) > 0):
        options = {"noise": noise, **masks_for(name, mask, mask)}
        assert_close(results(compiled, inputs, **options), results(module, inputs, **options))
    assert compiled.forward == [ONE]
    assert compiled.backward == [["skeinformer.attention_backward.default"]]


@pytest.mark.parametrize("name", slow_but(OPERATIONS, "cluster", "skeinformer"))
def test_a_graph_for_all_lengths(name: str) -> None:
    module, lengths = VARIANTS[name].build(budget=4), (37, 50, 90)
    compiled = Compiler(module, dynamic=True)
    for n in lengths:
        inputs = inputs_for(name, 2, 2, n, n + 3)
        noise = draw(module, *inputs[:2])
        assert_close(results(compiled, inputs, noise=noise), results(module, inputs, noise=noise))
    assert compiled.forward == [ONE] * len(compiled.forward)
    assert len(compiled.forward) <= 1 + (name == "reformer")  # whose noise is of another shape for another length


@pytest.mark.parametrize("name", slow_but(OPERATIONS, "cluster", "skeinformer"))
@pytest.mark.parametrize("masked", [False, True])
def test_an_exported_program_for_all_lengths(name: str, masked: bool) -> None:
    """Also where the budget is larger than the sequence."""

    def arguments(n: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        mask = lengths_mask([n, n - 20], n)
        return map_inputs(torch.detach, inputs_for(name, 2, 2, n)), masks_for(name, mask, mask) if masked else {}

    module, n = VARIANTS[name].build(budget=40, seed=0).eval(), torch.export.Dim("n", min=21, max=4096)
    inputs, masks = arguments(60)
    shapes: dict[str, Any] = {"query": {2: n}, "key": {2: n}, "value": {2: n}}
    shapes |= {key: None if mask is None else {1: n} for key, mask in masks.items()}
    program = torch.export.export(module, inputs, masks, dynamic_shapes=shapes)
    assert operations(program.graph_module) == ONE
    for length in (21, 33, 60, 300):
        inputs, masks = arguments(length)
        torch.testing.assert_close(program.module()(*inputs, **masks), module(*inputs, **masks))


@pytest.mark.parametrize("name", OPERATIONS)
def test_vmap_is_part_of_the_batch(name: str) -> None:
    """Over the second dimension of the values, with the same keys and another mask for each."""
    inputs = map_inputs(torch.detach, inputs_for(name, 2, 2, 9))
    value = torch.randn(2, 3, 2, 9, 4, generator=generator(1), dtype=torch.float64)
    masks = torch.stack([random_mask(2, 9, seed) for seed in range(3)])
    module = VARIANTS[name].build(budget=4)
    noise = draw(module, *inputs[:2])

    def attend(value: Tensor, mask: Tensor) -> Tensor:
        output: Tensor = module(*inputs[:2], value, noise=noise, **masks_for(name, mask, mask))
        return output

    expected = torch.stack([attend(value[:, i], masks[i]) for i in range(3)])
    assert_close([torch.func.vmap(attend, in_dims=(1, 0))(value, masks)], [expected])


@pytest.mark.parametrize("name", FEW)
def test_vmap_of_one_of_the_inputs_and_of_the_noise(name: str) -> None:
    module = VARIANTS[name].build(budget=4)
    q, k, v = (x.detach() for x in tensors(2, 2, 9))
    queries = torch.stack([q, 2 * q, -q])
    noises = [draw(module, q, k, seed) for seed in range(3)]
    output = torch.func.vmap(lambda q: module(q, k, v, noise=noises[0]))(queries)
    assert_close(output, [module(x, k, v, noise=noises[0]) for x in queries])
    stacked = tuple(torch.stack(x) for x in zip(*noises, strict=True))
    if stacked:
        output = torch.func.vmap(lambda noise: module(q, k, v, noise=noise))(stacked)
        assert_close(output, [module(q, k, v, noise=noise) for noise in noises])


@pytest.mark.parametrize("name", OPERATIONS)
def test_grad_of_torch_func(name: str) -> None:
    """Of a sum, and of each example by itself."""
    inputs = inputs_for(name, 3, 2, 9)
    module, mask = VARIANTS[name].build(budget=4), random_mask(3, 9)
    noise = draw(module, *inputs[:2])
    shared = inputs[0] is inputs[1]

    def loss(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, noise: Any) -> Tensor:
        output: Tensor = module(q, q if shared else k, v, noise=noise, **masks_for(name, mask, mask))
        return output.square().sum()

    expected = torch.autograd.grad(loss(*inputs, mask, noise), inputs, materialize_grads=True)
    detached = map_inputs(torch.detach, inputs)
    ours = torch.func.grad(loss, argnums=(0, 1, 2))(*detached, mask, noise)
    if shared:
        ours = (ours[0], ours[0], ours[2])  # the key is the query
    assert_close(ours, expected)

    def of_one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, noise: Any) -> Any:
        arguments = (x[None] for x in (q, k, v, mask))
        return torch.func.grad(loss, argnums=2)(*arguments, map_noise(noise, lambda x: x[None]))

    if all(len(x) == 3 for x in noise):
        assert_close([torch.func.vmap(of_one)(*detached, mask, tuple(noise))[:, 0]], [expected[2]])


@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
def test_second_derivatives_raise(name: str) -> None:
    q, k, v = tensors(1, 2, 20)
    module = VARIANTS[name].build(budget=4, seed=0).eval()
    with pytest.raises(RuntimeError, match="no second derivative: call with create_graph=False"):
        torch.autograd.grad(module(q, k, v).square().sum(), q, create_graph=True)

    def first(q: Tensor) -> Tensor:
        return torch.func.grad(lambda q: module(q, k.detach(), v.detach()).square().sum())(q).sum()

    with pytest.raises(RuntimeError, match="second derivative"):
        torch.func.grad(first)(q.detach())
    output = attention_operation(q, k, v, None, None, [], 0, 0.5, module.spec)
    (once,) = torch.autograd.grad(output.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        once.sum().backward()


@pytest.mark.parametrize("name", FEW)
def test_autocast(name: str) -> None:
    q, k, v = tensors(2, 2, 9, dtype=torch.float32)
    module = VARIANTS[name].build(budget=4)
    noise = draw(module, q, k)
    compiled = Compiler(module)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = (results(attend, (q, k, v), noise=noise) for attend in (compiled, module))
    assert ours[0].dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for x in ours[1:])
    assert_close(ours, theirs, 0.02)


@pytest.mark.parametrize("name", FEW)
def test_a_seed_is_part_of_the_graph(name: str) -> None:
    q, k, v = (x.detach() for x in tensors(2, 2, 40))
    module = VARIANTS[name].build(budget=4, seed=5).eval()
    compiled = Compiler(module)
    assert_close([compiled(q, k, v)] * 2, [module(q, k, v), compiled(q, k, v)])
    assert_close([compiled(q, k, v, seed=7)], [module(q, k, v, seed=7)])


@pytest.mark.parametrize("name", ["cluster_attention", "skein_attention", *slow_but(RANDOM_ONES, "cluster")])
def test_every_call_draws_afresh_from_the_global_state(name: str) -> None:
    functions: dict[str, Any] = {"cluster_attention": cluster_attention, "skein_attention": skein_attention}
    attend = functions.get(name) or VARIANTS[name].build(budget=4)
    q, k, v = map_inputs(torch.detach, inputs_for(name, 2, 2, 300, dtype=torch.float32))
    compiled = Compiler(attend)
    outputs = []
    for each in (compiled, compiled, attend):
        if each is attend or not outputs:
            torch.manual_seed(3)
        outputs.append(each(q, k, v))
    assert not torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])
    assert len(compiled.forward) == 1


def test_a_scale_that_is_symbolic() -> None:
    """With `dynamic=True` a float that a module holds is an input of the graph, as the scaling of a layer."""
    q, k, v = tensors(2, 2, 20, p=8)
    module = VARIANTS["cluster"].build(budget=4, head_dim=8, seed=0).eval()

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.scaling = module, 8**-0.5

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            output: Tensor = self.attention(q, k, v, scale=self.scaling)
            return output

    layer = Layer().eval()
    compiled = Compiler(layer, dynamic=True)
    for scaling in (0.3, 0.4, 0.5):
        layer.scaling = scaling
        assert_close(results(compiled, (q, k, v)), results(module, (q, k, v), scale=scaling))


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_torch_checks_the_operation(name: str, masked: bool) -> None:
    """Its schema, its fake form, and that its gradient is registered."""
    inputs = inputs_for(name, 2, 2, 9, dtype=torch.float32)
    inputs = (inputs[0], inputs[1].detach().clone().requires_grad_(), inputs[2])
    module, mask = VARIANTS[name].build(budget=4, seed=0), random_mask(2, 9)
    q, k, v, key_mask, query_mask, scale, _ = prepare(*inputs, **masks_for(name, mask, mask) if masked else {})
    rest = (key_mask, query_mask, list(draw(module, q, k)), None, scale, module.spec)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(attention_operation, (q.detach(), k.detach(), v.detach(), *rest), test_utils=checks)
    torch.library.opcheck(
        attention_backward, (v.detach(), q.detach(), k.detach(), v.detach(), *rest), test_utils=checks
    )


@pytest.mark.parametrize("compiling", [False, True])
def test_memory_is_what_the_inputs_take(compiling: bool) -> None:
    """Between the two passes nothing but inputs and noise is saved."""
    q, k, v = tensors(1, 2, 300)
    module, sizes = VARIANTS["cluster"].build(budget=4), []
    noise = draw(module, q, k)
    attend = (
        Compiler(module)
        if compiling
        else (lambda *inputs, noise: attention_operation(*inputs, None, None, list(noise), None, 0.5, module.spec))
    )
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        attend(q, k, v, noise=noise)
    assert sum(sizes) <= sum(x.numel() for x in (q, k, v, *noise))


@pytest.mark.parametrize("autocast", [False, True])
def test_heads_that_were_split_are_not_copied(autocast: bool) -> None:
    """(b, n, h, p) with its dimensions turned is what the fused kernel takes as it is."""
    q, k, v = (x.detach().float().transpose(1, 2).contiguous().transpose(1, 2) for x in tensors(2, 2, 60))
    with torch.autocast("cpu") if autocast else nullcontext():
        program = torch.export.export(build("cluster", head_dim=4, seed=0).eval(), (q, k, v))
    nodes = [str(node.target) for part in program.graph_module.modules() for node in part.graph.nodes]
    assert not any("contiguous" in name or "clone" in name for name in nodes)


def test_the_operation_returns_the_layout_that_it_promises() -> None:
    """The compiler asserts the strides of the fake output; heads next to each other in a row are a model's layout."""
    module = VARIANTS["cluster"].build(budget=4, head_dim=4, seed=0).eval()
    q, k, v = (torch.randn(2, 20, 3, 4, generator=generator(i)).transpose(1, 2) for i in range(3))
    output = attention_operation(q, k, v, None, None, [], 0, 0.5, module.spec)
    assert output.is_contiguous()
    torch.testing.assert_close(output, module(q, k, v, scale=0.5))


def test_a_seed_of_any_size_in_a_graph() -> None:
    """Seeds of layers are multiplied: a time in nanoseconds leaves 64 bits."""
    q, k, v = tensors(1, 2, 20, dtype=torch.float32)
    module = VARIANTS["cluster"].build(budget=4, seed=2**63 + 5).eval()
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(q, k, v), module(q, k, v))


def test_a_method_that_cannot_be_imported_is_named_in_a_graph() -> None:
    class Local(Cluster):
        pass

    module = Attention(Local(budget=4), head_dim=4, seed=0).eval()
    q, k, v = tensors(1, 1, 20)
    assert module(q, k, v).shape == q.shape
    with pytest.raises(TypeError, match="at the top level of a module"):
        torch.vmap(module)(q[None], k[None], v[None])


def test_a_certificate_is_no_part_of_a_graph() -> None:
    q, k, v = tensors(1, 2, 20)
    module = VARIANTS["cluster"].build(budget=4, seed=0).eval()
    with pytest.raises(RuntimeError, match=r"outside of torch\.func"):
        torch.vmap(lambda x: module.certify(x, k, v)[1].error)(q[None])
