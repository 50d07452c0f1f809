"""choose_budget: the smallest power of two that meets the tolerance by its own estimate."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import SkeinInfo, choose_budget, skein_attention
from tests.helpers import dense_exact, generator, lengths_mask, relative_error, tensors


def heavy_keys(b: int = 2, h: int = 2, n: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Every query attends to some of twelve keys: a few samples leave out most of the mass, 32 hold nearly all."""
    q, k, v = (x.detach() for x in tensors(b, h, n, p=8, peak=0.25))
    k[:, :, torch.randperm(n, generator=generator(5))[:12]] += 1.5
    return (q + 2).float(), k.float(), v.float()


class Recorder:
    """skein_attention that keeps what it was asked and what it estimated."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.infos: list[SkeinInfo] = []

    def __call__(self, *inputs: Tensor, budget: int, **options: Any) -> tuple[Tensor, SkeinInfo]:
        output, info = skein_attention(*inputs, budget=budget, **options)
        self.asked.append(budget)
        self.infos.append(info)
        return output, info


def upper(info: SkeinInfo, statistic: str) -> float:
    """The estimate plus two standard errors of the worst head; or of the mean over heads, which are independent."""
    if statistic == "worst":
        return max((info.error + 2 * info.error_se).flatten().tolist())
    count, variance = info.error.numel(), float(info.error_se.square().sum())
    return float(info.error.sum()) / count + 2 * math.sqrt(variance) / count


@pytest.mark.parametrize("statistic", ["worst", "mean"])
@pytest.mark.parametrize("tolerance", [0.04, 0.3, 0.8, 3.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_smallest_power_of_two_that_meets_the_tolerance(statistic: str, tolerance: float, seed: int) -> None:
    q, k, v = heavy_keys()
    recorder = Recorder()
    d = choose_budget(
        q,
        k,
        v,
        tolerance=tolerance,
        statistic=statistic,
        attention=recorder,
        generator=generator(seed),
        num_pilots=16,
    )
    assert math.log2(d).is_integer()
    assert d < 200
    assert recorder.asked == [2**i for i in range(int(math.log2(d)) + 1)]
    reached = [upper(info, statistic) for info in recorder.infos]
    assert reached[-1] <= tolerance * (1 + 1e-6)
    assert all(x > tolerance * (1 - 1e-6) for x in reached[:-1])
    again = choose_budget(
        q,
        k,
        v,
        tolerance=tolerance,
        statistic=statistic,
        generator=generator(seed),
        num_pilots=16,
    )
    assert again == d


@pytest.mark.parametrize("statistic", ["worst", "mean"])
@pytest.mark.parametrize("margin", [-1e-4, 1e-4])
def test_tolerance_just_above_or_below_an_estimate(statistic: str, margin: float) -> None:
    """The bound is the estimate plus two standard errors: just below it the next size is taken, just above it this."""
    q, k, v = heavy_keys()
    recorder = Recorder()
    options = {"statistic": statistic, "num_pilots": 16}
    with pytest.warns(UserWarning, match="no power of two below n = 200"):
        choose_budget(q, k, v, tolerance=1e-9, attention=recorder, generator=generator(2), **options)
    reached = dict(zip(recorder.asked, (upper(info, statistic) for info in recorder.infos), strict=True))
    for size in (16, 32, 64):
        tolerance = reached[size] * (1 + margin)
        expected = min(d for d, value in reached.items() if value <= tolerance)
        assert choose_budget(q, k, v, tolerance=tolerance, generator=generator(2), **options) == expected
        assert expected == (size if margin > 0 else 2 * size)


def test_answer_meets_the_tolerance_in_truth() -> None:
    """The bound is two standard errors above the estimate: fresh draws at the answer are below it on average."""
    q, k, v = heavy_keys(1, 4)
    d = choose_budget(q, k, v, tolerance=0.3, generator=generator(1), num_pilots=16)
    expected = dense_exact(q, k, v)
    errors = []
    for seed in range(2, 12):
        output = skein_attention(q, k, v, budget=d, num_pilots=16, generator=generator(seed))
        errors.append(relative_error(output, expected))
    assert torch.stack(errors).mean(0).max() < 0.3


def test_impossible_tolerance_warns_and_returns_exact_attention() -> None:
    q, k, v = tensors(1, 2, 50, peak=1)
    with pytest.warns(UserWarning, match="no power of two below n = 50 meets the tolerance 1e-06") as record:
        d = choose_budget(q, k, v, tolerance=1e-6, generator=generator(), num_pilots=4)
    assert d == 50
    assert len(record) == 1
    assert "32" in str(record[0].message)
    output = skein_attention(q, k, v, budget=d, generator=generator())
    torch.testing.assert_close(output, dense_exact(q, k, v), rtol=1e-10, atol=1e-10)


def test_easy_tolerance_asks_once() -> None:
    q, k, v = tensors(1, 2, 50, peak=0)
    recorder = Recorder()
    assert choose_budget(q, k, v, tolerance=0.5, attention=recorder, generator=generator()) == 1
    assert recorder.asked == [1]


def test_one_key_needs_one_sample_and_no_warning() -> None:
    """d = 1 is a power of two and exact."""
    q, k, v = tensors(1, 2, 5, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_budget(q, k, v, tolerance=0.1, generator=generator()) == 1


def test_masks_and_options_reach_the_attention() -> None:
    """Twelve real keys of 200: sixteen samples are exact, and a fully padded example costs nothing."""
    q, k, v = tensors(2, 2, 200, peak=12)
    mask = lengths_mask([12, 0], 200)
    recorder = Recorder()
    d = choose_budget(
        q,
        k,
        v,
        tolerance=1e-6,
        key_mask=mask,
        query_mask=mask,
        num_pilots=2,
        attention=recorder,
        generator=generator(),
    )
    assert d == 16
    assert recorder.infos[-1].pilots.shape[-1] == 2


def test_no_gradient_is_recorded_and_inputs_are_left_alone() -> None:
    q, k, v = tensors(1, 2, 50)
    kept = [x.detach().clone() for x in (q, k, v)]
    before = torch.get_rng_state()
    recorder = Recorder()
    choose_budget(q, k, v, tolerance=0.5, attention=recorder, generator=generator())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), kept, strict=True))


@pytest.mark.parametrize("tolerance", [0.0, -1.0, math.nan])
def test_bad_tolerance(tolerance: float) -> None:
    with pytest.raises(ValueError, match="tolerance must be above 0, a relative error such as"):
        choose_budget(*tensors(1, 1, 9), tolerance=tolerance)


def test_bad_statistic() -> None:
    with pytest.raises(ValueError, match="statistic='wurst' is not known; did you mean 'worst'"):
        choose_budget(*tensors(1, 1, 9), tolerance=0.1, statistic="wurst")


@pytest.mark.parametrize("reserved", ["budget", "return_info", "noise"])
def test_reserved_options(reserved: str) -> None:
    with pytest.raises(TypeError, match=f"choose_budget sets '{reserved}' itself"):
        choose_budget(*tensors(1, 1, 9), tolerance=0.1, **{reserved: 4})


def test_a_group_is_refused() -> None:
    with pytest.raises(ValueError, match="choose_budget works in one process"):
        choose_budget(*tensors(1, 1, 9), tolerance=0.1, group=object())


def test_bad_inputs_are_named() -> None:
    q, k, v = tensors(1, 1, 9)
    with pytest.raises(ValueError, match="key has shape"):
        choose_budget(q, k[..., :3], v, tolerance=0.1)
    with pytest.raises(TypeError, match="key must be a tensor, got NoneType"):
        choose_budget(q, None, v, tolerance=0.1)
