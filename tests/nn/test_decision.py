"""`min_length="auto"`: one rule says where a sketch would win, and every drop-in goes by it. No clock is asked."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import skeinformer
from skeinformer.attention import METHODS
from skeinformer.attention.costs import Cost, Costs
from skeinformer.nn import decision
from skeinformer.nn.decision import FEW_KEYS, SHORT, SLOWER, why_exact, worth_sketching

WIDTH, HEADS = 16, 2
SHORT_N, LONG_N = 64, 2048


@pytest.fixture
def huggingface() -> Iterator[Any]:
    pytest.importorskip("transformers", reason="needs transformers, of the extra `hf`")
    module = importlib.import_module("skeinformer.huggingface")
    yield module
    module.unregister()


def sizes(method: str) -> tuple[int, int]:
    attention = skeinformer.build(method, head_dim=32, max_len=8)
    return attention.budget, getattr(attention.options, "num_pilots", 0)


def first_length(method: str, **options: Any) -> int:
    """The shortest sequence that is sketched."""
    budget, num_pilots = options.pop("sizes", sizes(method))
    told = {"head_dim": 32, "gradients": False, "method": method, **options}
    return next(n for n in range(1, 10**6) if worth_sketching(n, n, budget, num_pilots, **told))


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if not row.quadratic])
@pytest.mark.parametrize("gradients", [False, True])
def test_short_sequences_are_exact_and_long_ones_are_sketched(method: str, gradients: bool) -> None:
    budget, pilots = sizes(method)
    verdicts = [worth_sketching(n, n, budget, pilots, 32, gradients, method) for n in (2**i for i in range(18))]
    assert verdicts == sorted(verdicts)  # once it wins, it wins
    assert not verdicts[0]
    assert verdicts[-1]


@pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.quadratic])
def test_quadratic_methods_never_win(method: str) -> None:
    assert not worth_sketching(10**6, 10**6, 16, 16, 32, False, method)


def test_the_lengths_from_which_methods_win_are_those_of_the_performance_page() -> None:
    assert 512 < first_length("cluster") < 1200
    assert 512 < first_length("cluster", gradients=True) < 1024
    assert 1024 < first_length("cluster", sizes=(128, 64)) < 2048
    assert 1000 < first_length("skeinformer") < 1300
    assert 600 < first_length("skeinformer", sizes=(256, 32)) < 900
    assert 3000 < first_length("cluster", device="cuda") < 5000


def test_the_lengths_from_which_training_with_estimated_gradients_wins() -> None:
    """Measured at 512, 1024, 2048 and 4096 tokens; between them the lengths are about 800, 1250, 950 and 1600."""
    training = {"gradients": True, "gradient": "queries"}
    assert 900 < first_length("cluster", **training) < 1100
    assert 1250 < first_length("cluster", sizes=(128, 64), **training) < 1600
    assert 900 < first_length("skeinformer", sizes=(256, 32), **training) < 1024
    assert 1600 < first_length("skeinformer", sizes=(256, 256), **training) < 1850


def test_more_budget_pilots_and_narrower_heads_need_longer_sequences() -> None:
    assert first_length("cluster", sizes=(64, 16)) > first_length("cluster", sizes=(16, 16))
    assert first_length("cluster", sizes=(16, 64)) > first_length("cluster", sizes=(16, 16))
    assert first_length("cluster", head_dim=16) > first_length("cluster", head_dim=64)


ESTIMATING = [name for name, row in METHODS.items() if "gradient" in row.make.Options._fields and not row.quadratic]


@pytest.mark.parametrize("method", ESTIMATING)
def test_training_with_estimated_gradients_needs_longer_sequences(method: str) -> None:
    plain = first_length(method, sizes=(128, 32), gradients=True)
    assert first_length(method, sizes=(128, 32), gradients=True, gradient="queries") > 1.2 * plain
    one = first_length(method, gradient="queries")  # there is no backward pass
    assert one == first_length(method)


def test_few_keys_or_few_queries_are_exact() -> None:
    assert not worth_sketching(4096, 77, 16, 16, 64, False, "cluster")  # text in a diffusion model
    assert not worth_sketching(16, 4096, 16, 16, 64, False, "cluster")
    assert worth_sketching(4096, 2048, 16, 16, 64, False, "cluster")


def test_a_budget_of_all_keys_is_exact_whatever_min_length_says() -> None:
    for min_length in ("auto", 0, 5):
        assert why_exact(min_length, 4096, 256, 256, 16, 32, False, "cluster") == FEW_KEYS
    assert why_exact(0, 4096, 512, 1024, 0, 32, False, "longformer") == FEW_KEYS  # exact from twice the keys on
    assert why_exact(0, 4096, 600, 1024, 0, 32, False, "longformer") is None
    assert why_exact(0, 4096, 256, 256, 0, 32, False, "performer") is None  # never exact
    assert why_exact("auto", 4096, 256, 256, 0, 32, False, "performer") == SLOWER
    assert why_exact("auto", 4096, 256, 256, 0, 32, False, "softmax") is None  # it is the exact one
    assert why_exact(0, 4096, 256, None, 0, 32, False, "bigbird") is None  # another option sets the size


def test_min_length_is_one_of_queries_and_keys() -> None:
    for n, n_k, reason in ((100, 100, None), (99, 100, SHORT), (100, 99, SHORT)):
        assert why_exact(100, n, n_k, 16, 16, 32, False, "cluster") == reason


@pytest.mark.parametrize("wrong", ["automatic", -1, 1.5, True])
def test_a_wrong_min_length_is_named_by_every_way(wrong: Any, huggingface: Any) -> None:
    q = torch.randn(1, 2, 8, 4)
    ways = (
        lambda: skeinformer.convert(nn.MultiheadAttention(8, 2), min_length=wrong),
        lambda: skeinformer.nn.MultiheadAttention(8, 2, min_length=wrong),
        lambda: huggingface.register(min_length=wrong),
        lambda: skeinformer.sketched(min_length=wrong),
        lambda: skeinformer.scaled_dot_product_attention(q, q, q, min_length=wrong),
    )
    for way in ways:
        with pytest.raises((TypeError, ValueError), match="min_length must be"):
            way()


def layer(method: str = "cluster", **options: Any) -> skeinformer.nn.MultiheadAttention:
    return skeinformer.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, method=method, **options).eval()


@torch.no_grad()
def test_a_layer_is_exact_where_the_sketch_would_not_win() -> None:
    ours, theirs = layer(), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    theirs.load_state_dict(ours.state_dict())
    for n, exact in ((SHORT_N, True), (LONG_N, False)):
        x = 3 * torch.randn(1, n, WIDTH)
        same = torch.allclose(ours(x, x, x)[0], theirs(x, x, x, need_weights=False)[0], atol=1e-5)
        assert same == exact
    ours.configure("cluster", min_length=0)
    x = 3 * torch.randn(1, SHORT_N, WIDTH)
    assert not torch.allclose(ours(x, x, x)[0], theirs(x, x, x, need_weights=False)[0], atol=1e-5)
    ours.configure("cluster", budget=SHORT_N)  # which keeps min_length
    assert ours.min_length == 0
    torch.testing.assert_close(ours(x, x, x)[0], theirs(x, x, x, need_weights=False)[0])


def test_an_exact_layer_keeps_masks_gradients_and_dropout() -> None:
    ours, theirs = (
        kind(WIDTH, HEADS, dropout=0.5, batch_first=True, dtype=torch.float64)
        for kind in (skeinformer.nn.MultiheadAttention, nn.MultiheadAttention)
    )
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 20, WIDTH, dtype=torch.float64)
    padding = torch.arange(20) >= torch.tensor([[20], [7]])
    found = []
    for module in (ours, theirs):
        torch.manual_seed(1)
        output = module(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        gradient = torch.autograd.grad(output[~padding].square().sum(), module.in_proj_weight)[0]
        found.append((output[~padding], gradient))
    torch.testing.assert_close(*found)
    x[padding] = torch.nan
    torch.manual_seed(1)
    torch.testing.assert_close(ours(x, x, x, key_padding_mask=padding)[0][~padding], found[0][0])


def test_training_counts_as_gradients_also_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpointed layer runs once without gradients, and must decide as it will with them."""
    seen = []
    decide = decision.worth_sketching

    def asked(*arguments: Any) -> bool:
        seen.append(arguments[5])
        return decide(*arguments)

    monkeypatch.setattr(decision, "worth_sketching", asked)
    module, x = layer(), torch.randn(1, SHORT_N, WIDTH)
    for training, grad in ((True, False), (True, True), (False, True), (False, False)):
        with torch.set_grad_enabled(grad):
            module.train(training)(x, x, x)
    assert seen == [True, True, True, False]


