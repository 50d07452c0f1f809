"""The rivals keep the contract, and do what their papers say."""

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("scipy", reason="needs the extra `benchmarks`")

from benchmarks.rivals import METHODS as RIVALS
from benchmarks.rivals import Thinformer, fill_slots, gray_code, halve, num_rounds, thin
from benchmarks.wildcat import WildCat, WildCatNoise, largest_norm, random_pivots, squared_temperature
from skeinformer.attention import METHODS, Attention, build
from skeinformer.cli.flops import count_multiply_adds
from skeinformer.cli.pretrained import pretrained_qkv
from skeinformer.cli.specs import MethodSpec, parse
from tests.helpers import (
    DTYPES,
    HEAD_DIM,
    copies,
    dense_exact,
    draw,
    exact,
    generator,
    gradients,
    lengths_mask,
    map_noise,
    random_mask,
    relative_error,
    tensors,
)

COUNTED = [(4, False), (8, False), (8, True)]  # budgets, with or without the backward pass
every_rival = pytest.mark.parametrize("name", [*RIVALS, "wildcat:num_bins=3"])


@pytest.fixture(autouse=True)
def _rivals_are_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rivals are rows of METHODS during a test."""
    for name, entry in RIVALS.items():
        monkeypatch.setitem(METHODS, name, entry)


def rival(name: str, budget: int = 5, **options: object) -> Attention:
    spec = parse(name)
    return build(spec.method, head_dim=HEAD_DIM, budget=budget, **{**dict(spec.options), **options})


@every_rival
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, HEAD_DIM), (7, 1, 6), (20, 17, 4)])
@pytest.mark.parametrize("budget", [1, 6])
def test_shape_dtype_and_finite_gradients(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int], budget: int
) -> None:
    n, n_k, p_v = shape
    q, k, v = tensors(2, 3, n, n_k, p_v=p_v, dtype=dtype)
    output = rival(name, budget)(q, k, v, key_mask=random_mask(2, n_k), query_mask=random_mask(2, n))
    assert output.shape == (2, 3, n, p_v)
    assert output.dtype == dtype
    assert all(x.isfinite().all() for x in (output, *gradients(output, (q, k, v))))


@every_rival
def test_logits_of_1e4_are_finite(name: str) -> None:
    q, k, v = tensors(2, 2, 20, dtype=torch.float32, peak=1e4)
    output = rival(name)(q, k, v)
    assert all(x.isfinite().all() for x in (output, *gradients(output, (q, k, v))))


@pytest.mark.parametrize(("name", "factor"), [("wildcat", 1), ("thinformer", 1), ("hyperattention", 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_exact_at_full_budget(name: str, factor: int, masked: bool) -> None:
    q, k, v = tensors(2, 2, 9, 12)
    key_mask, query_mask = (random_mask(2, 12), random_mask(2, 9)) if masked else (None, None)
    output = rival(name, 12 * factor)(q, k, v, key_mask=key_mask, query_mask=query_mask)
    expected = exact(q, k, v, key_mask, query_mask)
    torch.testing.assert_close(output, expected)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["wildcat", "thinformer"])
def test_an_example_of_few_real_keys_is_exact_in_any_batch(name: str) -> None:
    q, k, v = tensors(3, 2, 9, 21)
    key_mask = lengths_mask([21, 5, 3], 21).flip(1)
    output = rival(name, 5)(q, k, v, key_mask=key_mask)
    expected = exact(q, k, v, key_mask)
    torch.testing.assert_close(output[1:], expected[1:])
    for ours, theirs in zip(gradients(output[1:], (q, k, v)), gradients(expected[1:], (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert relative_error(output[:1], expected[:1]).min() > 1e-3


@every_rival
def test_contents_of_padding_change_nothing(name: str) -> None:
    q, k, v = tensors(3, 2, 14, 17)
    key_mask, query_mask = random_mask(3, 17, seed=1), random_mask(3, 14, seed=2)
    module = rival(name)
    noise = draw(module, q, k)
    expected = module(q, k, v, key_mask=key_mask, query_mask=query_mask, noise=noise)
    dirty = (
        x.detach().masked_fill(~mask[:, None, :, None], math.nan)
        for x, mask in ((q, query_mask), (k, key_mask), (v, key_mask))
    )
    assert torch.equal(module(*dirty, key_mask=key_mask, query_mask=query_mask, noise=noise), expected)
    assert (expected.masked_select(~query_mask[:, None, :, None]) == 0).all()


@every_rival
def test_an_example_alone_is_the_example_in_its_batch(name: str) -> None:
    q, k, v = tensors(3, 2, 14, 17)
    mask = lengths_mask([17, 2, 9], 17)
    module = rival(name)
    noise = draw(module, q, k)
    together = module(q, k, v, key_mask=mask, noise=noise)
    for i in range(3):
        at = slice(i, i + 1)
        alone = module(q[at], k[at], v[at], key_mask=mask[at], noise=map_noise(noise, lambda u, at=at: u[at]))
        torch.testing.assert_close(alone, together[at])


@every_rival
def test_a_fully_padded_example_is_zero_and_a_single_key_is_returned(name: str) -> None:
    q, k, v = tensors(2, 2, 14)
    mask = torch.zeros(2, 14, dtype=torch.bool)
    mask[1, 4] = True
    # HyperAttention sees the key in its block, or in the sample: with as many samples as this, in either
    output = rival(name, 20 if name == "hyperattention" else 5)(q, k, v, key_mask=mask)
    assert (output[0] == 0).all()
    torch.testing.assert_close(output[1], v[1, :, 4:5].expand_as(output[1]))


@every_rival
def test_a_seed_decides_the_draws(name: str) -> None:
    q, k, v = tensors(2, 2, 30)
    first, again, other = (rival(name, seed=seed).eval()(q, k, v) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("name", RIVALS)
def test_flops_are_counted(name: str) -> None:
    specs = [(MethodSpec(name, (), d), backward) for d, backward in COUNTED]
    counts = [sum(count_multiply_adds(spec, 64, backward=backward).values()) for spec, backward in specs]
    assert counts[0] < counts[1] < counts[2]
    assert counts[2] < 3 * sum(count_multiply_adds(MethodSpec("softmax"), 64, backward=True).values())


@pytest.mark.parametrize("layer", [0, 3])
def test_error_falls_with_the_budget_on_pretrained_inputs(layer: int) -> None:
    q, k, v = pretrained_qkv(512, layer=layer)
    truth = dense_exact(q, k, v)

    def error(name: str, budget: int, **options: object) -> float:
        module = build(name, head_dim=32, budget=budget, **options)
        return float(relative_error(module(q, k, v, generator=generator()), truth).mean())

    errors = {name: [error(name, budget) for budget in (16, 64, 192)] for name in RIVALS}
    for large, middle, small in errors.values():
        assert large > middle > small
    uniform = error("skeinformer", 64, columns="uniform", row_norm="simple", reuse_pilots=False)
    assert errors["wildcat"][1] < 0.7 * uniform
    assert errors["thinformer"][1] < 1.05 * uniform
    assert errors["hyperattention"][1] < 1.6 * uniform


# WildCat


def test_temperature_solves_its_equation() -> None:
    q, k, _ = tensors(1, 3, 8)
    m, scale = torch.tensor([[[8.0]] * 3]), 0.5
    squared = squared_temperature(largest_norm(q), k, m, scale)
    radius_q, radius_k = (x.norm(dim=-1).amax(-1, keepdim=True) for x in (q, k))
    b = 2 + math.log(8) / (scale * radius_q * radius_k)
    w = b / (2 * squared * radius_q / radius_k)
    lambert = 0.217715  # W(2 / e^2)
    assert lambert * math.exp(lambert) == pytest.approx(2 / math.e**2, rel=1e-5)
    twice_rho = 2 * math.sqrt(1 + math.exp(2 + lambert))
    torch.testing.assert_close(w * w.exp(), b / twice_rho, rtol=1e-5, atol=0)


@pytest.mark.parametrize("at_once", [1, 4, 8])
def test_wildcat_is_the_nystrom_formula_for_its_pivots(at_once: int) -> None:
    q, k, v = tensors(1, 2, 12, 20)
    module = rival("wildcat", budget=8, pivots_at_once=at_once)
    noise = draw(module, q, k)
    output = module(q, k, v, noise=noise)
    centred = k - k.mean(-2, keepdim=True)
    scale = HEAD_DIM**-0.5
    squared = squared_temperature(largest_norm(q), centred, torch.tensor([[[20.0]]]), scale)
    pivots = random_pivots(
        centred * (scale / squared)[..., None].sqrt(), torch.ones(1, 2, 20).bool(), noise, 8, at_once
    )
    for head in range(2):
        K, S = centred[0, head], pivots.chosen[0, head]
        assert len(set(S.tolist())) == 8
        H = (scale / squared[0, head] * (K @ K.mT)).exp()
        W = torch.linalg.solve(H[S][:, S], H[S])
        A = (scale * (q[0, head] @ K[S].mT)).exp()
        expected = (A @ W @ v[0, head]) / (A @ W.sum(-1, keepdim=True))
        expected = expected.clamp(v[0, head].amin(0), v[0, head].amax(0))
        torch.testing.assert_close(output[0, head], expected, rtol=1e-3, atol=1e-3)


def test_bins_are_compressed_alone_and_attended_together() -> None:
    q, k, v = tensors(1, 1, 12, 21)
    module = rival("wildcat", budget=13, num_bins=3)  # 4 keys of each 7
    assert module.method == WildCat(budget=13, num_bins=3)
    noise = draw(module, q, k)
    output = module(q, k, v, noise=noise)
    centred, scale = (k - k.mean(-2, keepdim=True))[0, 0], HEAD_DIM**-0.5
    A, AV = 0.0, 0.0
    for i in range(3):
        at = slice(7 * i, 7 * i + 7)
        K, V = centred[at], v[0, 0, at]
        squared = squared_temperature(largest_norm(q), K[None, None], torch.tensor([[[7.0]]]), scale)
        drawn = WildCatNoise(noise[0][:, :, at], noise[1][:, :, 4 * i : 4 * i + 4])
        x = K * (scale / squared[0, 0]).sqrt()
        S = random_pivots(x[None, None], torch.ones(1, 1, 7).bool(), drawn, 4, 32).chosen[0, 0]
        H = (x @ x.mT).exp()
        W = torch.linalg.solve(H[S][:, S], H[S])
        weights = (scale * (q[0, 0] @ K[S].mT)).exp() @ W
        A, AV = A + weights.sum(-1, keepdim=True), AV + weights @ V
    expected = (AV / A).clamp(v[0, 0].amin(0), v[0, 0].amax(0))
    torch.testing.assert_close(output[0, 0], expected, rtol=1e-3, atol=1e-3)


def test_pivots_have_the_probabilities_of_randomly_pivoted_cholesky() -> None:
    draws, n = 4000, 5
    x = copies(tensors(1, 1, n)[1], draws)
    H = (x[0, 0] @ x[0, 0].mT).exp()
    noise = WildCatNoise(torch.rand(draws, 1, n, 2), torch.rand(draws, 1, 2, 1))
    chosen = random_pivots(x, torch.ones(draws, 1, n).bool(), noise, 2, 1).chosen[:, 0]  # (draws, 2)
    for i in range(n):
        first = H[i, i] / H.trace()
        residual = (H - H[:, [i]] @ H[[i]] / H[i, i]).diagonal()
        for j in range(n):
            expected = float(first * residual[j] / residual.sum()) if j != i else 0.0
            found = float(((chosen[:, 0] == i) & (chosen[:, 1] == j)).double().mean())
            assert abs(found - expected) <= 4 * math.sqrt(expected * (1 - expected) / draws) + 1e-9


def test_pivots_leave_less_of_the_kernel_than_uniform_keys() -> None:
    x = 0.7 * tensors(1, 4, 200)[1].detach()
    module = rival("wildcat", budget=20, pivots_at_once=8)
    pivots = random_pivots(x, torch.ones(1, 4, 200).bool(), draw(module, x, x), 20, 8)
    kernel = (x @ x.mT).exp()

    def left(chosen: Tensor) -> float:
        rest = [float((H - H[:, S] @ torch.linalg.solve(H[S][:, S], H[S])).trace() / H.trace())
                for H, S in zip(kernel[0], chosen[0], strict=True)]  # fmt: skip
        return sum(rest) / len(rest)

    uniform = torch.stack([torch.randperm(200)[:20] for _ in range(4)])[None]
    assert left(pivots.chosen) < 0.5 * left(uniform)


def test_copies_of_a_key_are_one_pivot() -> None:
    """Where fewer keys differ than there are places, the others stay empty, and nothing breaks."""
    q, k, v = tensors(1, 2, 10, 30, dtype=torch.float32)
    k = k[:, :, :3].repeat(1, 1, 10, 1)
    output = rival("wildcat", budget=8)(q, k, v)
    assert relative_error(output, dense_exact(q, k, v)).max() < 0.01


# Thinformer


@pytest.mark.parametrize("m", [0, 1, 3, 7, 16, 23, 32])
def test_slots_are_even_and_in_order(m: int) -> None:
    real = torch.zeros(1, 1, 40, dtype=torch.bool)
    real[..., torch.randperm(40)[:m]] = True
    slots = fill_slots(torch.zeros(1, 1, 40, dtype=torch.long), real, 32 if m <= 32 else 40)
    assert slots.token[slots.live].tolist() == real[0, 0].nonzero()[:, 0].tolist()
    groups = slots.live.view(8, 4).sum(-1)
    assert groups.max() - groups.min() <= 1
    assert slots.of_rank(torch.arange(m))[0, 0].tolist() == slots.live[0, 0].nonzero()[:, 0].tolist()


@pytest.mark.parametrize(("n", "m", "d"), [(64, 64, 8), (50, 50, 8), (50, 31, 5), (7, 7, 5), (33, 20, 1)])
def test_thinned_keys_are_distinct_real_and_stand_for_all(n: int, m: int, d: int) -> None:
    _, k, v = tensors(2, 2, n)
    real = torch.zeros(2, 2, n, dtype=torch.bool)
    real[..., torch.randperm(n)[:m]] = True
    rounds = num_rounds(n, d)
    index, weight = thin(k, v, real, torch.rand(2, 2, d, 2**rounds), d, rounds, 0.5)
    assert (weight.sum(-1) == m).all()
    assert weight.max() - weight.min() <= 1 or m < d
    for i, w, r in zip(index.flatten(0, 1), weight.flatten(0, 1), real.flatten(0, 1), strict=True):
        live = i[w > 0].tolist()
        assert len(live) == len(set(live)) == min(m, d)
        assert r[live].all()


@pytest.mark.parametrize("m", [24, 21])
def test_thinning_is_unbiased(m: int) -> None:
    """The weighted sum of anything over the thinned keys is, on average, its sum over all of them."""
    draws, n, d = 3000, 24, 6
    _, k, v = (copies(x, draws) for x in tensors(1, 1, n))
    real = (torch.arange(n) < m).expand(draws, 1, n)
    index, weight = thin(k, v, real, torch.rand(draws, 1, d, 4), d, 2, 0.5)
    chosen = torch.zeros(draws, 1, n, dtype=weight.dtype).scatter_add(-1, index, weight)[:, 0]  # (draws, n)
    expected = real[0, 0].to(chosen.dtype)
    assert ((chosen.mean(0) - expected).abs() <= 4 * chosen.std(0) / math.sqrt(draws) + 1e-9).all()


def test_halving_balances_better_than_coins() -> None:
    """The kernel's distance between a bucket and what stays of it."""
    x = torch.randn(50, 64, 2, dtype=torch.float64)
    kernel = (-torch.cdist(x, x).square() / 2).exp()

    def distance(second: Tensor) -> float:
        sign = torch.stack([1 - 2.0 * second, 2.0 * second - 1], -1).flatten(-2).double()  # stays - goes
        return float(torch.einsum("bi,bij,bj->b", sign, kernel, sign).mean())

    weight, coin = torch.ones(50, 64, dtype=torch.float64), torch.rand(50, 32, dtype=torch.float64)
    published, eager = (distance(halve(kernel, weight, coin, log_odds)) for log_odds in (8.0, 0.5))
    assert eager < 0.5 * published
    assert published < 0.8 * distance(coin > 0.5)


