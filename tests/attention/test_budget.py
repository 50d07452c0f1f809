"""choose_budget: the smallest power of two whose bound meets the tolerance."""

import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import choose_budget, cluster_attention, skein_attention
from skeinformer.attention import budget
from tests.helpers import dense_exact, generator, lengths_mask, relative_error, tensors


def heavy_keys(b: int = 2, h: int = 2, n: int = 200) -> tuple[Tensor, Tensor, Tensor]:
    """Every query attends to some of twelve keys: a few samples leave out most of the mass, 32 hold nearly all."""
    q, k, v = (x.detach() for x in tensors(b, h, n, p=8, peak=0.25))
    k[:, :, torch.randperm(n, generator=generator(5))[:12]] += 1.5
    return (q + 2).float(), k.float(), v.float()


class Recorder:
    """skein_attention that records its budgets, options and outputs."""

    def __init__(self) -> None:
        self.budgets: list[int] = []
        self.options: list[dict[str, Any]] = []
        self.outputs: list[Tensor] = []

    def __call__(self, *inputs: Tensor, budget: int, **options: Any) -> Tensor:
        self.budgets.append(budget)
        self.options.append(options)
        self.outputs.append(skein_attention(*inputs, budget=budget, **options))
        return self.outputs[-1]


def test_the_default_is_the_cluster_sketch() -> None:
    assert inspect.signature(choose_budget).parameters["attention"].default is cluster_attention
    q, k, v = heavy_keys()
    results = [
        choose_budget(q, k, v, tolerance=0.3, generator=generator(), **options)
        for options in ({}, {"attention": cluster_attention})
    ]
    assert results[0] == results[1] < 200


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
    assert recorder.budgets[-budget.NUM_DRAWS :] == [d] * budget.NUM_DRAWS
    assert max(reached[-budget.NUM_DRAWS :]) <= tolerance * (1 + 1e-5)
    for size in {1, *recorder.budgets} - {d}:
        worst = max(x for x, tried in zip(reached, recorder.budgets, strict=True) if tried == size)
        assert worst > tolerance * (1 - 1e-5)
    assert list(dict.fromkeys(recorder.budgets)) == [2**i for i in range(int(math.log2(d)) + 1)]
    assert choose_budget(q, k, v, attention=skein_attention, generator=generator(seed), **options) == d


def test_the_bound_decides_and_not_the_estimate() -> None:
    """Half of the errors are above their estimate: a tolerance just above it is not met."""
    q, k, v = heavy_keys()
    options: dict[str, Any] = {"num_pilots": 16}
    output = skein_attention(q, k, v, budget=32, generator=generator(), **options)
    tolerance = float(relative_error(output, dense_exact(q, k, v)).max())
    options |= {"attention": skein_attention, "generator": generator(1)}
    assert choose_budget(q, k, v, tolerance=tolerance, **options) > 32


@pytest.mark.parametrize("attention", [skein_attention, cluster_attention])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_rows_are_computed_once(monkeypatch: pytest.MonkeyPatch, attention: Any, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in heavy_keys(1, 2))
    sizes = []

    def counted(inputs: Any, queries: Tensor) -> Tensor:
        sizes.append(queries.shape[-2])
        return exact_rows(inputs, queries)

    exact_rows = budget.exact_rows
    monkeypatch.setattr(budget, "exact_rows", counted)
    with pytest.warns(UserWarning, match="no power of two"):
        choose_budget(q, k, v, tolerance=1e-6, attention=attention, generator=generator(), num_checks=40)
    assert sizes == [40]


def test_draws_are_so_many_that_a_wrong_answer_is_improbable() -> None:
    """Whatever p, the share of draws above: more than 5 % of 200 answers are wrong with a probability below 5 %."""
    wrong = max(p * (1 - p) ** budget.NUM_DRAWS for p in torch.linspace(0, 1, 1001).tolist())
    assert wrong < 0.03
    at_most_ten = sum(math.comb(200, i) * wrong**i * (1 - wrong) ** (200 - i) for i in range(11))
    assert 1 - at_most_ten < 0.05


