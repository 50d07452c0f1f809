"""The search: the rule by numbers, and a model of which every head meets the tolerance."""

from typing import Any

import pytest
import torch
from torch import nn

from skeinformer import apply, compare
from skeinformer.compare.contender import Contender, parse
from skeinformer.compare.search import Tried, budgets_to_try, least_time
from skeinformer.nn.decision import estimated_pairs, worth_sketching


def tried(spec: str, error: float, pairs: int, exact: int = 100) -> Tried:
    return Tried(parse(spec), error, pairs, exact)


@pytest.mark.parametrize(
    ("calls", "chosen"),
    [
        ([[tried("cluster:budget=4", 0.4, 10), tried("cluster:budget=8", 0.3, 20)]], "cluster:budget=8"),
        ([[tried("cluster:budget=4", 0.4, 10), tried("cluster:budget=8", 0.31, 20)]], None),
        ([[tried("cluster:budget=4", 0.1, 100)]], None),  # exact attention takes no longer
        ([[tried("cluster:budget=4", 0.1, 30), tried("skeinformer:budget=8", 0.2, 20)]], "skeinformer:budget=8"),
        ([[tried("cluster:budget=4", 0.1, 30), tried("skeinformer:budget=8", 0.0, 30)]], "cluster:budget=4"),
        # a layer that is called twice: its errors at both calls, and the time of both
        ([[tried("cluster:budget=4", 0.1, 30)], [tried("cluster:budget=4", 0.4, 30)]], None),
        ([[tried("cluster:budget=4", 0.1, 30)], [tried("cluster:budget=4", 0.0, 100)]], "cluster:budget=4"),
        ([[tried("cluster:budget=4", 0.1, 30)], [tried("vmean", 0.1, 30)]], None),
    ],
)
def test_the_rule(calls: list[list[Tried]], chosen: str | None) -> None:
    found = least_time(calls, 0.3)
    assert (None if found is None else found.spec) == chosen


def test_budgets_that_are_tried() -> None:
    def budgets(spec: str, keys: int) -> list[int]:
        return [d for _, d in budgets_to_try(parse(spec), 16, keys)]

    assert budgets("cluster", 64) == [4, 8, 16, 32]
    assert budgets("cluster", 65) == [4, 8, 16, 32, 64]
    assert budgets("cluster:budget=48", 64) == [16]  # its own, as it is told
    assert budgets("vmean", 64) == [16]
    sized, _ = budgets_to_try(Contender("cluster", (("num_pilots", 8),)), 16, 5)[0]
    assert sized.spec == "cluster:budget=4,num_pilots=8"


def test_the_estimate_is_what_decides_at_run_time() -> None:
    told = (16, 16, 32, False, "cluster")
    for n in (256, 1024, 4096):
        assert worth_sketching(n, n, *told) == (estimated_pairs(n, n, *told) < n * n)


N = 1060  # long enough for a small sketch to win


def model_and_input() -> tuple[nn.Module, torch.Tensor]:
    layer = nn.TransformerEncoderLayer(64, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    attention: Any = model.layers[1].self_attn
    attention.in_proj_weight.data[:128] *= 6  # peaked
    return model, torch.randn(1, N, 64)


def test_every_head_meets_the_tolerance_and_the_result_is_applied() -> None:
    model, x = model_and_input()
    exact = model(x)
    result = compare(model, x, search=True, tolerance=0.2, rounds=1, entropy_rows=8, show=False)
    first, second = (str(choice) for choice in result.verdict.layers.values())
    assert first == "cluster(budget=4)"
    assert second == "exact"
    assert all(float(record["error"] or 0) <= 0.2 for record in result.layers)
    assert [record["head"] for record in result.layers] == 2 * [None, 0, 1]
    assert (result.safe, result.unsafe) == (tuple(result.verdict.layers), ())
    assert torch.equal(model(x), exact)  # as it was
    apply(model, result)
    with torch.no_grad():
        change = float((model(x) - exact).norm() / exact.norm())
    assert result.whole["change"] == pytest.approx(change, rel=1e-3)
    text = " ".join(result.text().split())
    assert "in every head: cluster 4 for layers.0.self_attn; exact for layers.1.self_attn." in text
    assert max(map(len, result.text().splitlines())) <= 80


def test_a_method_with_its_own_budget_and_one_without() -> None:
    model, x = model_and_input()
    told: dict[str, Any] = {"search": True, "rounds": 1, "entropy_rows": 8, "show": False}
    result = compare(model, x, ["cluster:budget=8", "vmean"], tolerance=0.2, **told)
    assert str(result.verdict.layers["layers.0.self_attn"]) == "cluster(budget=8)"
    assert result.whole["options"] == "cluster:budget=8 vmean"


def test_a_layer_that_is_called_with_a_short_and_a_long_sequence() -> None:
    """By its one choice the short call is exact, as it will be when the model runs."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(64, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x[:, :50]
            output: torch.Tensor = self.layer(x, x, x, need_weights=False)[0]
            return output.mean(1) + self.layer(y, y, y, need_weights=False)[0].mean(1)

    result = compare(
        Twice(), torch.randn(1, N, 64), "cluster", search=True, tolerance=0.3, rounds=1, entropy_rows=8, show=False
    )
    assert str(result.verdict.layers["layer"]) == "cluster(budget=4)"
    first, second = (record for record in result.layers if record["head"] is None)
    assert (first["call"], second["call"]) == (1, 2)
    assert float(first["error"] or 0) > 1e-3 > float(second["error"] or 0)


def test_wrong_arguments() -> None:
    model, x = model_and_input()
    with pytest.raises(ValueError, match="search=True chooses the budget of each layer; leave out budget=4"):
        compare(model, x, search=True, budget=4)
    with pytest.raises(TypeError, match="several are for search=True"):
        compare(model, x, ["cluster", "vmean"])
    with pytest.raises(ValueError, match="method is empty"):
        compare(model, x, [], search=True)