def test_a_method_with_parameters_always_computes() -> None:
    module, x = layer("linformer", max_len=SHORT_N, budget=8), torch.randn(1, SHORT_N, WIDTH)
    module(x, x, x)[0].sum().backward()
    assert all(parameter.grad is not None for parameter in module.attention.parameters())


@torch.no_grad()
def test_a_converted_model_says_so_and_saves_it() -> None:
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, SHORT_N, WIDTH)
    exact = model(x)
    report = skeinformer.convert(model, "cluster")
    assert "where that is faster than exact attention" in str(report)
    torch.testing.assert_close(model(x), exact)
    report = skeinformer.convert(model, "cluster", min_length=SHORT_N)
    assert f"from {SHORT_N} tokens on" in str(report)
    assert report.settings()["min_length"] == SHORT_N
    assert not torch.allclose(model(x), exact, atol=1e-6)
    assert "never faster" in skeinformer.convert(model, "sketched").notes[0]
    torch.testing.assert_close(model(x), exact)
    skeinformer.restore(model)
    assert not hasattr(model.self_attn, "min_length")


def test_every_drop_in_asks_the_same_function(huggingface: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """n, n_k, d, pilots, p, whether gradients are needed, the method, the device, the option `gradient`."""
    from transformers import BertConfig, BertModel

    seen: list[tuple[Any, ...]] = []

    def asked(*arguments: Any) -> bool:
        seen.append(arguments)
        return False

    monkeypatch.setattr(decision, "worth_sketching", asked)
    options = {"budget": 8, "num_pilots": 4, "gradient": "queries"}
    with torch.no_grad():
        x = torch.randn(1, SHORT_N, WIDTH)
        layer(**options)(x, x, x)
        q = torch.randn(1, HEADS, SHORT_N, WIDTH // HEADS)
        skeinformer.scaled_dot_product_attention(q, q, q, **options)
        with skeinformer.sketched(**options):
            F.scaled_dot_product_attention(q, q, q)
        huggingface.register("cluster", **options)
        config = BertConfig(
            hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=HEADS, intermediate_size=WIDTH, vocab_size=9
        )
        model = BertModel(config).eval()
        model.set_attn_implementation("skein-cluster")
        model(torch.randint(9, (1, SHORT_N)))
    assert seen == [(SHORT_N, SHORT_N, 8, 4, WIDTH // HEADS, False, "cluster", "cpu", "queries")] * 4


def test_compare_measures_the_sketch_at_every_length() -> None:
    model = nn.TransformerEncoderLayer(WIDTH, HEADS, WIDTH, dropout=0.0, batch_first=True)
    result = skeinformer.compare(model, torch.randn(1, SHORT_N, WIDTH), "cluster", budget=4, rounds=1, show=False)
    assert result.layers[0]["error"] > 0
    assert result.whole["cosine"] < 1


def test_what_a_method_takes_is_in_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes_and_width = (1000, 1000, 16, 16, 32, False)
    row = METHODS["cluster"]
    monkeypatch.setitem(METHODS, "toy", replace(row, costs=Costs(Cost(7, 2, 0, 0), Cost(0, 0, 0, 0))))
    assert decision.estimated_pairs(*sizes_and_width, "toy") == 7 + 2 * 1000
    monkeypatch.setitem(METHODS, "toy", replace(row, costs=None))
    unmeasured = decision.estimated_pairs(*sizes_and_width, "toy")
    assert unmeasured == decision.estimated_pairs(*sizes_and_width, "skeinformer")
