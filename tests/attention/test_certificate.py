"""The certificate: it changes nothing, equals the truth when every row is checked, and is honest in between."""

import itertools
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import build, cluster_attention, skein_attention
from skeinformer.attention.certificate import BOUND, WIDER, ExactRows, bound_of_mean, estimate_error
from skeinformer.attention.check_rows import Checks, draw_checks, row_mass
from skeinformer.attention.inputs import CHECK_SEED, prepare
from skeinformer.distributed.world import ALONE
from skeinformer.noise import from_seed
from tests.helpers import (
    DTYPES,
    clear,
    copies,
    dense_exact,
    generator,
    lengths_mask,
    random_mask,
    relative_error,
    tensors,
)

SKETCHES: dict[str, Callable[..., Any]] = {
    f"{columns}-{row_norm}-{'reuse' if reuse else 'no_reuse'}": partial(
        skein_attention, columns=columns, row_norm=row_norm, reuse_pilots=reuse
    )
    for columns, row_norm, reuse in itertools.product(
        ("importance", "uniform"), ("adaptive", "simple", "none"), (True, False)
    )
} | {"cluster": cluster_attention}
every_sketch = pytest.mark.parametrize("sketch", SKETCHES.values(), ids=SKETCHES)


def truth(q: Tensor, k: Tensor, v: Tensor, output: Tensor, masks: dict[str, Tensor | None]) -> Tensor:
    expected = clear(dense_exact(q, k, v, masks.get("key_mask")), masks.get("query_mask"))
    return relative_error(output, expected.expand_as(output))


@every_sketch
@pytest.mark.parametrize(("dtype", "masked"), [(dtype, i % 2 == 0) for i, dtype in enumerate(DTYPES)])
def test_asking_for_info_does_not_change_the_output(sketch: Any, dtype: torch.dtype, masked: bool) -> None:
    q, k, v = tensors(2, 2, 30, dtype=dtype, peak=4)
    mask = random_mask(2, 30) if masked else None
    options: dict[str, Any] = {"key_mask": mask, "query_mask": mask, "budget": 6, "num_pilots": 5}
    expected = sketch(q, k, v, generator=generator(1), **options)
    for num_checks in (1, 32):
        output, info = sketch(q, k, v, generator=generator(1), return_info=True, num_checks=num_checks, **options)
        assert torch.equal(output, expected)
        assert not any(x.requires_grad for x in info)


@every_sketch
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("num_pilots", "num_checks"), [(1, 20), (6, 14), (18, 20), (50, 1)])
def test_a_check_of_every_row_leaves_no_doubt(sketch: Any, masked: bool, num_pilots: int, num_checks: int) -> None:
    """With as many checks as rows that are no pilots, the estimate is the error and its standard error 0."""
    q, k, v = tensors(2, 2, 20, peak=6)
    masks: dict[str, Any] = {}
    if masked:
        masks = {"key_mask": random_mask(2, 20, seed=4), "query_mask": random_mask(2, 20, seed=5)}
    options: dict[str, Any] = {"budget": 4, "num_pilots": num_pilots, "num_checks": num_checks, "return_info": True}
    output, info = sketch(q, k, v, generator=generator(2), **options, **masks)
    if num_checks < 20 and (info.pilots == -1).all():
        return  # without pilots there are other rows
    torch.testing.assert_close(info.error, truth(q, k, v, output, masks), rtol=1e-9, atol=1e-9)
    assert (info.error_se == 0).all()
    assert torch.equal(info.error_upper, info.error)


@pytest.mark.parametrize(("size", "factor"), [(60, 1), (3, 0)])
@pytest.mark.parametrize("sketch", [skein_attention, cluster_attention])
def test_exact_outputs_and_values_of_zero_have_no_error(sketch: Any, size: int, factor: int) -> None:
    q, k, v = tensors(2, 2, 60, peak=6)
    _, info = sketch(q, k, factor * v, budget=size, num_pilots=4, generator=generator(2), return_info=True)
    assert info.error.max() < 1e-12
    assert info.error_se.max() < 1e-12


