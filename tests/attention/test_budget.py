"""choose_budget: the smallest power of two whose bound meets the tolerance."""

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import choose_budget, cluster_attention, skein_attention
from skeinformer.attention import budget, pilots
from tests.helpers import dense_exact, generator, lengths_mask, relative_error, tensors


def heavy_keys(b: int = 2, h: int = 2, n: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Every query attends to some of twelve keys: a few samples leave out most of the mass, 32 hold nearly all."""
    q, k, v = (x.detach() for x in tensors(b, h, n, p=8, peak=0.25))
    k[:, :, torch.randperm(n, generator=generator(5))[:12]] += 1.5
    return (q + 2).float(), k.float(), v.float()


class Recorder:
    """skein_attention that keeps what it was asked and what it gave."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.options: list[dict[str, Any]] = []
        self.outputs: list[Tensor] = []

    def __call__(self, *inputs: Tensor, budget: int, **options: Any) -> Tensor:
        self.asked.append(budget)
        self.options.append(options)
        self.outputs.append(skein_attention(*inputs, budget=budget, **options))
        return self.outputs[-1]


@pytest.mark.parametrize("statistic", ["worst", "mean"])
@pytest.mark.parametrize("tolerance", [0.04, 0.3, 0.8, 3.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_smallest_power_of_two_that_meets_the_tolerance(statistic: str, tolerance: float, seed: int) -> None:
    """With all rows checked the bound is the truth: a draw of every smaller size is above, of the answer none."""
    q, k, v = heavy_keys()
    recorder, expected = Recorder(), dense_exact(q, k, v)
    options: dict[str, Any] = {"tolerance": tolerance, "statistic": statistic, "num_pilots": 16, "num_checks": 200}
    d = choose_budget(q, k, v, attention=recorder, generator=generator(seed), **options)
    assert math.log2(d).is_integer()
    assert d < 200
    errors = [relative_error(output, expected) for output in recorder.outputs]
    reached = [float(x.max() if statistic == "worst" else x.mean()) for x in errors]
    assert recorder.asked[-budget.NUM_DRAWS :] == [d] * budget.NUM_DRAWS
    assert max(reached[-budget.NUM_DRAWS :]) <= tolerance * (1 + 1e-5)
    for size in {1, *recorder.asked} - {d}:
        assert max(x for x, asked in zip(reached, recorder.asked, strict=True) if asked == size) > tolerance * (
            1 - 1e-5
        )
    assert list(dict.fromkeys(recorder.asked)) == [2**i for i in range(int(math.log2(d)) + 1)]
    assert choose_budget(q, k, v, generator=generator(seed), **options) == d


def test_the_bound_decides_and_not_the_estimate() -> None:
    """Half of the errors are above their estimate: a tolerance just above it is not met."""
    q, k, v = heavy_keys()
    truth = relative_error(
        skein_attention(q, k, v, budget=32, num_pilots=16, generator=generator()), dense_exact(q, k, v)
    )
    assert choose_budget(q, k, v, tolerance=float(truth.max()), generator=generator(1), num_pilots=16) > 32


@pytest.mark.parametrize("attention", [skein_attention, cluster_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pilots_and_checks_are_computed_once(
    monkeypatch: pytest.MonkeyPatch, attention: Any, dtype: torch.dtype
) -> None:
    """As many pilot rows as the largest size has, for each of the draws, and the check rows once."""
    q, k, v = (x.to(dtype) for x in heavy_keys(1, 2))
    formed, attended = [], []
    form, attend = pilots.kernels.form_rows, budget.attend

    def counted(queries: Tensor, *args: Any, **options: Any) -> Any:
        formed.append(queries.shape[-2])
        return form(queries, *args, **options)

    def counted_checks(queries: Tensor, *args: Any) -> Tensor:
        attended.append(queries.shape[-2])
        return attend(queries, *args)

    monkeypatch.setattr(pilots.kernels, "form_rows", counted)
    monkeypatch.setattr(budget, "attend", counted_checks)
    with pytest.warns(UserWarning, match="no power of two"):
        choose_budget(q, k, v, tolerance=1e-6, attention=attention, generator=generator(), num_checks=40)
    assert attended == [40]
    largest = 128 if attention is skein_attention else 16
    assert sum(formed) == largest
    outside = attention(q, k, v, budget=8, generator=generator(3))
    with budget.kept_pilots(budget.KeptPilots()):
        for size in (2, 4, 8):
            inside = attention(q, k, v, budget=size, generator=generator(3))
    torch.testing.assert_close(inside, outside)


def test_draws_are_so_many_that_a_wrong_answer_is_improbable() -> None:
    """Whatever p, the share of draws above: more than 5 % of 200 answers are wrong with a probability below 5 %."""
    wrong = max(p * (1 - p) ** budget.NUM_DRAWS for p in torch.linspace(0, 1, 1001).tolist())
    assert wrong < 0.03
    at_most_ten = sum(math.comb(200, i) * wrong**i * (1 - wrong) ** (200 - i) for i in range(11))
    assert 1 - at_most_ten < 0.05


def test_answer_meets_the_tolerance_in_truth() -> None:
    """Fresh draws at the answer: `python -m studies.coverage` counts how often they are above."""
    q, k, v = heavy_keys(1, 4)
    d = choose_budget(q, k, v, tolerance=0.3, generator=generator(1), num_pilots=16)
    expected = dense_exact(q, k, v)
    errors = []
    for seed in range(2, 12):
        output = skein_attention(q, k, v, budget=d, num_pilots=16, generator=generator(seed))
        errors.append(relative_error(output, expected))
    assert torch.stack(errors).max() < 0.3


def test_impossible_tolerance_warns_and_returns_exact_attention() -> None:
    q, k, v = tensors(1, 2, 50, peak=1)
    with pytest.warns(UserWarning, match="no power of two below n = 50 meets the tolerance 1e-06") as record:
        d = choose_budget(q, k, v, tolerance=1e-6, generator=generator(), num_pilots=4)
    assert d == 50
    assert len(record) == 1
    assert "32" in str(record[0].message)
    output = skein_attention(q, k, v, budget=d, generator=generator())
    torch.testing.assert_close(output, dense_exact(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("statistic", ["worst", "mean"])
@pytest.mark.parametrize("where", [0, 2])
def test_an_output_that_is_not_finite_meets_no_tolerance(where: int, statistic: Any) -> None:
    """A value that is NaN, or one query, whose row is hardly drawn."""
    inputs = [x.detach().float() for x in tensors(1, 1, 200)]
    inputs[where][0, 0, 3] = math.nan
    with pytest.warns(UserWarning, match=r"no power of two below n = 200 .* output is not finite"):
        assert choose_budget(*inputs, tolerance=0.9, statistic=statistic, num_checks=4, generator=generator()) == 200


def test_padding_that_an_attention_fills_with_nan_does_not_count() -> None:
    q, k, v = (x.detach().float() for x in tensors(1, 1, 60))
    mask = lengths_mask([40], 60)

    def attention(*inputs: Tensor, query_mask: Tensor, **options: Any) -> Tensor:
        output = skein_attention(*inputs, query_mask=query_mask, **options)
        return output.masked_fill(~query_mask[:, None, :, None], math.nan)

    masks = {"key_mask": mask, "query_mask": mask}
    found = [
        choose_budget(q, k, v, tolerance=0.5, generator=generator(), attention=x, **masks)
        for x in (attention, skein_attention)
    ]
    assert found[0] == found[1] < 60


def test_easy_tolerance_asks_at_one_size() -> None:
    q, k, v = tensors(1, 2, 50, peak=0)
    recorder = Recorder()
    assert choose_budget(q, k, v, tolerance=0.5, attention=recorder, generator=generator()) == 1
    assert recorder.asked == [1] * budget.NUM_DRAWS


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
    assert all(options["num_pilots"] == 2 for options in recorder.options)


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
