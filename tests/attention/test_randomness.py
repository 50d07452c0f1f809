"""Randomness is data: who draws, what it depends on, and that the draws have the probabilities that they claim."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from skeinformer import build, skein_attention
from skeinformer.attention import SkeinNoise
from tests import reference
from tests.helpers import (
    DETERMINISTIC,
    LONGER_SKETCHES,
    PADDING_IS_DRAWN,
    RANDOM,
    VARIANTS,
    copies,
    draw,
    generator,
    inputs_for,
    lengths_mask,
    map_inputs,
    tensors,
)

# S of another length is another S: the transform and its order are padded to a power of two, the density is 1/sqrt(n);
# and where padding is drawn, more of it is drawn
DEPENDS_ON_LENGTH = LONGER_SKETCHES | PADDING_IS_DRAWN

every_variant = pytest.mark.parametrize("name", VARIANTS)


@every_variant
def test_a_call_is_a_function_of_its_generator(name: str) -> None:
    """Noise that is sampled by hand is what a call draws."""
    q, k, v = inputs_for(name, 2, 2, 9)
    module = VARIANTS[name].build(budget=3)
    expected = module(q, k, v, generator=generator(1))
    assert torch.equal(module(q, k, v, generator=generator(1)), expected)
    assert torch.equal(module(q, k, v, noise=module.sample_noise(q, k, generator=generator(1))), expected)


def test_noise_at_the_ends_of_the_interval_is_still_exact_at_full_size() -> None:
    q, k, v = tensors(2, 2, 9)
    expected = build("softmax", head_dim=4)(q, k, v)
    for end in (0.0, 1.0):
        noise = SkeinNoise(*(torch.full((2, 2, 9), end) for _ in range(2)))
        torch.testing.assert_close(skein_attention(q, k, v, budget=9, num_pilots=2, noise=noise), expected)


@pytest.mark.parametrize("name", RANDOM)
def test_other_seeds_other_results(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, 9)
    module = VARIANTS[name].build(budget=3)
    outputs = [module(q, k, v, generator=generator(seed)) for seed in range(3)]
    assert not torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[1], outputs[2])
    shared = generator(1)
    assert not torch.equal(module(q, k, v, generator=shared), module(q, k, v, generator=shared))


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_deterministic_method_does_not_ask_for_numbers(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, 9)
    source = generator(1)
    before = source.get_state()
    module = VARIANTS[name].build()
    assert torch.equal(module(q, k, v, generator=source), module(q, k, v))
    assert torch.equal(source.get_state(), before)
    assert draw(module, q, k) == ()


@every_variant
def test_the_global_state_is_the_source_of_calls_without_another(name: str) -> None:
    """It is neither seeded again nor used where noise, a generator or a seed is there."""
    q, k, v = inputs_for(name, 2, 2, 9)
    module = VARIANTS[name].build(budget=3)
    torch.manual_seed(5)
    first, second = module(q, k, v), module(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(module(q, k, v), first)
    assert torch.equal(module(q, k, v), second)
    assert torch.equal(first, second) == (name not in RANDOM)
    noise, before = draw(module, q, k), torch.get_rng_state()
    module(q, k, v, generator=generator(1))
    module(q, k, v, noise=noise)
    module(q, k, v, seed=3)
    VARIANTS[name].build(seed=4).eval()(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)


@every_variant
def test_seed_makes_evaluation_deterministic(name: str) -> None:
    q, k, v = inputs_for(name, 3, 2, 9)
    module, twin = VARIANTS[name].build(budget=3, seed=4).eval(), VARIANTS[name].build(budget=3, seed=4).eval()
    output = module(q, k, v)
    assert torch.equal(output, module(q, k, v))
    assert torch.equal(output, twin(q, k, v))
    alone = torch.cat([module(*map_inputs(lambda x, i=i: x[i : i + 1], (q, k, v))) for i in range(3)])
    torch.testing.assert_close(alone, output, rtol=1e-12, atol=1e-12)
    if name in RANDOM and name != "softmax_dropout":
        assert not torch.equal(VARIANTS[name].build(budget=3, seed=5).eval()(q, k, v), output)
        assert not torch.equal(module(q, k, v, generator=generator(1)), output)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - DEPENDS_ON_LENGTH))
def test_seed_makes_right_padding_harmless(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, 9)
    module = VARIANTS[name].build(budget=3, seed=4).eval()
    expected = module(q, k, v)
    longer = map_inputs(lambda x: torch.nn.functional.pad(x, (0, 0, 0, 14)), (q, k, v))
    mask = lengths_mask([9, 9], 23)
    padded = module(*longer, key_mask=mask, query_mask=mask)
    torch.testing.assert_close(padded[:, :, :9], expected, rtol=1e-12, atol=1e-12)
    assert (padded[:, :, 9:] == 0).all()


def test_seed_makes_right_padding_harmless_at_length() -> None:
    """Of 2000 uniform candidates in 300 heads the same 64 are chosen at every padded length: no two rank equal."""
    x = torch.randn(1, 300, 2000, 1, generator=generator())
    module = build("skeinformer", head_dim=1, budget=64, columns="uniform", seed=48).eval()
    chosen = []
    for n in (2000, 3000):
        mask, padded = lengths_mask([2000], n), torch.nn.functional.pad(x, (0, 0, 0, n - 2000))
        _, info = module.certify(padded, padded, padded, key_mask=mask, query_mask=mask, num_checks=1)
        chosen.append([index.sort().values for index in (info.pilots, info.columns)])
    assert all(map(torch.equal, *chosen))


@pytest.mark.parametrize("name", RANDOM)
def test_training_is_random_but_for_the_seed_of_a_call(name: str) -> None:
    q, k, v = inputs_for(name, 2, 2, 9)
    module = VARIANTS[name].build(budget=3, seed=4).train()
    assert not torch.equal(module(q, k, v), module(q, k, v))
    assert torch.equal(module(q, k, v, seed=1), module(q, k, v, seed=1))


DRAWS = 20_000


def pair_probabilities(probability: Tensor) -> dict[tuple[int, int], float]:
    """Of every unordered pair, when two are drawn one after the other without replacement in proportion to p."""
    p = (probability / probability.sum()).tolist()
    return {
        (i, j): p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]) for i, j in itertools.combinations(range(len(p)), 2)
    }


def assert_pairs(index: Tensor, expected: dict[tuple[int, int], float]) -> None:
    """The pairs (draws, 2) occur as often as expected, within 4 standard errors."""
    index = index.sort(-1).values
    for (i, j), probability in expected.items():
        frequency = ((index[:, 0] == i) & (index[:, 1] == j)).double().mean().item()
        assert abs(frequency - probability) <= 4 * math.sqrt(probability * (1 - probability) / len(index))


@pytest.mark.parametrize("columns", ["importance", "uniform"])
def test_columns_of_skeinformer_have_the_probabilities_of_equation_5(columns: str) -> None:
    """All rows are pilots, so that Eq. (5) is the same in every draw; one of six keys is padding."""
    q, k, v = tensors(1, 1, 6, p=3, peak=2, seed=2)
    mask = torch.tensor([[True, True, False, True, True, True]])
    real = mask[0].nonzero()[:, 0]
    inputs = (copies(x, DRAWS).float() for x in (q, k, v))
    options = {"budget": 2, "num_pilots": 6, "columns": columns, "return_info": True, "num_checks": 1}
    _, info = skein_attention(*inputs, key_mask=copies(mask, DRAWS), generator=generator(6), **options)
    probability = reference.estimated_probability(
        q[0, 0], k[0, 0], v[0, 0], list(range(6)), 1 / math.sqrt(3), mask[0].tolist()
    )
    weights = torch.stack(probability)[real] if columns == "importance" else torch.ones(5)
    place = torch.full((6,), -1).scatter(0, real, torch.arange(5))
    assert_pairs(place[info.columns[:, 0]], pair_probabilities(weights))


def test_columns_without_row_normalization_are_drawn_with_replacement() -> None:
    q, k, v = tensors(1, 1, 5, p=3, peak=2, seed=2)
    options = {"budget": 2, "num_pilots": 5, "row_norm": "none", "return_info": True, "num_checks": 1}
    _, info = skein_attention(*(copies(x, DRAWS) for x in (q, k, v)), generator=generator(6), **options)
    p = torch.stack(reference.estimated_probability(q[0, 0], k[0, 0], v[0, 0], list(range(5)), 3**-0.5, [True] * 5))
    expected = {(i, i): float(p[i] ** 2) for i in range(5)}
    expected |= {(i, j): float(2 * p[i] * p[j]) for i, j in itertools.combinations(range(5), 2)}
    assert_pairs(info.columns[:, 0], expected)


@pytest.mark.parametrize("masked", [False, True])
def test_pilots_are_uniform_and_different_for_every_head_and_example(masked: bool) -> None:
    q, k, v = (copies(x, DRAWS).float() for x in tensors(1, 2, 6, p=2))
    mask = copies(torch.tensor([[True, False, True, True, True, True]]), DRAWS) if masked else None
    _, info = skein_attention(
        q, k, v, query_mask=mask, budget=2, num_pilots=2, generator=generator(8), return_info=True, num_checks=1
    )
    real = [0, 2, 3, 4, 5] if masked else list(range(6))
    pairs = list(itertools.combinations(real, 2))
    share = 1 / len(pairs)
    pilots = info.pilots.sort(-1).values  # (draws, heads, 2)
    for head in range(2):
        assert_pairs(pilots[:, head], dict.fromkeys(pairs, share))
    bound = 4 * math.sqrt(share * (1 - share) / DRAWS)
    same_in_both_heads = (pilots[:, 0] == pilots[:, 1]).all(-1).double().mean()
    same_in_the_next_example = (pilots[1:, 0] == pilots[:-1, 0]).all(-1).double().mean()
    assert abs(same_in_both_heads - share) <= bound
    assert abs(same_in_the_next_example - share) <= bound


def test_pilots_and_columns_are_independent() -> None:
    """Uniform columns know nothing of the pilots."""
    q, k, v = (copies(x, DRAWS).float() for x in tensors(1, 1, 4, p=2))
    _, info = skein_attention(
        q, k, v, budget=1, columns="uniform", generator=generator(9), return_info=True, num_checks=1
    )
    same = (info.pilots == info.columns).double().mean().item()
    assert abs(same - 1 / 4) <= 4 * math.sqrt(3 / 16 / DRAWS)