@every_sketch
def test_a_fully_padded_example_has_no_error(sketch: Any) -> None:
    q, k, v = tensors(4, 2, 20, peak=6)
    key_mask, query_mask = torch.ones(4, 20, dtype=torch.bool), torch.ones(4, 20, dtype=torch.bool)
    key_mask[[0, 2]] = False
    query_mask[[1, 2]] = False
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    _, info = sketch(q, k, v, budget=3, generator=generator(), return_info=True, **masks)
    assert (info.error[:3] == 0).all()
    assert (info.error_se[:3] == 0).all()
    assert (info.error[3] > 0).all()
    assert (info.error_se[3] >= 0).all()


def test_one_check_row_says_nothing_about_its_own_error() -> None:
    q, k, v = tensors(1, 2, 40)
    for num_checks in (1, 32):
        _, info = skein_attention(q, k, v, budget=3, generator=generator(), return_info=True, num_checks=num_checks)
        assert info.error.isfinite().all()
        assert (info.error_upper > info.error).all()
        assert (info.error_se == math.inf).all() == (info.error_upper == math.inf).all() == (num_checks == 1)


@every_sketch
@pytest.mark.parametrize("masked", [False, True])
def test_unbiased_and_with_a_standard_error_of_the_right_size(sketch: Any, masked: bool) -> None:
    """Over draws: the mean of error^2 is that of the truth within 4 standard errors; error_se is the spread."""
    draws, n = 800, 96
    q, k, v = (copies(x, draws).float() for x in tensors(1, 1, n, p=8, peak=3, seed=1))
    masks: dict[str, Any] = {}
    if masked:
        mask = lengths_mask([n], n + 16)[:, torch.randperm(n + 16, generator=generator(7))].expand(draws, -1)
        real, masks = mask[0].nonzero()[:, 0], {"key_mask": mask, "query_mask": mask}
        q, k, v = (torch.zeros(draws, 1, n + 16, 8).index_copy(2, real, x) for x in (q, k, v))
    options: dict[str, Any] = {"budget": 16, "num_pilots": 32, "num_checks": 32, "return_info": True}
    output, info = sketch(q, k, v, generator=generator(4), **options, **masks)
    error, error_se = info.error[:, 0].double(), info.error_se[:, 0].double()
    true_error = truth(q[:1], k[:1], v[:1], output, {name: mask[:1] for name, mask in masks.items()})[:, 0]
    difference = error**2 - true_error**2
    assert difference.mean().abs() <= 4 * difference.std() / math.sqrt(draws)
    spread = (error - true_error).std()
    assert 0.6 <= error_se.square().mean().sqrt() / spread <= 1.6


def pretrained_ratio(n: int, layer: int, draws: int = 5) -> float:
    """The median over heads and draws of estimate / truth on a pretrained model's Q, K, V, d = 128."""
    pytest.importorskip("transformers", reason="the extra `cli` is not installed")
    pretrained = pytest.importorskip("skeinformer.cli.pretrained")
    try:
        pretrained.minilm_folder()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    q, k, v = pretrained.pretrained_qkv(n, layer=layer, text=os.environ.get("SKEINFORMER_TEXT"))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    ratios = []
    for seed in range(draws):
        output, info = skein_attention(q, k, v, budget=128, generator=generator(seed), return_info=True)
        ratios.append(info.error / relative_error(output, expected))
    return torch.cat(ratios).median().item()


@pytest.mark.parametrize("layer", [0, 1, 3, 5])
@pytest.mark.parametrize("n", [1024, pytest.param(4096, marks=pytest.mark.slow)])
def test_estimate_is_near_the_truth_on_a_pretrained_model(n: int, layer: int) -> None:
    """On the Python reference, or on the text file that SKEINFORMER_TEXT names (WikiText-2, for instance)."""
    assert 0.9 <= pretrained_ratio(n, layer) <= 1.1


