"""Pilot rows and Eq. (5) on each device's steps: the numbers of products of whole matrices."""

from types import ModuleType

import pytest
import torch
from torch import Tensor

from skeinformer.attention.pilots import FAINTEST, compute_pilots
from skeinformer.attention.rows import Rows
from skeinformer.attention.virtual_keys import VirtualKeys
from skeinformer.distributed.world import ALONE
from skeinformer.kernels import loops, plain
from tests.helpers import generator

SCALE = 0.5
STEPS = pytest.mark.parametrize("steps", [loops, plain], ids=["loops", "plain"])


def problem(peak: float, weighted: bool) -> tuple[VirtualKeys, Tensor, Rows]:
    """Five pilots of which one is empty, 3 x 2 heads, 40 keys; with weights, the last example has no live key."""
    keys, values = (torch.randn(3, 2, 40, p, generator=generator(p), dtype=torch.float64) for p in (4, 6))
    queries = peak * torch.randn(3, 2, 5, 4, generator=generator(1), dtype=torch.float64)
    values[0, 0, 3] = 0
    log_weight = None
    if weighted:
        log_weight = torch.randn(3, 2, 40, generator=generator(2), dtype=torch.float64)
        log_weight[:, :, ::3] = -torch.inf
        log_weight[2] = -torch.inf
        values = values.masked_fill(log_weight[..., None] == -torch.inf, 0)  # as those of padding are
    live = torch.tensor([True, True, True, True, False]).expand(3, 2, 5)
    return VirtualKeys(keys, values, log_weight), queries, Rows(torch.tensor([8, 0, 3, 5, 1]).expand(3, 2, 5), live)


def check(source: VirtualKeys, queries: Tensor, rows: Rows, steps: ModuleType, layout: VirtualKeys) -> None:
    """Compare with softmax of all scores; `layout` is the source in some layout of its memory."""
    pilots, log_importance, mass = compute_pilots(rows, queries, layout, SCALE, steps, ALONE, with_mass=True)
    log_weight = source.log_weights()
    scores = SCALE * queries @ source.keys.mT + log_weight[..., None, :]
    lse = scores.logsumexp(-1)
    log_b = scores - lse.where(lse > -torch.inf, 0)[..., None]  # the logs of B_J
    some = (log_weight > -torch.inf).any(-1)
    torch.testing.assert_close(pilots.output, log_b.exp() @ source.values, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(pilots.lse[some], lse[some], rtol=1e-10, atol=1e-10)
    live = rows.live[..., None]
    torch.testing.assert_close(mass[some], (log_b.exp() * live).sum(-2)[some] / live.sum(-2)[some])
    norms = source.values.norm(dim=-1)
    log_norm = norms.log().clamp(min=norms.amax(-1, keepdim=True).log() - FAINTEST)
    expected = (2 * log_b).masked_fill(~live, -torch.inf).logsumexp(-2) / 2 + log_norm
    torch.testing.assert_close(log_importance[some], expected[some], rtol=1e-9, atol=1e-9)
    assert (log_importance[~some] == -torch.inf).all()


@STEPS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("peak", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("beside", [False, True])
def test_pilots_and_importance(steps: ModuleType, weighted: bool, peak: float, beside: bool) -> None:
    """At scores whose squares are 0 too, and for heads next to each other in memory, as projections leave them."""
    source, queries, rows = problem(peak, weighted)
    layout = source
    if beside:
        keys, values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in source[:2])
        layout = VirtualKeys(keys, values, source.log_weight)
    check(source, queries, rows, steps, layout)


@pytest.mark.parametrize("size", [1, 5 * 40, 5 * 40 * 2])
def test_rows_in_pieces(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """In as many pieces as the cache of a CPU wants, and on the fused kernel where rows are too many."""
    for name in ("CACHED", "HELD"):
        with monkeypatch.context() as patch:
            patch.setattr(loops, name, size)
            source, queries, rows = problem(1.0, True)
            check(source, queries, rows, loops, source)
