"""Check rows: chances that add up, a draw that keeps to them, and guesses that hold at any size of numbers."""

import pytest
import torch
from torch import Tensor

from skeinformer.attention.check_rows import chance_per_mass, draw_checks, row_mass, rows_to_draw
from skeinformer.attention.inputs import prepare
from skeinformer.attention.rows import Rows
from skeinformer.distributed.world import ALONE
from tests.helpers import DTYPES, generator, random_mask, tensors


def chances(mass: Tensor, size: int) -> Tensor:
    """The chance of each row, c mass and at most 1."""
    per_mass = chance_per_mass(mass.topk(size, -1).values, mass.sum(-1, keepdim=True), (mass > 0).sum(-1, keepdim=True))
    return (per_mass * mass).clamp(max=1).where(mass > 0, 0)


@pytest.mark.parametrize("size", [1, 5, 19])
def test_chances_add_up_and_are_in_proportion_to_mass(size: int) -> None:
    mass = torch.rand(3, 2, 20, generator=generator(), dtype=torch.float64) ** 6
    mass[0, 0, :4] = 0
    chance = chances(mass, size)
    expected = torch.full((3, 2), float(size), dtype=torch.float64)
    expected[0, 0] = min(size, 16)
    torch.testing.assert_close(chance.sum(-1), expected)
    assert torch.equal(chance > 0, mass > 0)
    for one_head, weight in zip(chance.flatten(0, 1), mass.flatten(0, 1), strict=True):
        uncertain = (one_head < 1) & (weight > 0)
        share = one_head[uncertain] / weight[uncertain]
        torch.testing.assert_close(share, share[:1].expand_as(share))


def test_rows_are_drawn_as_often_as_their_chance_says() -> None:
    draws, n, size = 20_000, 30, 8
    mass = torch.rand(n, generator=generator(2), dtype=torch.float64) ** 3 + 0.01
    u = torch.rand(draws, 1, n, generator=generator(3))
    checks = draw_checks(ALONE, u, mass.expand(draws, 1, n), size, n)
    rows, chance = checks.rows.index, chances(mass, size)
    torch.testing.assert_close(checks.chance, chance[rows])
    often = torch.bincount(rows.flatten(), minlength=n) / draws
    spread = (chance * (1 - chance) / draws).sqrt()
    assert ((often - chance).abs() <= 4 * spread + 0.01 * chance).all()
    assert (rows.sort(-1).values.diff(dim=-1) > 0).all()


def test_rows_without_mass_are_never_drawn_and_few_rows_all() -> None:
    mass = torch.ones(1, 2, 12)
    mass[0, 1, 3:] = 0
    checks = draw_checks(ALONE, torch.rand(1, 2, 12, generator=generator()), mass, 5, 12)
    assert checks.rows.live.sum(-1).tolist() == [[5, 3]]
    assert sorted(checks.rows.index[0, 1][checks.rows.live[0, 1]].tolist()) == [0, 1, 2]
    assert (checks.chance[0, 1] == 1).all()
    assert checks.candidates[..., 0].tolist() == [[12, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("logits", "values"), [(1.0, 1.0), (1e4, 1e30), (1e-20, 1e-30), (0.0, 0.0)])
def test_mass_has_a_sum_of_one_and_a_share_for_each_candidate(dtype: torch.dtype, logits: float, values: float) -> None:
    limit = torch.finfo(dtype).max / 4
    q, k, v, output = (
        (x.detach() * size).clamp(-limit, limit).to(dtype)
        for x, size in zip(
            (*tensors(2, 2, 50, 40, p_v=3), torch.randn(2, 2, 50, 3, dtype=torch.float64)),
            (logits**0.5, logits**0.5, values, values),
            strict=True,
        )
    )
    query_mask, key_mask = random_mask(2, 50), random_mask(2, 40, seed=1)
    key_mask[0] = False
    inputs = prepare(q, k, v, key_mask, query_mask)
    pilots = query_mask.long().argmax(-1)[:, None, None].expand(2, 2, 1)
    candidates = rows_to_draw(inputs.query, inputs.query_mask, Rows(pilots, torch.ones_like(pilots, dtype=torch.bool)))
    assert (candidates.sum(-1) == query_mask.sum(-1, keepdim=True) - 1).all()
    mass = row_mass(inputs, output, candidates)
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 2, dtype=mass.dtype))
    least = 1 / (5 * candidates.sum(-1, keepdim=True))
    assert (mass[candidates] >= 0.999 * least.expand_as(mass)[candidates]).all()
    assert (mass[~candidates] == 0).all()


def test_an_odd_query_and_a_row_that_leans_on_a_large_value_are_likely() -> None:
    q, k, v = (x.detach() for x in tensors(1, 1, 300, p=16))
    q[0, 0, 7] *= 10
    v[0, 0, 20] *= 100
    q[0, 0, 9] = 8 * k[0, 0, 20] / k[0, 0, 20].norm()
    mass = row_mass(prepare(q, k, v), torch.zeros_like(v), torch.ones(1, 1, 300, dtype=torch.bool))
    assert (chances(mass, 32)[0, 0, [7, 9]] > 0.9).all()
