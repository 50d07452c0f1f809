"""Pilot rows that are formed equal those of the fused kernel, with Eq. (5) beside them."""

import pytest
import torch
from torch import Tensor

from skeinformer.attention.pilots import Pilots, compute_pilots, log_importance
from skeinformer.attention.selection import Selection
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.kernels import pilots
from skeinformer.kernels.rows import is_one_batch
from tests.helpers import generator

SCALE = 0.5


def source_and_queries(peak: float, weighted: bool) -> tuple[VirtualKeys, Tensor, Selection]:
    """Five pilots of which one is none, 3 x 2 heads, 40 keys; with weights, the last example has no live key."""
    keys, values = (torch.randn(3, 2, 40, p, generator=generator(p), dtype=torch.float64) for p in (4, 6))
    query = peak * torch.randn(3, 2, 9, 4, generator=generator(1), dtype=torch.float64)
    log_weight = None
    if weighted:
        log_weight = torch.randn(3, 2, 40, generator=generator(2), dtype=torch.float64)
        log_weight[:, :, ::3] = -torch.inf
        log_weight[2] = -torch.inf
    live = torch.tensor([True, True, True, True, False]).expand(3, 2, 5)
    return VirtualKeys(keys, values, log_weight), query, Selection(torch.tensor([8, 0, 3, 5, 1]).expand(3, 2, 5), live)


def both(
    monkeypatch: pytest.MonkeyPatch, source: VirtualKeys, query: Tensor, rows: Selection
) -> tuple[tuple[Pilots, Tensor], tuple[Pilots, Tensor]]:
    """The pilots and the importance, with rows that are formed and with the fused kernel."""
    results = []
    for held in (pilots.HELD, 0):
        monkeypatch.setattr(pilots, "HELD", held)
        found = compute_pilots(query, rows, source, SCALE)
        results.append((found, log_importance(found, source, SCALE)))
    return results[0], results[1]


@pytest.mark.parametrize("cached", [1, 5 * 40 * 2, 2**19])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("peak", [1.0, 30.0])
def test_formed_rows_equal_the_kernels(
    monkeypatch: pytest.MonkeyPatch, weighted: bool, peak: float, cached: int
) -> None:
    monkeypatch.setattr(pilots, "CACHED", cached)
    source, query, rows = source_and_queries(peak, weighted)
    (formed, importance), (fused, expected) = both(monkeypatch, source, query, rows)
    assert fused.log_square is None
    torch.testing.assert_close(formed.output, fused.output, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(formed.normalizer, fused.normalizer, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(importance, expected, rtol=1e-10, atol=1e-10)


def test_moderate_scores_come_with_their_squares_and_faint_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    source, query, rows = source_and_queries(1.0, weighted=True)
    assert compute_pilots(query, rows, source, SCALE).log_square is not None
    source, query, rows = source_and_queries(1000.0, weighted=False)
    (formed, importance), (_, expected) = both(monkeypatch, source, query, rows)
    assert formed.log_square is None
    assert importance.isfinite().all()
    torch.testing.assert_close(importance, expected, rtol=1e-10, atol=1e-10)


def test_recorded_or_half_precision_rows_stay_in_the_kernel() -> None:
    source, query, rows = source_and_queries(1.0, weighted=False)
    assert compute_pilots(query.requires_grad_(), rows, source, SCALE).log_square is None
    with torch.no_grad():
        assert compute_pilots(query, rows, source, SCALE).log_square is not None
    half = VirtualKeys(source.keys.bfloat16(), source.values[..., :4].bfloat16(), None)
    assert compute_pilots(query.detach().bfloat16(), rows, half, SCALE).log_square is None


@pytest.mark.parametrize("weighted", [False, True])
def test_heads_that_lie_beside_each_other_give_the_same(weighted: bool) -> None:
    """(b, n, h, p) transposed, as projections leave it: no copy into one batch, the same numbers."""
    source, query, rows = source_and_queries(1.0, weighted)
    beside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (source.keys, source.values)]
    assert not is_one_batch(beside[0])
    assert is_one_batch(source.keys)
    found = compute_pilots(query, rows, VirtualKeys(*beside, source.log_weight), SCALE)
    expected = compute_pilots(query, rows, source, SCALE)
    assert found.log_square is not None
    for a, b in zip(found[2:], expected[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
