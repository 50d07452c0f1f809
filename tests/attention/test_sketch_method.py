"""The gradient of sketches by hand is autograd's through the transcriptions, in every layout, and saves little."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from skeinformer import build, cluster_attention
from tests.helpers import LargestTensor, draw, generator, gradients, random_mask, tensors

OPTIONS: dict[str, dict[str, Any]] = {
    "cluster": {"num_pilots": 3},
    "cluster without the linear term": {"num_pilots": 3, "first_order": False},
    "skeinformer": {"num_pilots": 3},
    "skeinformer, simple": {"num_pilots": 3, "row_norm": "simple"},
    "skeinformer without pilot rows": {"num_pilots": 3, "reuse_pilots": False},
    "skeinformer without pilots": {"columns": "uniform", "reuse_pilots": False},
}


def built(name: str, budget: int = 4, head_dim: int = 4) -> Any:
    return build(name.split(",")[0].split(" ")[0], head_dim=head_dim, budget=budget, **OPTIONS[name])


@pytest.mark.parametrize("name", OPTIONS)
def test_one_tensor_as_query_key_and_value(name: str) -> None:
    """Its gradient is the sum of those of three tensors."""
    x, module = tensors(2, 2, 9, peak=2)[0], built(name)
    inputs = tuple(x.detach().clone().requires_grad_() for _ in range(3))
    together, apart = (module(*each, generator=generator(1)) for each in ((x, x, x), inputs))
    torch.testing.assert_close(gradients(together, (x,))[0], sum(gradients(apart, inputs)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("p_v", [8, 5])
def test_layouts_of_models(name: str, p_v: int) -> None:
    """Heads next to each other in a row of tokens, in one projection; the gradient of a sum is an expanded number."""
    packed = torch.randn(2, 30, 3, 4, 8, generator=generator(0), dtype=torch.float64, requires_grad=True)
    module, results = built(name, 6, 8), []
    for copied in (False, True):
        q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
        inputs = [x.contiguous() if copied else x for x in (q, k, v[..., :p_v])]
        output = module(*inputs, generator=generator(1))
        upstream = torch.ones_like(output) if copied else output.new_ones(()).expand_as(output)
        results.append([output, *torch.autograd.grad(output, packed, upstream)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_other_precisions(name: str, dtype: torch.dtype, masked: bool) -> None:
    """The gradients of the same numbers in float64."""
    inputs = [x.detach().to(dtype) for x in tensors(2, 3, 40, p=8, peak=3)]
    module, mask = built(name, 7, 8), random_mask(2, 40, seed=1) if masked else None
    noise, results = draw(module, *inputs[:2]), []
    for each in (dtype, torch.float64):
        tensor = [x.to(each).requires_grad_() for x in inputs]
        output = module(*tensor, noise=noise, key_mask=mask, query_mask=mask)
        results.append([output, *gradients(output, tuple(tensor))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        tolerance = (1e-5 if dtype == torch.float32 else 0.04) * float(theirs.detach().abs().max())
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("size", [1e25, 1e-25])
def test_gradients_of_any_size(name: str, size: float) -> None:
    q, k, v = tensors(2, 2, 40, dtype=torch.float32)
    output = built(name)(q, k, v, generator=generator(1))
    once, scaled = (torch.autograd.grad(x * output.sum(), (q, k, v), retain_graph=True) for x in (1.0, size))
    for ours, theirs in zip(scaled, once, strict=True):
        torch.testing.assert_close(ours / size, theirs, rtol=1e-4, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
def test_a_part_of_the_inputs_has_gradients(name: str) -> None:
    q, k, v = tensors(1, 2, 20)
    module = built(name)
    expected = torch.autograd.grad(module(q, k, v, generator=generator(0)).sum(), (q, k, v))
    for i, x in enumerate((q, k, v)):
        inputs = [each if each is x else each.detach() for each in (q, k, v)]
        (alone,) = torch.autograd.grad(module(*inputs, generator=generator(0)).sum(), x)
        assert torch.equal(alone, expected[i])
    with torch.no_grad():
        assert not module(q, k, v).requires_grad


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_has_the_gradients_of_what_was_computed(name: str) -> None:
    """It restores torch's global state, from which a module in training draws."""
    inputs, module, results = tensors(1, 2, 40), built(name).train(), []
    for checkpointed in (False, True):
        torch.manual_seed(3)
        output = checkpoint(module, *inputs, use_reentrant=False) if checkpointed else module(*inputs)
        results.append([output, *gradients(output, inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_with_a_generator_has_the_gradients_of_one_draw(name: str) -> None:
    """A generator goes on when a checkpoint computes again: what was drawn first must not meet what is drawn then."""
    inputs, module = tensors(1, 2, 40), built(name)

    def attend(q: Tensor, k: Tensor, v: Tensor, draws: torch.Generator) -> Tensor:
        output: Tensor = module(q, k, v, generator=draws)
        return output

    ours = gradients(checkpoint(attend, *inputs, generator(3), use_reentrant=False), inputs)
    draws = generator(3)
    attend(*inputs, draws)
    for x, second in zip(ours, gradients(attend(*inputs, draws), inputs), strict=True):
        assert torch.equal(x, second)


@pytest.mark.parametrize("name", OPTIONS)
def test_hooks_see_all_that_the_gradient_needs(name: str) -> None:
    """Hooks that move saved tensors elsewhere get them all, also what was drawn: the graph itself holds none."""
    q, k, v = tensors(1, 1, 40)
    output = built(name)(q, k, v)
    assert type(output.grad_fn).__name__ == "SketchedAttentionBackward"
    assert not [x for x in tree_leaves(list(vars(output.grad_fn).values())) if isinstance(x, Tensor)]


@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
def test_memory_is_linear_in_the_length(name: str) -> None:
    """No tensor of a forward and backward pass is n x n, and none is saved that is larger than the inputs."""
    n, d, p = 4096, 16, 8
    q, k, v = tensors(1, 1, n, p=p, dtype=torch.float32)
    module, saved = built(name, d, p), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        output = module(q, k, v)
    assert max(saved) == n * p
    with LargestTensor() as seen:
        torch.autograd.grad(output.sum() + module(q, k, v).sum(), (q, k, v))
    assert seen.size <= n * max(2 * p, d)  # keys next to values, or scores of clusters


def test_a_mask_may_change_between_forward_and_backward() -> None:
    q, k, v = tensors(1, 2, 20)
    mask = torch.arange(20)[None] < 15
    expected = torch.autograd.grad(cluster_attention(q, k, v, budget=4, key_mask=mask, generator=generator(0)).sum(), k)
    output = cluster_attention(q, k, v, budget=4, key_mask=mask, generator=generator(0))
    mask.logical_not_()
    torch.testing.assert_close(torch.autograd.grad(output.sum(), k), expected)
