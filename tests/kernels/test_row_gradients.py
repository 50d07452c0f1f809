"""What exact rows give to keys and values, by pieces: that of the scores of all rows."""

import math

import pytest
import torch
from torch import Tensor

from skeinformer.kernels import row_gradients as pieces
from skeinformer.kernels.choice import plain_forms
from skeinformer.kernels.fused import row_gradients
from skeinformer.kernels.row_gradients import (
    FEWEST_ROWS,
    MANY_ROWS,
    given_by_rows,
    gradients_by_pieces,
    takes_pieces,
)
from skeinformer.lab.measure.memory import peak_memory
from tests.helpers import generator


def rows_and_keys(rows: int, n: int, peak: float = 1.0, p_v: int = 8) -> list[Tensor]:
    """Queries, keys, values, log weights with empty slots, and the gradient of the rows' output."""
    shapes = [(2, 3, rows, 8), (2, 3, n, 8), (2, 3, n, p_v), (2, 3, n), (2, 3, rows, p_v)]
    q, k, v, w, g = (torch.randn(shape, generator=generator(i), dtype=torch.float64) for i, shape in enumerate(shapes))
    w[:, 1, ::3] = -math.inf
    return [peak * q, k, v, w, g]


def agree(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11 * max(1.0, theirs.abs().max().item()))


@pytest.mark.parametrize("rows", [1, 5, MANY_ROWS - 1, MANY_ROWS, 70])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("cached", [1, 2**19])
@pytest.mark.parametrize("peak", [1.0, 1e4])
def test_pieces_give_what_all_scores_give(
    monkeypatch: pytest.MonkeyPatch, rows: int, weighted: bool, cached: int, peak: float
) -> None:
    monkeypatch.setattr(pieces, "PIECE", 2 * cached)
    q, k, v, w, g = rows_and_keys(rows, 50, peak)
    given = (q, k, v, w if weighted else None, g, 0.3)
    with plain_forms():
        expected = row_gradients(*given)
    agree(given_by_rows(*given), expected)


@pytest.mark.parametrize("asking", [1, 30, 69, 70])
@pytest.mark.parametrize("cached", [1, 2**19])
@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("p_v", [5, 8])
def test_rows_that_ask_get_the_gradient_of_their_queries(
    monkeypatch: pytest.MonkeyPatch, asking: int, cached: int, threads: int, p_v: int
) -> None:
    """With four threads the six heads are four and two."""
    monkeypatch.setattr(pieces, "PIECE", 2 * cached)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    q, k, v, w, g = rows_and_keys(70, 50, p_v=p_v)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    scores = 0.3 * inputs[0] @ inputs[1].mT + w[..., None, :]
    expected = torch.autograd.grad(scores.softmax(-1) @ inputs[2], inputs, g)
    d_queries, *others = gradients_by_pieces(q, k, v, w, g, 0.3, asking)
    agree((d_queries, *others), (expected[0][..., :asking, :], *expected[1:]))


@pytest.mark.parametrize("rows", [5, 40])
def test_heads_beside_each_other_and_shared_weights(rows: int) -> None:
    """As a projection gives them: (b, n, h, p), turned. One row of weights serves all heads."""
    q, k, v, w, g = rows_and_keys(rows, 50)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v)]
    shared = w[:, 1:2]
    agree(given_by_rows(q, *turned, shared, g, 0.3), row_gradients(q, k, v, shared.expand(2, 3, 50), g, 0.3))


@pytest.mark.parametrize("rows", [5, 40])
def test_a_row_without_a_live_key_gives_nothing(rows: int) -> None:
    q, k, v, w, g = rows_and_keys(rows, 50)
    w[1, 2] = -math.inf
    found = given_by_rows(q, k, v, w, g, 0.3)
    for each in found:
        assert torch.isfinite(each).all()
        assert not each[1, 2].any()
        assert not each[:, 1, ::3].any()  # nor does an empty slot get anything
        assert each[0].any()


@pytest.mark.parametrize("threads", [1, 2, 8])
@pytest.mark.parametrize(("n", "rows"), [(1000, 600), (10_000, 300)])
def test_what_is_held_is_bounded_whatever_the_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, threads: int, n: int, rows: int
) -> None:
    """At most HELD numbers twice beside the results; all weights of the 12 heads would be many times that."""
    monkeypatch.setattr(pieces, "PIECE", 2**14)
    monkeypatch.setattr(pieces, "HELD", 2**21)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    q, k, v, g = (torch.randn(3, 4, size, 8, generator=generator(size)) for size in (rows, n, n, rows))
    assert takes_pieces(q, k)
    peak = peak_memory(lambda: gradients_by_pieces(q, k, v, None, g, 0.3))
    results, piece = 2 * 4 * k.numel(), 4 * max(2**14, min(2**21, MANY_ROWS * threads * n))
    assert results < peak < 1.5 * (results + 2 * piece) + 2**18
    assert piece <= 4 * 2**21


def test_long_rows_and_half_precision_go_through_the_fused_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no more than HELD weights are ever held."""
    taken = []
    monkeypatch.setattr(pieces, "row_gradients", lambda *given: taken.append(given[1].dtype) or row_gradients(*given))
    q, k, v, w, g = (x.float() for x in rows_and_keys(5, 50))
    given_by_rows(q, k, v, w, g, 0.3)
    assert taken == []
    given_by_rows(q, k.bfloat16(), v.bfloat16(), w, g, 0.3)
    monkeypatch.setattr(pieces, "HELD", FEWEST_ROWS * torch.get_num_threads() * 50 - 1)
    given_by_rows(q, k, v, w, g, 0.3)
    assert taken == [torch.bfloat16, torch.float32]
