"""Policies of training: each differs from the cluster sketch in what it says, and in nothing else."""

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer import build
from skeinformer.noise import LAYERS
from studies.offered import studied_methods
from tests.helpers import generator, tensors

N, D = 60, 6


def module(layer: int = 0, **options: object) -> torch.nn.Module:
    with studied_methods("policy"):
        return build("policy", head_dim=4, seed=2 * LAYERS + layer, **{"budget": D, **options})


def cluster(budget: int = D) -> torch.nn.Module:
    return build("cluster", head_dim=4, seed=2 * LAYERS, budget=budget)


def call(module: torch.nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """With the draws of one seed."""
    output: Tensor = module(*inputs, generator=generator(5))
    return output


def test_without_a_policy_it_is_the_cluster_sketch() -> None:
    inputs = tensors(2, 2, N)
    assert torch.equal(call(module(), inputs), call(cluster(), inputs))
    assert not torch.equal(module()(*inputs), module()(*inputs))  # training draws again


def test_only_the_named_layer_is_exact() -> None:
    inputs = tensors(2, 2, N)
    exact = F.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(module(1, exact_layer=1)(*inputs), exact)
    assert torch.equal(call(module(0, exact_layer=1), inputs), call(cluster(), inputs))


def test_the_first_or_the_last_layers_are_exact() -> None:
    inputs = tensors(2, 2, N)
    exact = F.scaled_dot_product_attention(*inputs)
    for options, expected in (({"exact_until": 2}, [0, 1, 2]), ({"exact_from": 3}, [3, 4]), ({"exact_from": 9}, [])):
        found = [layer for layer in range(5) if torch.allclose(module(layer, **options)(*inputs), exact, atol=1e-5)]
        assert found == expected


def test_fixed_draws_are_those_of_evaluation() -> None:
    inputs, fixed = tensors(2, 2, N), module(draws="fixed")
    assert torch.equal(fixed.train()(*inputs), cluster().eval()(*inputs))


def test_the_budget_changes_after_so_many_steps_of_training() -> None:
    inputs, grown = tensors(2, 2, N), module(later=20, after=2)
    for _ in range(2):
        assert torch.equal(call(grown, inputs), call(cluster(), inputs))
    assert torch.equal(call(grown.eval(), inputs), call(cluster(), inputs))  # evaluation is no step
    assert torch.equal(call(grown.train(), inputs), call(cluster(20), inputs))
    assert torch.equal(call(grown.eval(), inputs), call(cluster(20), inputs))
