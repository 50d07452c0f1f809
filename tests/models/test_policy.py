"""One `Policy` decides for layers, calls of SDPA and models of transformers: costs, reasons, masks, draws, dropout."""

import copy
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import skeinformer
from skeinformer.attention import METHODS
from skeinformer.attention.table import Cost, Entry
from skeinformer.models import Call, MultiheadAttention, Policy, policy, sketched
from skeinformer.models.policy import FEW_KEYS, ONE_QUERY, SHORT, SLOWER, exact_attention, padding_mask
from tests.helpers import lengths_mask

WIDTH, HEADS = 16, 2
SHORT_N, LONG_N = 64, 2048


def worth_sketching(
    method: str,
    n: int,
    head_dim: int = 32,
    *,
    budget: int | None = 16,
    num_pilots: int = 0,
    window: int = 0,
    training: bool = False,
    device: str = "cpu",
) -> bool:
    return policy.worth_sketching(method, n, n, head_dim, budget, num_pilots, window, training, device)


def sizes_of(method: str) -> dict[str, int]:
    attention = skeinformer.build(method, head_dim=32, max_len=8)
    sizes = {name: getattr(attention.method, name, 0) for name in ("num_pilots", "window")}
    return {"budget": attention.method.budget, **sizes}


def first_length(method: str, head_dim: int = 32, **options: Any) -> int:
    """The shortest sequence that is sketched."""
    options = {**sizes_of(method), **options}
    return next(n for n in range(1, 10**6) if worth_sketching(method, n, head_dim, **options))


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if not row.quadratic])
@pytest.mark.parametrize("training", [False, True])
def test_short_sequences_are_exact_and_long_ones_are_sketched(method: str, training: bool) -> None:
    lengths = [2**i for i in range(18)]
    worth = [worth_sketching(method, n, training=training, **sizes_of(method)) for n in lengths]
    assert worth == sorted(worth)
    assert (worth[0], worth[-1]) == (False, True)


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.quadratic])
def test_quadratic_methods_are_never_worth_it(method: str) -> None:
    assert not worth_sketching(method, 10**6)


def test_the_lengths_from_which_methods_are_faster_are_those_of_the_performance_page() -> None:
    assert 512 < first_length("cluster") < 1200
    assert 512 < first_length("cluster", training=True) < 1024
    assert 1024 < first_length("cluster", budget=128, num_pilots=64) < 2048
    assert first_length("cluster") < first_length("cluster_window") < 1500
    assert 1000 < first_length("skeinformer") < 1300
    assert 600 < first_length("skeinformer", budget=256, num_pilots=32) < 900
    assert 3000 < first_length("cluster", device="cuda") < 5000


def test_more_budget_pilots_and_narrower_heads_need_longer_sequences() -> None:
    small = first_length("cluster", budget=16, num_pilots=16)
    assert first_length("cluster", budget=64, num_pilots=16) > small
    assert first_length("cluster", budget=16, num_pilots=64) > small
    assert first_length("cluster", head_dim=16) > first_length("cluster", head_dim=64)


def test_the_costs_of_a_method_are_those_of_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    row = METHODS["cluster"]
    monkeypatch.setitem(METHODS, "toy", replace(row, costs=(Cost(token=2, call=7), Cost())))
    assert first_length("toy", budget=1, num_pilots=0) == 4  # n n > 7 + 2 n
    monkeypatch.setitem(METHODS, "toy", Entry(row.method, "Toy", "a row that is not measured", "nobody", "O(n d p)"))
    sizes = {"budget": 16, "num_pilots": 16}
    assert first_length("toy", **sizes) == first_length("skeinformer", **sizes)


def reason(method: str, min_length: Any, n: int, n_k: int, budget: int | None, **options: Any) -> str | None:
    made = Policy(method, budget, min_length, options=tuple(options.items()))
    return made.reason_exact(Call(torch.empty(1, 1, n, 32), *[torch.empty(1, 1, n_k, 32)] * 2))


def test_reasons_come_in_their_order() -> None:
    for min_length in ("auto", 0, 5):
        assert reason("cluster", min_length, 4096, 256, 256) == FEW_KEYS
        assert reason("cluster", min_length, 1, 4096, 16) == ONE_QUERY
        assert reason("softmax", min_length, 1, 4096, 16) == policy.EXACT_METHOD
    assert reason("longformer", 0, 512, 512, 1024) == FEW_KEYS  # exact from twice the keys on
    assert reason("longformer", 0, 512, 512, 600) is None
    assert reason("performer", 0, 4096, 256, 256) is None  # never exact
    assert reason("performer", "auto", 4096, 256, 256) == SLOWER
    assert reason("cluster", "auto", 4096, 77, 16) == SLOWER  # text in a diffusion model
    for n, n_k, expected in ((100, 100, None), (99, 100, SHORT), (100, 99, SHORT)):
        assert reason("cluster", 100, n, n_k, 16) == expected


@pytest.mark.parametrize("wrong", ["automatic", -1, 1.5, True])
def test_a_wrong_min_length_is_named(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="min_length must be"):
        Policy.create(min_length=wrong)


def call(groups: int = 1, n: int = 40, **options: Any) -> Call:
    q, k, v = torch.randn(2, 2 * groups, n, 8), torch.randn(2, 2, 40, 8), torch.randn(2, 2, 40, 5)
    return Call(q, k, v, **options)


