"""A sketch for each head by a tolerance: what heads get, how far off they are, masks, gradients, determinism."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer import build, convert, sketched
from skeinformer.attention.adaptive import EXACT, LADDER, Adaptive
from tests.helpers import exact, generator, gradients, lengths_mask, relative_error

N = 700


def heads() -> tuple[Tensor, Tensor, Tensor]:
    """Four kinds of heads: flat, tight clusters of keys, near keys, and random peaks that no sketch can have."""
    source = generator(1)
    q, k, v = (torch.randn(1, 4, N, 16, generator=source) for _ in range(3))
    v += 2
    q[:, 0] *= 0.05
    centers = torch.randn(4, 16, generator=source) * 2
    k[:, 1] = centers[torch.arange(N) % 4] + 0.01 * k[:, 1]
    v[:, 1] = centers[torch.arange(N) % 4] + 0.01 * v[:, 1]
    near = torch.linspace(0, 60, N)[:, None] - torch.linspace(0, 60, 16)
    q[:, 2] = k[:, 2] = 6 * torch.exp(-(near**2) / 8)
    q[:, 3], k[:, 3] = 3 * q[:, 3], 3 * k[:, 3]
    return q, k, v - 2 * (torch.arange(4) >= 2)[:, None, None]


def module(tolerance: float = 0.1, **options: Any) -> Any:
    return build("adaptive", head_dim=16, seed=0, tolerance=tolerance, only_faster=False, **options).eval()


@pytest.mark.parametrize("tolerance", [0.05, 0.1, 0.3])
def test_errors_are_within_the_tolerance_and_heads_differ(tolerance: float) -> None:
    q, k, v = heads()
    output, info = module(tolerance).certify(q, k, v)
    assert (relative_error(output, exact(q, k, v)) <= 1.2 * tolerance).all()
    rungs = info.rung[0].tolist()
    assert rungs[0] == 0
    assert rungs[1] == 0
    assert rungs[3] == EXACT
    torch.testing.assert_close(output[:, 3], exact(q, k, v)[:, 3], rtol=1e-4, atol=1e-5)


def test_a_window_is_found_where_near_keys_matter() -> None:
    q, k, v = (x[:, 2:3] for x in heads())
    _, info = module(0.1).certify(q, k, v)
    assert LADDER[info.rung.item()].window > 0


def test_neither_batch_mates_nor_padding_change_what_a_head_gets() -> None:
    q, k, v = heads()
    alone, info = module().certify(q, k, v)
    pad = [F.pad(x, (0, 0, 0, 50), value=9.0) for x in (q, k, v)]
    both = [torch.cat([x, 2 * x.flip(2)]) for x in pad]
    mask = lengths_mask([N, N + 50], N + 50)
    output, other = module().certify(*both, key_mask=mask, query_mask=mask)
    assert torch.equal(other.rung[0], info.rung[0])
    torch.testing.assert_close(output[:1, :, :N], alone, rtol=1e-3, atol=1e-4)


def test_gradients_of_exact_heads_are_exact() -> None:
    inputs = tuple(x.double().requires_grad_() for x in heads())
    output, info = module(0.1).certify(*inputs)
    given = gradients(output, inputs)
    whole = gradients(exact(*inputs), inputs)
    assert (info.rung == EXACT).any()
    for got, wanted in zip(given, whole, strict=True):
        assert got.isfinite().all()
        at = info.rung[0] == EXACT
        torch.testing.assert_close(got[:, at], wanted[:, at], rtol=1e-6, atol=1e-8)


def test_cross_attention_uses_no_window() -> None:
    q, k, v = heads()
    output, info = module(0.2).certify(q[:, :, :300], k, v)
    assert all(rung == EXACT or not LADDER[rung].window for rung in info.rung.flatten().tolist())
    assert (relative_error(output, exact(q[:, :, :300], k, v)) <= 0.25).all()


def test_nan_in_a_head_stays_in_it() -> None:
    q, k, v = heads()
    v[0, 1, 3] = torch.nan
    output = module()(q, k, v)
    assert output[:, [0, 2, 3]].isfinite().all()


def test_short_calls_are_exact() -> None:
    q, k, v = heads()
    output, info = build("adaptive", head_dim=16, seed=0).eval().certify(q, k, v)
    assert (info.rung == EXACT).all()
    torch.testing.assert_close(output, exact(q, k, v), rtol=1e-4, atol=1e-5)
    assert Adaptive().is_faster(8192, 8192, 32, False, "cpu")


@torch.no_grad()
def test_drop_ins_take_a_tolerance() -> None:
    q, k, v = (torch.cat([x] * 6, 2) for x in heads())
    with sketched(tolerance=0.2) as report:
        output = F.scaled_dot_product_attention(q, k, v)
    assert report.sketched == 1
    assert (relative_error(output, exact(q, k, v)) <= 0.25).all()
    layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    assert "tolerance=0.2" in str(convert(layer, tolerance=0.2))


@pytest.mark.parametrize("options", [{"method": "cluster"}, {"budget": 8}])
def test_a_tolerance_and_a_fixed_sketch_exclude_each_other(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give one of them"):
        sketched(tolerance=0.1, **options)


@pytest.mark.parametrize("tolerance", [0, -1, float("nan"), float("inf"), True, "0.1"])
def test_a_wrong_tolerance(tolerance: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="tolerance"):
        sketched(tolerance=tolerance)


@torch.no_grad()
def test_a_report_counts_the_sketches_of_heads() -> None:
    q, k, v = (torch.cat([x] * 6, 2) for x in heads())
    with sketched(tolerance=0.2, certify=True) as report:
        F.scaled_dot_product_attention(q, k, v)
    assert report.rungs.total() == 4
    assert report.rungs["16 clusters"] >= 1
    assert "16 clusters" in str(report)
    assert "tolerance=0.2" in str(report)


@torch.no_grad()
def test_a_fixed_sketch_that_breaks_a_head_warns() -> None:
    q, k, v = heads()
    with (
        pytest.warns(UserWarning, match="tolerance="),
        sketched("cluster", budget=8, min_length=0, certify=True) as report,
    ):
        F.scaled_dot_product_attention(q, k, v)
    assert report.worst_bound is not None
    assert report.worst_bound > 0.5


@pytest.mark.parametrize("dynamic", [None, True])
@torch.no_grad()
def test_graphs_of_several_lengths(dynamic: bool | None) -> None:
    def call(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)

    compiled = torch.compile(call, fullgraph=True, backend="eager", dynamic=dynamic)
    for n in (3200, 3300):
        x = torch.randn(1, 2, n, 32, generator=generator(n))
        with sketched(tolerance=0.2):
            assert (relative_error(compiled(x), exact(x, x, x)) < 0.25).all()


@torch.no_grad()
def test_a_program_for_every_length() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, q, q)

    x = torch.randn(1, 2, 3200, 32)
    with sketched():
        program = torch.export.export(Model(), (x,), dynamic_shapes=({2: torch.export.Dim("n", min=2, max=10000)},))
    for n in (50, 3300):
        y = torch.randn(1, 2, n, 32)
        error = relative_error(program.module()(y), exact(y, y, y))
        assert (error < 0.2).all()


def test_options_of_a_fixed_sketch_with_a_tolerance() -> None:
    for options in ({"quality": "fast"}, {"window": 8}):
        with pytest.raises(ValueError, match="give one of them"):
            sketched(tolerance=0.1, **options)


@torch.no_grad()
def test_a_short_call_is_reported_as_exact() -> None:
    x = torch.randn(1, 2, 200, 32)
    with sketched(tolerance=0.2, min_length=0) as report:
        F.scaled_dot_product_attention(x, x, x)
    assert report.exact == 1