@pytest.mark.parametrize("reuse_pilots", [True, False])
@pytest.mark.parametrize("num_checks", [2, 5, 11])
def test_error_and_standard_error_are_those_of_a_loop(reuse_pilots: bool, num_checks: int) -> None:
    """Rows by the inverse of their chance; leave out one check row after the other."""
    n, num_pilots = 24, 6
    q, k, v = (x.detach() for x in tensors(1, 1, n, peak=6))
    noise = tuple(torch.rand(1, 1, n, generator=generator(seed)) for seed in (1, 2))
    options = {"budget": 4, "num_pilots": num_pilots, "noise": noise, "reuse_pilots": reuse_pilots}
    output, info = skein_attention(q, k, v, num_checks=num_checks, return_info=True, **options)
    exact = dense_exact(q, k, v)
    pilots = info.pilots[0, 0].tolist()
    inputs, candidates = prepare(q, k, v), torch.ones(1, 1, n, dtype=torch.bool)
    candidates[..., pilots] = False
    mass = row_mass(inputs, output, candidates)
    checks = draw_checks(ALONE, from_seed((1, 1), CHECK_SEED)(n), mass, num_checks, n)
    rows, chance = checks.rows.index[0, 0].tolist(), checks.chance[0, 0].tolist()
    assert len(set(rows)) == num_checks
    assert not set(rows) & set(pilots)
    missed = (output - exact)[0, 0].square().sum(-1).tolist()
    norms = exact[0, 0].square().sum(-1).tolist()

    def estimate(some: list[int]) -> float:
        weights = [1 / chance[i] for i in some]
        total = sum(w * missed[rows[i]] for w, i in zip(weights, some, strict=True)) * num_checks / len(some)
        mean = sum(w * norms[rows[i]] for w, i in zip(weights, some, strict=True)) / sum(weights)
        of_pilots = sum(missed[j] for j in pilots), sum(norms[j] for j in pilots)
        return math.sqrt((of_pilots[0] + total) / (of_pilots[1] + (n - num_pilots) * mean))

    everything = list(range(num_checks))
    without = [estimate([j for j in everything if j != i]) for i in everything]
    doubt = [1 - x for x in chance]
    mean = sum(x * y for x, y in zip(doubt, without, strict=True)) / sum(doubt)
    variance = sum(x * (y - mean) ** 2 for x, y in zip(doubt, without, strict=True)) * (num_checks - 1) / num_checks
    error, error_se = estimate(everything), math.sqrt(variance) * (1 + WIDER / math.sqrt(num_checks))
    assert info.error.item() == pytest.approx(error, rel=1e-9)
    assert info.error_se.item() == pytest.approx(error_se, rel=1e-9)
    assert info.error_upper.item() == pytest.approx(error * math.exp(BOUND * error_se / error), rel=1e-9)


