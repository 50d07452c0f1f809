"""torch.export with a symbolic length: one program for all of a range, equal to the module."""

import pytest
import torch
from torch import Tensor

from skeinformer import build

slow = pytest.mark.slow


def qkv(n: int) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 2, n, 8, generator=torch.Generator().manual_seed(i)) for i in range(3))


def masks(n: int) -> dict[str, Tensor]:
    mask = torch.arange(n) < torch.tensor([[n], [n - 20]])
    return {"key_mask": mask, "query_mask": mask}


@pytest.mark.parametrize(
    ("name", "masked"),
    [
        ("skeinformer", False),
        pytest.param("skeinformer", True, marks=slow),
        pytest.param("cluster", False, marks=slow),
        pytest.param("cluster", True, marks=slow),
        pytest.param("bigbird", False, marks=slow),
        pytest.param("bigbird", True, marks=slow),
    ],
)
def test_one_program_for_all_lengths(name: str, masked: bool) -> None:
    """Also where a selection is larger than the shortest sequence, and where there are fewer blocks than a window."""
    module = build(name, head_dim=8, seed=0).eval()
    n = torch.export.Dim("n", min=64, max=4096)
    shapes = {"query": {2: n}, "key": {2: n}, "value": {2: n}}
    given = masks(300) if masked else {}
    program = torch.export.export(
        module, qkv(300), given, dynamic_shapes=shapes | {key: {1: n} for key in given}
    ).module()
    for length in (64, 65, 129, 300, 1000):
        given = masks(length) if masked else {}
        expected = module(*qkv(length), **given)
        torch.testing.assert_close(program(*qkv(length), **given), expected, rtol=1e-5, atol=1e-5)


def test_estimated_gradients_leave_a_program_as_it_is() -> None:
    """Whether there are more keys than the budget is not asked."""
    module = build("skeinformer", head_dim=8, budget=16, seed=0, gradient="queries").eval()
    n = torch.export.Dim("n", min=4, max=4096)
    program = torch.export.export(module, qkv(60), dynamic_shapes={name: {2: n} for name in ("query", "key", "value")})
    for length in (9, 60, 200):
        expected = module(*qkv(length))
        torch.testing.assert_close(program.module()(*qkv(length)), expected, rtol=1e-5, atol=1e-5)


def test_heads_that_were_split_are_not_copied() -> None:
    """(b, n, h, p) with its dimensions turned is what the fused kernel takes as it is."""
    given = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv(60)]
    assert not any(x.is_contiguous() for x in given)
    program = torch.export.export(build("softmax", head_dim=8).eval(), tuple(given))
    nodes = [node for part in program.graph_module.modules() for node in part.graph.nodes]
    assert not any("contiguous" in str(node.target) or "clone" in str(node.target) for node in nodes)
