"""The rivals keep the contract, and do what their papers say."""

import math

import pytest
import torch

pytest.importorskip("scipy", reason="needs the extra `benchmarks`")

from benchmarks.rivals import METHODS as RIVALS
from benchmarks.rivals import gray_code, thin
from benchmarks.wildcat import WildCatNoise, largest_norm, random_pivots, squared_temperature
from skeinformer.attention import METHODS, Attention, build
from skeinformer.cli.specs import parse
from tests.helpers import (
    DTYPES,
    HEAD_DIM,
    copies,
    draw,
    exact,
    gradients,
    random_mask,
    tensors,
)

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


# Thinformer


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