def test_log_odds_must_be_positive() -> None:
    with pytest.raises(ValueError, match="log_odds must be a positive number"):
        Thinformer(log_odds=0)


# HyperAttention


def test_gray_code_orders_signs_so_that_neighbours_differ_in_one() -> None:
    signs = torch.tensor([[int(bit) for bit in f"{i:04b}"] for i in range(16)]) * 2.0 - 1
    identity = torch.full((1, 1, 4, 4), 0.5) + 0.3 * torch.eye(4)  # the normal numbers are 0 but on the diagonal
    code = gray_code(signs[None, None], identity)[0, 0]
    assert sorted(code.tolist()) == list(range(16))
    ordered = signs[code.argsort()]
    assert ((ordered[1:] != ordered[:-1]).sum(-1) == 1).all()


@pytest.mark.parametrize("masked", [False, True])
def test_numerator_and_denominator_of_hyperattention_are_unbiased(masked: bool) -> None:
    """Values that are unit vectors give the weights; those of the own block, which are exact, give the row sum."""
    draws, n = 4000, 10
    q, k, _ = (copies(x, draws) for x in tensors(1, 1, n))
    mask = random_mask(1, n, seed=3).expand(draws, n) if masked else None
    module = rival("hyperattention", budget=6)
    noise = draw(module, q, k)
    noise = (noise[0][:1].expand_as(noise[0]), noise[1])  # the same blocks, other samples
    one_hot = torch.eye(n, dtype=q.dtype).expand(draws, 1, n, n)
    weights = module(q, k, one_hot, key_mask=mask, noise=noise)[:, 0]  # (draws, n, n): rows of B~
    A = (q[0, 0] @ k[0, 0].mT / math.sqrt(HEAD_DIM)).exp()
    if mask is not None:
        A = A * mask[0]
    seen = (weights > 0).all(0) & (A > 0)  # keys of the own block
    assert (seen.sum(-1) > 0).all()
    own = (seen * A).sum(-1, keepdim=True)  # their sum in the numerator is known, so that the row sum is too
    row_sum = own / (weights * seen).sum(-1, keepdim=True)  # (draws, n, 1)
    estimate = weights * row_sum
    error = 4 * estimate.std(0) / math.sqrt(draws) + 1e-9
    assert ((estimate.mean(0) - A).abs() <= error).all()