def test_grouped_heads_are_those_of_repeated_keys() -> None:
    grouped = call(groups=3, number=4)
    key, value = (x.repeat_interleave(3, 1) for x in (grouped.key, grouped.value))
    expected = F.scaled_dot_product_attention(grouped.query, key, value)
    torch.testing.assert_close(exact_attention(grouped), expected)
    full = Policy.create(budget=40)
    torch.testing.assert_close(full.attend(grouped), expected)
    small = Policy.create(budget=8, seed=3)
    output, (error, upper, _) = small.certify(grouped)
    assert torch.equal(output, small.attend(grouped))
    assert error.shape == upper.shape == (2, 6)
    module = skeinformer.build("cluster", head_dim=8, budget=8, seed=3 * 1009 + 4).eval()
    assert torch.equal(output[:, 1::3], module(grouped.query[:, 1::3], grouped.key, grouped.value))


def test_exact_attention_ignores_what_padding_holds() -> None:
    padded = call(key_mask=lengths_mask([40, 25], 40), query_mask=lengths_mask([40, 25], 40))
    expected = exact_attention(padded)
    assert not expected[1, :, 25:].any()
    alone = exact_attention(Call(*(x[1:, :, :25] for x in padded[:3])))
    torch.testing.assert_close(expected[1:, :, :25], alone)
    for x in padded[:3]:
        x[1, :, 25:] = torch.nan
    assert torch.equal(exact_attention(padded), expected)


def test_padding_masks_of_every_form_are_read_alike() -> None:
    q, k = torch.empty(2, 4, 6, 8), torch.empty(2, 4, 9, 8)
    real = lengths_mask([9, 5], 9)
    wide = real[:, None, None]
    added = torch.zeros(2, 1, 1, 9).masked_fill(~wide, -torch.inf)
    forms = [wide, wide.expand(2, 4, 6, 9), wide.expand(2, 4, 6, 9).contiguous(), added, added.clamp(min=-1e9)]
    for form in forms:
        mask, why = padding_mask(form, q, k)
        assert why is None
        assert torch.equal(mask, real)
    assert padding_mask(None, q, k) == (None, None)
    refused = {
        policy.DIFFERS: torch.ones(6, 9, dtype=torch.bool).tril(),
        policy.DIFFERS_BY_HEAD: torch.rand(2, 4, 1, 9) < 0.5,
        policy.MORE_THAN_PADDING: torch.linspace(-3, 0, 9).expand(1, 9),
    }
    for why, form in refused.items():
        assert padding_mask(form, q, k) == (None, why)


@torch.no_grad()
def test_every_site_asks_the_same_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(policy, "worth_sketching", lambda *sizes: seen.append(sizes) or False)
    x = torch.randn(1, SHORT_N, WIDTH)
    q = torch.randn(1, HEADS, SHORT_N, WIDTH // HEADS)
    options = {"budget": 8, "num_pilots": 4}
    MultiheadAttention(WIDTH, HEADS, batch_first=True, **options).eval()(x, x, x)
    skeinformer.scaled_dot_product_attention(q, q, q, **options)
    with sketched(**options):
        F.scaled_dot_product_attention(q, q, q)
    assert len(seen) == 3
    assert set(seen) == {("cluster", SHORT_N, SHORT_N, WIDTH // HEADS, 8, 4, 0, False, "cpu")}


def test_an_exact_layer_keeps_masks_gradients_and_dropout() -> None:
    kinds = (MultiheadAttention, nn.MultiheadAttention)
    ours, theirs = (kind(WIDTH, HEADS, dropout=0.5, batch_first=True, dtype=torch.float64) for kind in kinds)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 20, WIDTH, dtype=torch.float64)
    padding = ~lengths_mask([20, 7], 20)
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for module in (ours, theirs):
            torch.manual_seed(1)
            output = module(x, x, x, key_padding_mask=padding, need_weights=False)[0]
            gradient = torch.autograd.grad(output[~padding].square().sum(), module.in_proj_weight)[0]
            results.append((output[~padding], gradient))
    torch.testing.assert_close(*results)


def test_a_method_with_parameters_always_computes() -> None:
    module = MultiheadAttention(WIDTH, HEADS, batch_first=True, method="linformer", max_len=SHORT_N, budget=8)
    x = torch.randn(1, SHORT_N, WIDTH)
    module(x, x, x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in module.attention.parameters())


def test_copies_and_pickles_are_equal() -> None:
    made = Policy.create("skeinformer", budget=32, num_pilots=5, seed=None)
    made.attend(call())
    assert pickle.loads(pickle.dumps(made)) == copy.deepcopy(made) == made
    assert str(made) == "skeinformer(budget=32, num_pilots=5)"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "clustr"}, "unknown attention 'clustr'; did you mean 'cluster'"),
        ({"budgets": 3}, "has no option 'budgets'; did you mean 'budget'"),
        ({"method": "reformer"}, "'reformer' cannot replace the attention of a model: it uses the same vectors"),
        ({"method": "linformer"}, "it has parameters of its own"),
        ({"method": "sketched"}, "it takes quadratic time"),
        ({"method": "nystromformer", "conv_kernel": 3, "num_heads": 2}, "adds parameters, which the model was not"),
        ({"scale": 3.0}, "has no option 'scale'"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Policy.create(**options)
    with pytest.raises((TypeError, ValueError), match=message):
        sketched(**options)