KINDS = {
    "heavy values": lambda q, k, v: (
        q,
        k,
        v / torch.rand(v.shape[:3], generator=generator(5)).clamp(min=1e-3)[..., None],
    ),
    "one huge value": lambda q, k, v: (q, k, v.index_fill(2, torch.tensor([17]), 1000.0)),
    "ten odd rows": lambda q, k, v: (q.index_copy(2, torch.arange(0, 500, 50), 8 * q[:, :, :500:50]), k, v),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attention", [skein_attention, cluster_attention])
def test_intervals_cover_where_the_error_is_uneven(attention: Any, kind: str) -> None:
    """As docs/certificate.md says, less three standard errors of 100 draws; benchmarks.coverage has many."""
    q, k, v = KINDS[kind](*(x.detach().float() for x in tensors(1, 4, 512, p=16)))
    expected = dense_exact(q, k, v)
    covered, bounded = [], []
    for seed in range(25):
        output, info = attention(q, k, v, budget=64, generator=generator(seed), return_info=True)
        error = relative_error(output, expected)
        covered.append((info.error - error).abs() <= 2 * info.error_se)
        bounded.append(error <= info.error_upper)
    assert torch.stack(covered).double().mean() > 0.81
    assert torch.stack(bounded).double().mean() > 0.85


def test_one_odd_row_of_many_is_found() -> None:
    """A uniform draw of 32 rows of 2048 would meet it once in 64 calls."""
    q, k, v = (x.detach().float() for x in tensors(1, 1, 2048, p=16))
    q[:, :, 1234] *= 1000
    q *= 0.01
    output, info = cluster_attention(q, k, v, generator=generator(), return_info=True)
    truth = relative_error(output, dense_exact(q, k, v))
    missed = (output.double() - dense_exact(q, k, v))[0, 0].square().sum(-1)
    assert missed[1234] > 0.5 * missed.sum()
    assert ((info.error - truth).abs() <= 2 * info.error_se).all()
    assert info.error_upper < 3 * truth


def test_check_rows_do_not_depend_on_noise_that_is_an_argument() -> None:
    """The first numbers of seed 0 as noise: check rows by the same numbers would be those that the pilots leave."""
    u = torch.stack([from_seed((1, 1), seed)(400).flatten() for seed in (0, CHECK_SEED)])
    assert abs(torch.corrcoef(u)[0, 1]) < 0.2


def some_checks() -> Checks:
    """Four of forty rows, all of the same chance."""
    return draw_checks(ALONE, torch.rand(1, 1, 40, generator=generator()), torch.full((1, 1, 40), 1 / 40), 4, 40)


@pytest.mark.parametrize(("first", "others", "error"), [(0, 0, math.inf), (1, 0, None), (math.nan, math.nan, math.inf)])
def test_an_error_beyond_all_numbers_is_infinite_and_never_nan(first: float, others: float, error: float) -> None:
    """Exact rows that are 0 where the output is not, all of them or all but one, and such that are no numbers."""
    checks, exact = some_checks(), torch.full((1, 1, 4, 4), float(others))
    exact[..., 0, :] = first
    rows = ExactRows(torch.ones(1, 1, 4, 4), exact, checks.rows.live)
    info = estimate_error(rows, checks, None, torch.ones(1, 1, dtype=torch.bool))
    assert info.error_se.item() == info.error_upper.item() == math.inf
    assert info.error.item() == error if error else info.error.isfinite().all()


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("method", ["cluster", "skeinformer", "performer"])
def test_an_output_that_is_not_finite_has_an_infinite_error(method: str, where: str, number: float) -> None:
    """Also where one row is not, which few of 400 checks would find; the other heads keep theirs."""
    inputs = {name: x.detach().float() for name, x in zip(("query", "key", "value"), tensors(1, 3, 400), strict=True)}
    inputs[where][0, 1, 7, 2] = number
    module = build(method, head_dim=4, budget=8, seed=1).eval()
    output, info = module.certify(*inputs.values(), num_checks=4)
    lost = ~output.isfinite().all(-1).all(-1)
    if method == "performer" and not lost.any():
        return  # its features of a number that is none may be finite: then nothing is to be seen in the output
    assert lost.tolist() == [[False, True, False]]
    for x in (info.error, info.error_se, info.error_upper):
        assert (x[lost] == math.inf).all()
        assert x[~lost].isfinite().all()
    assert bound_of_mean(info) == math.inf


def test_padding_that_is_not_finite_is_no_error() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 40))
    mask = lengths_mask([30], 40)
    for x in (q, k, v):
        x[:, :, 30:] = math.nan
    masks = {"key_mask": mask, "query_mask": mask}
    _, info = skein_attention(q, k, v, budget=4, generator=generator(), return_info=True, **masks)
    assert all(x.isfinite().all() for x in (info.error, info.error_se, info.error_upper))
