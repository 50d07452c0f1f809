"""The gradient by hand is autograd's, in every precision and layout, and saves what it promises."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from skeinformer.attention.pilots import Pilots, log_column_sums
from skeinformer.attention.selection import Selection
from skeinformer.attention.skein import skein_attention
from skeinformer.kernels import merge, pilots
from skeinformer.kernels.choice import plain_forms
from tests.helpers import generator, gradients, random_mask, tensors

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.04}


def both_ways(monkeypatch: pytest.MonkeyPatch, inputs: tuple[Tensor, ...], **options: object) -> list[list[Tensor]]:
    """Output and gradients with the gradient by hand, and by autograd."""
    results = []
    for by_hand in (True, False):
        with monkeypatch.context() as patch:
            if not by_hand:
                patch.setattr(merge, "by_hand", lambda query, value: False)
            output = skein_attention(*inputs, generator=generator(3), **options)
            assert (type(output.grad_fn).__name__ == "_AttendMergedBackward") == (
                by_hand and options.get("query_mask") is None
            )
            results.append([output, *gradients(output, inputs)])
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("row_norm", ["adaptive", "simple"])
@pytest.mark.parametrize("reuse_pilots", [True, False])
def test_by_hand_equals_autograd(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, masked: bool, row_norm: str, reuse_pilots: bool
) -> None:
    mask = random_mask(2, 40, seed=1) if masked else None
    inputs = tuple(x.detach().to(dtype).requires_grad_() for x in tensors(2, 3, 40, p=8, p_v=8, peak=3))
    ours, theirs = both_ways(
        monkeypatch,
        inputs,
        key_mask=mask,
        query_mask=mask,
        budget=7,
        num_pilots=5,
        row_norm=row_norm,
        reuse_pilots=reuse_pilots,
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * b.detach().abs().max().item())


def test_layouts_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads beside the width, in one packed projection, and a gradient that is an expanded scalar."""
    packed = torch.randn(2, 30, 3, 4, 8, generator=generator(0), dtype=torch.float64, requires_grad=True)
    results = []
    for by_hand in (True, False):
        with monkeypatch.context() as patch:
            if not by_hand:
                patch.setattr(merge, "by_hand", lambda query, value: False)
            q, k, v = (x.transpose(1, 2) for x in packed.unbind(2))
            output = skein_attention(q, k, v, budget=6, num_pilots=4, generator=generator(1))
            results.append(torch.autograd.grad(output.sum(), packed)[0])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k, v = tensors(1, 2, 20, p=4, p_v=4)
    output = skein_attention(q.detach(), k, v.detach(), budget=4, num_pilots=3, generator=generator(0))
    (alone,) = torch.autograd.grad(output.sum(), k)
    output = skein_attention(q, k, v, budget=4, num_pilots=3, generator=generator(0))
    assert torch.equal(alone, torch.autograd.grad(output.sum(), (q, k, v))[1])
    with torch.no_grad():
        assert not skein_attention(q, k, v, budget=4).requires_grad


def test_a_second_derivative_is_refused_in_words() -> None:
    q, k, v = tensors(1, 2, 20, p=4, p_v=4)
    output = skein_attention(q, k, v, budget=4, num_pilots=3)
    with pytest.raises(RuntimeError, match="no second derivative: call with create_graph=False"):
        torch.autograd.grad(output.square().sum(), q, create_graph=True)


@pytest.mark.parametrize("num_pilots", [3, 20])
def test_a_checkpoint_that_draws_anew_gives_the_gradient_of_one_draw(num_pilots: int) -> None:
    """A generator goes on when a checkpoint computes again: what was drawn first must not meet what is drawn then."""
    inputs = tensors(1, 2, 40, p=4, p_v=4)

    def attend(q: Tensor, k: Tensor, v: Tensor, draws: torch.Generator) -> Tensor:
        return skein_attention(q, k, v, budget=4, num_pilots=num_pilots, generator=draws)

    checked = gradients(checkpoint(attend, *inputs, generator(3), use_reentrant=False).sum(), inputs)
    draws = generator(3)
    attend(*inputs, draws)
    for ours, second in zip(checked, gradients(attend(*inputs, draws).sum(), inputs), strict=True):
        assert torch.equal(ours, second)


def test_whatever_backward_needs_is_seen_by_hooks() -> None:
    """Hooks that move saved tensors elsewhere get them all, also what was drawn: the graph itself holds none."""
    q, k, v = tensors(1, 1, 40, p=4, p_v=4)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        output = skein_attention(q, k, v, budget=4, num_pilots=3)
    held = [x for x in vars(output.grad_fn).values() if isinstance(x, Tensor | tuple)]
    assert held == []


def test_nothing_of_size_n_times_d_is_saved() -> None:
    n, d = 512, 64
    q, k, v = tensors(1, 1, n, p=8, p_v=8)
    sizes: list[int] = []

    def note(x: Tensor) -> Tensor:
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        skein_attention(q, k, v, budget=d, num_pilots=d)
    assert max(sizes) == n * 8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [1, 63, 64, 1000])
def test_column_weights_in_pieces_are_those_of_the_fused_call(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, n: int
) -> None:
    """Pieces of 64 keys, the last one shorter; an empty pilot counts for nothing, even if all of a head are empty."""
    queries, keys = (10 * torch.randn(2, 3, size, 4, generator=generator(size)).to(dtype) for size in (6, n))
    live = torch.rand(2, 3, 6, generator=generator(1)) < 0.7
    live[0, 0] = True
    rows = Selection(torch.zeros(2, 3, 6, dtype=torch.long), live)
    held = Pilots(rows, queries, queries, 30 * torch.rand(2, 3, 6, generator=generator(2)).to(dtype))
    monkeypatch.setattr(pilots, "CACHED", 1)
    in_pieces = log_column_sums(held, keys, 0.5, power=2)
    with plain_forms():
        fused = log_column_sums(held, keys, 0.5, power=2)
    some = live.any(-1)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(in_pieces[some], fused[some], rtol=tolerance, atol=tolerance)
    assert in_pieces.isfinite().all()