def test_impossible_tolerance_warns_and_returns_exact_attention() -> None:
    q, k, v = tensors(1, 2, 50, peak=1)
    with pytest.warns(UserWarning, match="no power of two below n = 50 meets the tolerance 1e-06") as record:
        d = choose_budget(q, k, v, tolerance=1e-6, generator=generator(), num_pilots=4)
    assert d == 50
    assert len(record) == 1
    assert "32" in str(record[0].message)
    output = cluster_attention(q, k, v, budget=d, generator=generator())
    torch.testing.assert_close(output, dense_exact(q, k, v), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("attention", [skein_attention, cluster_attention])
@pytest.mark.parametrize("statistic", ["worst", "mean"])
@pytest.mark.parametrize("where", [0, 2])
def test_an_output_that_is_not_finite_meets_no_tolerance(where: int, statistic: Any, attention: Any) -> None:
    """A value that is NaN, or one query, whose row is hardly drawn."""
    inputs = [x.detach().float() for x in tensors(1, 1, 200)]
    inputs[where][0, 0, 3] = math.nan
    options: dict[str, Any] = {"statistic": statistic, "num_checks": 4, "generator": generator()}
    with pytest.warns(UserWarning, match=r"no power of two below n = 200 .* output is not finite"):
        assert choose_budget(*inputs, tolerance=0.9, attention=attention, **options) == 200


def test_padding_that_an_attention_fills_with_nan_does_not_count() -> None:
    q, k, v = (x.detach().float() for x in tensors(1, 1, 60))
    mask = lengths_mask([40], 60)

    def attention(*inputs: Tensor, query_mask: Tensor, **options: Any) -> Tensor:
        output: Tensor = skein_attention(*inputs, query_mask=query_mask, **options)
        return output.masked_fill(~query_mask[:, None, :, None], math.nan)

    results = [
        choose_budget(q, k, v, tolerance=0.5, generator=generator(), attention=function, key_mask=mask, query_mask=mask)
        for function in (attention, skein_attention)
    ]
    assert results[0] == results[1] < 60


def test_easy_tolerances_take_one_size_and_no_warning() -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"attention": recorder, "generator": generator()}
    assert choose_budget(*tensors(1, 2, 50, peak=0), tolerance=0.5, **options) == 1
    assert recorder.budgets == [1] * budget.NUM_DRAWS
    with warnings.catch_warnings():  # d = 1 is a power of two, and exact
        warnings.simplefilter("error")
        assert choose_budget(*tensors(1, 2, 5, 1), tolerance=0.1, generator=generator()) == 1


def test_masks_and_options_reach_the_attention() -> None:
    """Twelve real keys of 200: sixteen samples are exact, and a fully padded example costs nothing."""
    q, k, v = tensors(2, 2, 200, peak=12)
    mask, recorder = lengths_mask([12, 0], 200), Recorder()
    options: dict[str, Any] = {"key_mask": mask, "query_mask": mask, "num_pilots": 2, "attention": recorder}
    assert choose_budget(q, k, v, tolerance=1e-6, generator=generator(), **options) == 16
    assert all(options["num_pilots"] == 2 for options in recorder.options)


def test_inputs_and_the_global_state_stay_as_they_are() -> None:
    inputs = tensors(1, 2, 50)
    before, state = [x.detach().clone() for x in inputs], torch.get_rng_state()
    recorder = Recorder()
    choose_budget(*inputs, tolerance=0.5, attention=recorder, generator=generator())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
    assert not any(output.requires_grad for output in recorder.outputs)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"tolerance": 0.0}, ValueError, "tolerance must be above 0, a relative error such as"),
        ({"tolerance": math.nan}, ValueError, "tolerance must be above 0, a relative error such as"),
        ({"statistic": "wurst"}, ValueError, "statistic='wurst' is not known; did you mean 'worst'"),
        ({"budget": 4}, TypeError, "choose_budget sets 'budget' itself"),
        ({"group": object()}, ValueError, "choose_budget works in one process"),
        ({"value": torch.zeros(1, 1, 8, 4)}, ValueError, "value has shape"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    q, k, v = tensors(1, 1, 9)
    with pytest.raises(kind, match=message):
        choose_budget(**{"query": q, "key": k, "value": v, "tolerance": 0.1, **options})
