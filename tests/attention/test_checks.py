"""Check rows: chances that add up, a draw that keeps to them, and guesses that hold at any size of numbers."""

import pytest
import torch
from torch import Tensor

from skeinformer.attention.checks import alone, chance_per_mass, chances, draw_checks, row_mass, rows_to_draw
from skeinformer.attention.inputs import prepare
from tests.helpers import DTYPES, generator, random_mask, tensors


def all_chances(mass: Tensor, size: int) -> Tensor:
    largest, count = mass.topk(size, -1).values, (mass > 0).sum(-1, keepdim=True)
    return chances(mass, chance_per_mass(largest, mass.sum(-1, keepdim=True), count))


@pytest.mark.parametrize("size", [1, 5, 19])
def test_chances_add_up_and_are_in_proportion_to_mass(size: int) -> None:
    mass = torch.rand(3, 2, 20, generator=generator(), dtype=torch.float64) ** 6
    mass[0, 0, :4] = 0
    found = all_chances(mass, size)
    expected = torch.full((3, 2), float(size), dtype=torch.float64)
    expected[0, 0] = min(size, 16)
    torch.testing.assert_close(found.sum(-1), expected)
    assert (found <= 1).all()
    assert torch.equal(found > 0, mass > 0)
    for chance, weight in zip(found.flatten(0, 1), mass.flatten(0, 1), strict=True):
        open_to_doubt = (chance < 1) & (weight > 0)
        share = chance[open_to_doubt] / weight[open_to_doubt]
        torch.testing.assert_close(share, share[:1].expand_as(share))


def test_rows_are_drawn_as_often_as_their_chance_says() -> None:
    draws, n, size = 20_000, 30, 8
    mass = torch.rand(n, generator=generator(2), dtype=torch.float64) ** 3 + 0.01
    checks = draw_checks(torch.rand(draws, 1, n, generator=generator(3)), mass.expand(draws, 1, n), size)
    often = torch.zeros(n, dtype=torch.float64).index_add_(
        0, checks.indices.flatten(), torch.ones(draws * size).double()
    )
    chance = all_chances(mass, size)
    spread = (chance * (1 - chance) / draws).sqrt()
    assert ((often / draws - chance).abs() <= 4 * spread + 0.01 * chance).all()
    assert (checks.indices.sort(-1).values.diff(dim=-1) > 0).all()


def test_rows_without_mass_are_never_drawn_and_few_rows_all() -> None:
    mass = torch.ones(1, 2, 12)
    mass[0, 1, 3:] = 0
    checks = draw_checks(torch.rand(1, 2, 12, generator=generator()), mass, 5)
    assert checks.live.sum(-1).tolist() == [[5, 3]]
    assert sorted(checks.indices[0, 1][checks.live[0, 1]].tolist()) == [0, 1, 2]
    assert (checks.chance[0, 1] == 1).all()
    assert checks.candidates[..., 0].tolist() == [[12, 3]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("logits", "values"), [(1.0, 1.0), (1e4, 1e30), (1e-20, 1e-30), (0.0, 0.0)])
def test_mass_has_a_sum_of_one_and_a_share_for_each_candidate(dtype: torch.dtype, logits: float, values: float) -> None:
    q, k, v = (x.detach() for x in tensors(2, 2, 50, 40, p_v=3))
    limit = torch.finfo(dtype).max / 4
    q, k, v = (
        (x * size).clamp(-limit, limit).to(dtype) for x, size in ((q, logits**0.5), (k, logits**0.5), (v, values))
    )
    query_mask, key_mask = random_mask(2, 50), random_mask(2, 40, seed=1)
    key_mask[0] = False
    inputs = prepare(q, k, v, key_mask, query_mask)
    known = query_mask.long().argmax(-1)[:, None, None].expand(2, 2, 1)
    candidates = rows_to_draw(inputs.query, inputs.query_mask, known)
    mass = row_mass(
        inputs, torch.randn(2, 2, 50, 3, generator=generator()).mul(values).to(dtype), candidates, 0.5, alone(inputs)
    )
    torch.testing.assert_close(mass.sum(-1), torch.ones(2, 2, dtype=mass.dtype))
    least = 1 / (5 * candidates.sum(-1, keepdim=True))
    assert (mass[candidates] >= 0.999 * least.expand_as(mass)[candidates]).all()
    assert (mass[~candidates] == 0).all()
    assert (candidates.sum(-1) == query_mask.sum(-1, keepdim=True) - 1).all()


def test_an_odd_query_and_a_row_that_leans_on_a_large_value_are_likely() -> None:
    q, k, v = (x.detach() for x in tensors(1, 1, 300, p=16))
    q[0, 0, 7] *= 10
    v[0, 0, 20] *= 100
    q[0, 0, 9] = 8 * k[0, 0, 20] / k[0, 0, 20].norm()
    inputs = prepare(q, k, v)
    chance = all_chances(
        row_mass(inputs, torch.zeros_like(v), torch.ones(1, 1, 300, dtype=torch.bool), 0.25, alone(inputs)), 32
    )[0, 0]
    assert chance[7] > 0.9
    assert chance[9] > 0.9
