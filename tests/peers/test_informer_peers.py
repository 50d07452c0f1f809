"""Beside InformerProbSparseAttention of transformers: equal where it selects as published; its defects are shown."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skeinformer import build
from tests.helpers import dense_exact, generator, lengths_mask

peer_module = pytest.importorskip("transformers.models.informer.modeling_informer")
pytestmark = pytest.mark.peers

DIM, HEADS = 32, 4


def peer(factor: int, dim: int = DIM, heads: int = HEADS) -> Any:
    """The peer without biases, so that tokens of 0 are queries of 0, and without an output layer."""
    torch.manual_seed(3)
    module = peer_module.InformerProbSparseAttention(dim, heads, sampling_factor=factor, bias=False)
    with torch.no_grad():
        module.out_proj.weight.copy_(torch.eye(dim))
    return module.eval()


def heads_of(theirs: Any, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The peer's q, k, v as (b, h, n, p)."""
    layers = ((theirs.q_proj, x), (theirs.k_proj, context), (theirs.v_proj, context))
    q, k, v = (layer(y).unflatten(-1, (theirs.num_heads, -1)).transpose(1, 2) for layer, y in layers)
    return q, k, v


def ours(theirs: Any, x: Tensor, context: Tensor, budget: int, name: str = "informer", **masks: Tensor) -> Tensor:
    q, k, v = heads_of(theirs, x, context)
    module = build(name, head_dim=q.shape[-1], budget=budget)
    return module(q, k, v, generator=generator(4), **masks).transpose(1, 2).flatten(-2)


@pytest.mark.parametrize("b", [1, 3])
def test_agrees_where_the_selection_is_clear(b: int) -> None:
    """Four queries are not 0, and both take four: ceil(ln(1 + 40)) with factor 1."""
    theirs = peer(factor=1)
    x, context = (torch.randn(b, n, DIM, generator=generator(n)) for n in (40, 24))
    active = torch.stack([torch.randperm(40, generator=generator(i))[:4] for i in range(b)])
    x = torch.zeros_like(x).scatter(1, active[..., None].expand(-1, -1, DIM), 2 * x).requires_grad_()
    expected, output = theirs(x, key_value_states=context)[0], ours(theirs, x, context, budget=4)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    weight = torch.randn(output.shape, generator=generator(2))
    found, known = (torch.autograd.grad((y * weight).sum(), x)[0] for y in (output, expected))
    torch.testing.assert_close(found, known, rtol=1e-4, atol=1e-4)


def test_agrees_where_every_key_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight keys: ours takes each once, the peer is made to. 2 ceil(ln(1 + 40)) = 8 queries of 40 are exact."""
    theirs = peer(factor=2)
    x, context = (torch.randn(3, n, DIM, generator=generator(n)) for n in (40, 8))
    monkeypatch.setattr(torch, "randint", lambda low, high, size: torch.arange(high))
    expected = theirs(x, key_value_states=context)[0]
    monkeypatch.undo()
    torch.testing.assert_close(ours(theirs, x, context, budget=8), expected, rtol=1e-4, atol=1e-4)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made, and the shapes of random integers."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.draws: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, Tensor):
                self.size = max(self.size, x.numel())
                if "randint" in str(func):
                    self.draws.append(tuple(x.shape))
        return result


def test_its_draws_are_shared_and_as_many_as_keys() -> None:
    """One sample of n keys for all queries, heads and examples, so that n x n scores are computed: quadratic."""
    n, b = 600, 2
    theirs = peer(factor=1)
    x = torch.randn(b, n, DIM, generator=generator())
    with torch.no_grad():
        with Largest() as peers:
            theirs(x)
        with Largest() as largest:
            ours(theirs, x, x, budget=7)
    assert peers.draws == [(n,)]
    assert peers.size == b * HEADS * n * n
    assert largest.size < b * HEADS * n * n / 20


def test_its_mean_is_divided_by_another_count() -> None:
    """15 of 64 keys are drawn and their sum is divided by 64: a flat query of large scores looks sparse to it.

    Query 0 scores 10 with every key: M = 0. Queries 1 and 2 score 2 or -2: M is about 2. Two are taken, ceil(1.5 ln 3),
    by the scores with 7 keys, ceil(1.5 ln 64).
    """
    theirs = peer(factor=1, dim=4, heads=1)
    with torch.no_grad():
        for layer in (theirs.q_proj, theirs.k_proj, theirs.v_proj):
            layer.weight.copy_(torch.eye(4))
    alternating = torch.tensor([1.0, -1.0]).repeat(32)
    noise = torch.randn(64, generator=generator())
    context = torch.stack([torch.ones(64), alternating, noise, noise**2], -1)[None]
    x = torch.tensor([[[20.0, 0, 0, 0], [0, 4, 0, 0], [0, -4, 0, 0]]])
    inputs = heads_of(theirs, x, context)
    output = build("informer", head_dim=4, factor=1.5)(*inputs, generator=generator(4))
    truth, output = (y.float().transpose(1, 2).flatten(-2) for y in (dense_exact(*inputs), output))
    rows = [torch.isclose(y, truth, atol=1e-4).all(-1)[0].tolist() for y in (output, theirs(x, context)[0])]
    assert rows[0] == [True, True, True]  # the mean of V is the row of a flat query
    assert sum(rows[1][1:]) == 1


def test_its_mean_of_values_and_its_selection_see_padding() -> None:
    """A mask keeps padding out of the exact rows only: other contents of padding change the rows of real tokens."""
    n, real = 40, 15
    theirs = peer(factor=1)
    x = torch.randn(2, n, DIM, generator=generator())
    mask = lengths_mask([n, real], n)
    additive = torch.zeros(2, 1, n, n).masked_fill(~mask[:, None, None, :], torch.finfo(torch.float32).min)
    other = torch.where(mask[..., None], x, 5.0)
    torch.manual_seed(0)
    first = theirs(x, attention_mask=additive)[0]
    torch.manual_seed(0)
    second = theirs(other, attention_mask=additive)[0]
    assert torch.equal(first[0], second[0])
    assert ((first - second)[1, :real].abs().amax(-1) > 0.1).all()
    for name in ("informer", "informer_mask"):
        masks = {"key_mask": mask, "query_mask": mask}
        assert torch.equal(ours(theirs, x, x, 4, name, **masks), ours(theirs, other, other, 4, name, **masks))
