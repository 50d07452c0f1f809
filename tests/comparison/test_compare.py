"""`compare` on models of torch: the numbers are those of a plain computation, and the model stays as it was."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer
from skeinformer import build, compare, convert, sketched
from skeinformer.cli.records import check
from skeinformer.comparison import Comparison
from skeinformer.comparison.measure import Record
from skeinformer.noise import layer_seed
from tests.helpers import lengths_mask

N, WIDTH, HEADS = 40, 8, 2
FAST: dict[str, Any] = {"rounds": 1, "budget": 6, "show": False}


class OneLayer(nn.Module):
    """A single attention layer, and logits of the mean of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.attention: nn.MultiheadAttention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        logits: Tensor = self.head(x if padding is None else x.masked_fill(padding[..., None], 0))
        return logits.mean(1)


class OwnCalls(nn.Module):
    """Self-attention with grouped heads, then cross-attention to a shorter text with a mask, then a causal one."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.text = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor, text: Tensor, mask: Tensor) -> Tensor:
        q, kv, other = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q(x), self.kv(x), self.text(text)))
        x = F.scaled_dot_product_attention(q, kv[:, :2], kv[:, 2:], enable_gqa=True)
        x = F.scaled_dot_product_attention(x, other, other, attn_mask=mask[:, None, None], scale=0.5)
        x = F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return x.transpose(1, 2).flatten(2)


def own_inputs() -> tuple[Tensor, Tensor, Tensor]:
    return 3 * torch.randn(2, N, 16), 3 * torch.randn(2, 20, 16), torch.arange(20) < torch.tensor([[20], [15]])


def encoder(layers: int = 2, **options: Any) -> nn.TransformerEncoder:
    options = {"dim_feedforward": 16, "batch_first": True, **options}
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, **options), layers, enable_nested_tensor=False
    )


def heads_of(model: OneLayer, x: Tensor) -> list[Tensor]:
    """q, k, v of the layer, (b, h, n, p)."""
    projected = F.linear(x, model.attention.in_proj_weight, model.attention.in_proj_bias).chunk(3, -1)
    return [y.unflatten(-1, (HEADS, -1)).transpose(1, 2).detach() for y in projected]


def layers_of(result: Comparison, head: int | None = None) -> list[Record]:
    return [record for record in result.layers if record["head"] == head]


def snapshot(model: nn.Module) -> list[tuple[object, ...]]:
    """The class, the mode and the attributes of every module."""
    return [(type(m), m.training, {k: id(v) for k, v in vars(m).items() if k[0] != "_"}) for m in model.modules()]


@pytest.mark.parametrize("padded", [False, True])
def test_errors_and_estimates_are_those_of_the_layer(padded: bool) -> None:
    model, x = OneLayer().eval(), 3 * torch.randn(2, N, WIDTH)
    mask = lengths_mask([N, 25], N) if padded else None
    inputs = (x, None if mask is None else ~mask)
    result = compare(model, inputs, "skeinformer", budget=6, num_pilots=4, rounds=1, seed=3, show=False)
    q, k, v = heads_of(model, x)
    exact = F.scaled_dot_product_attention(q, k, v, None if mask is None else mask[:, None, None])
    attention = build("skeinformer", head_dim=WIDTH // HEADS, budget=6, num_pilots=4, seed=layer_seed(3, 0)).eval()
    output, info = attention.certify(q, k, v, key_mask=mask, query_mask=mask)
    real = torch.ones(2, 1, N, 1) if mask is None else mask[:, None, :, None]
    missed, exact = (output - exact) * real, exact * real
    norms = exact.norm(dim=(-2, -1)).double()  # (b, h)
    for head in range(HEADS):
        (record,) = layers_of(result, head)
        norm = norms[:, head].norm()
        assert record["error"] == pytest.approx(float(missed[:, head].norm() / norm), rel=1e-4)
        assert record["estimate"] == pytest.approx(float((info.error * norms)[:, head].norm() / norm), rel=1e-4)
        assert record["bound"] == pytest.approx(float((info.error_upper * norms)[:, head].norm() / norm), rel=1e-4)
        assert record["seconds_exact"] is None
    (whole,) = layers_of(result)
    assert whole["error"] == pytest.approx(float(missed.norm() / exact.norm()), rel=1e-4)
    assert (whole["layer"], whole["index"], whole["n"], whole["heads"]) == ("attention", 0, N, HEADS)
    assert whole["ratio"] == pytest.approx(whole["seconds_sketched"] / whole["seconds_exact"])


def test_a_layer_is_safe_if_its_worst_head_is() -> None:
    model, x = OneLayer().eval(), 3 * torch.randn(1, N, WIDTH)
    errors = [float(record["error"] or 0) for record in compare(model, x, **FAST).layers]
    between = (errors[0] + max(errors)) / 2
    assert errors[0] < between < max(errors)
    result = compare(model, x, tolerance=between, **FAST)
    assert (result.safe, result.unsafe) == ((), ("attention",))
    assert sorted(bool(record["safe"]) for record in result.layers) == [False, False, True]
    assert result.whole["error_worst"] == max(errors)
    assert compare(model, x, tolerance=max(errors), **FAST).safe == ("attention",)
    with torch.no_grad():  # values of the last head
        model.attention.in_proj_bias[-1] = torch.nan
    assert [bool(record["safe"]) for record in compare(model, x, tolerance=9, **FAST).layers] == [False, True, False]


def test_the_model_as_a_whole() -> None:
    model, x = OneLayer().eval(), 3 * torch.randn(4, N, WIDTH)
    exact = model(x).detach()
    result = compare(model, x, "skeinformer", logits=True, **FAST)
    convert(model, "skeinformer", budget=6, min_length=0)
    with torch.no_grad():
        output, whole = model(x), result.whole
    assert whole["output"] == "logits"
    assert whole["logits_change"] == pytest.approx(float((output - exact).abs().mean()), rel=1e-4)
    assert whole["argmax_agreement"] == float((output.argmax(-1) == exact.argmax(-1)).float().mean())
    assert whole["cosine"] == pytest.approx(float(F.cosine_similarity(output, exact).mean()), rel=1e-4)
    assert whole["ratio"] == pytest.approx(whole["seconds_sketched"] / whole["seconds_exact"])
    assert (whole["layers"], whole["layers_safe"]) == (1, len(result.safe))
    assert [check(record)["kind"] for record in result.records()] == ["compare_layer"] * 3 + ["compare_model"]


@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_changes_nothing(batch_first: bool) -> None:
    model, x = encoder(batch_first=batch_first), torch.randn(2, N, WIDTH)
    padding = ~lengths_mask([N, 25], N)
    inputs = [y if batch_first else y.transpose(0, 1) for y in (x, x.masked_fill(padding[..., None], 1e3))]
    first, second = (compare(model, {"src": y, "src_key_padding_mask": padding}, **FAST) for y in inputs)
    for before, after in zip(first.layers, second.layers, strict=True):
        assert before["error"] == pytest.approx(after["error"], rel=1e-3)
    assert first.whole["cosine"] == pytest.approx(second.whole["cosine"], rel=1e-3)


def test_the_model_stays_as_it_was() -> None:
    model, x = encoder(3).train(), torch.randn(2, N, WIDTH)
    model.layers[0].eval()
    convert(model, "cluster", budget=3, min_length=0, filter="layers.1.*")
    before, state = snapshot(model), torch.random.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none of ours for a model in training mode
        result = compare(model, x, "skeinformer", **FAST)
    assert result.whole["layers"] == 3
    assert snapshot(model) == before
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        compare(model, torch.randn(2, 5, 9), **FAST)
    assert snapshot(model) == before


def test_layers_of_ours_are_compared_with_exact_attention() -> None:
    model, x = OneLayer().eval(), 3 * torch.randn(2, N, WIDTH)
    expected = compare(model, x, "vmean", rounds=1, show=False)
    ours = skeinformer.MultiheadAttention(WIDTH, HEADS, batch_first=True, method="cluster", min_length=0)
    ours.load_state_dict(model.attention.state_dict())
    model.attention = ours.eval()
    result = compare(model, x, "vmean", rounds=1, show=False)
    assert result.whole["change"] == pytest.approx(expected.whole["change"], rel=1e-4)
    assert ours.method == "cluster"


def test_layers_that_stay_exact_are_named() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    inputs = (torch.randn(2, 12, 8), torch.randn(2, 10, 8))
    assert "later rows" in compare(model, inputs, **FAST).left["decoder.layers.0.multihead_attn"]
    result = compare(model, inputs, "skeinformer_uniform", **FAST)
    assert [(record["layer"], record["n"], record["keys"]) for record in layers_of(result)] == [
        ("encoder.layers.0.self_attn", 12, 12),
        ("decoder.layers.0.multihead_attn", 10, 12),
    ]
    assert "causal" in result.left["decoder.layers.0.self_attn"]
    assert "decoder.layers.0.self_attn" in str(result.whole["left"])


def test_a_shared_layer_is_measured_at_each_call() -> None:
    shared = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    model, x = nn.Sequential(shared, shared), torch.randn(1, N, WIDTH)
    result = compare(model, x, **FAST)
    calls = [(record["layer"], record["index"], record["call"]) for record in layers_of(result)]
    assert calls == [("0.self_attn", 0, 1), ("0.self_attn", 1, 2)]
    worst = [max(float(r["error"] or 0) for r in result.layers if r["call"] == call) for call in (1, 2)]
    one = compare(model, x, tolerance=sum(worst) / 2, **FAST)
    assert (one.safe, one.unsafe, one.whole["layers"], one.whole["layers_safe"]) == ((), ("0.self_attn",), 1, 0)


@pytest.mark.parametrize("method", ["cluster", "skeinformer", "vmean"])
def test_the_calls_of_one_pass_are_the_layers(method: str) -> None:
    model, inputs = OwnCalls(), own_inputs()
    result = compare(model, inputs, method, **(FAST | ({"budget": None} if method == "vmean" else {})))
    layers = layers_of(result)
    assert [record["layer"] for record in layers] == ["call 0", "call 1"]
    assert [(record["n"], record["keys"], record["heads"]) for record in layers] == [(N, N, 4), (N, 20, 4)]
    assert result.left == {"call 2": "causal"}
    with torch.no_grad():
        exact = model.eval()(*inputs)
        with sketched(method, min_length=0, **({} if method == "vmean" else {"budget": 6})):
            output = model(*inputs)
        q, kv = (f(inputs[0]).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (model.q, model.kv))
        call, options = (q, kv[:, :2], kv[:, 2:]), {} if method == "vmean" else {"budget": 6}
        first = F.scaled_dot_product_attention(*call, enable_gqa=True)
        again = skeinformer.scaled_dot_product_attention(*call, enable_gqa=True, method=method, min_length=0, **options)
    assert result.whole["cosine"] == pytest.approx(float(F.cosine_similarity(output, exact, dim=-1).mean()), rel=1e-4)
    assert layers[0]["error"] == pytest.approx(float((again - first).norm() / first.norm()), rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "skienformer"}, ValueError, "did you mean"),
        ({"tolerance": 0}, ValueError, "tolerance must be above 0"),
        ({"rounds": 0}, ValueError, "rounds must be at least 1"),
        ({"method": "softmax"}, ValueError, "no attention layer of OneLayer would be sketched: attention: the method"),
        ({"budget": 5}, ValueError, "would be sketched: attention: no more keys than the budget"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = OneLayer()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        compare(model, torch.randn(1, 5, WIDTH), **{"rounds": 1, **arguments})
    assert snapshot(model) == before


def test_models_without_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="no attention layer of Linear would be sketched: it has none that we know"):
        compare(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module, got str; of a pipeline pass pipeline.model"):
        compare("model", torch.randn(1, 2))  # type: ignore[arg-type]


def test_the_budget_and_the_options_of_the_method() -> None:
    model, x = OneLayer(), torch.randn(1, 300, WIDTH)
    for method, budget in (("cluster", 16), ("skeinformer", 256), ("vmean", None)):
        assert compare(model, x, method, rounds=1, show=False).whole["budget"] == budget
    assert compare(model, x, quality="accurate", rounds=1, show=False).whole["budget"] == 128
    whole = compare(model, x, "skeinformer", budget=5, num_pilots=3, rounds=1, show=False).whole
    assert (whole["budget"], whole["options"]) == (5, "num_pilots=3")
    assert whole["label"] == "Skeinformer, num_pilots=3"
    assert compare(model, x, "bigbird", block_size=2, rounds=1, show=False).whole["budget"] is None


def test_what_is_printed_and_saved(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown: list[str] = []
    result = compare(
        OneLayer(), torch.randn(1, N, WIDTH), budget=2, rounds=1, tolerance=1e-6, on_layer=shown.append, text="noise"
    )
    assert shown == ["layer 0: attention", "the whole model"]
    assert repr(result) == "<Comparison of OneLayer with Cluster sketch: 0 of 1 attention layers safe>"
    file = io.StringIO()
    result.print(file)
    assert capsys.readouterr().out == file.getvalue() == f"{result}\n"
    rows = [line.split()[:2] for line in file.getvalue().splitlines() if line.startswith("attention")]
    assert rows == [["attention", head] for head in ("all", "0", "1")]
    assert "The worst of 2 heads, head " in file.getvalue()
    result.print(heads=False)
    assert capsys.readouterr().out.count("\nattention") == 1
    result.save(tmp_path / "comparison.json")
    assert json.loads((tmp_path / "comparison.json").read_text()) == json.loads(result.json()) == result.records()
