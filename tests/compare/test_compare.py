"""`compare` on models of torch: what it measures is what a plain computation gives, and the model stays as it was."""

import importlib
import io
import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer
from skeinformer import build, compare, convert
from skeinformer.compare import Comparison
from skeinformer.compare.record import Record
from skeinformer.lab.measure.errors import relative_error
from skeinformer.lab.records import check
from skeinformer.noise import layer_seed
from tests.helpers import lengths_mask
from tests.nn.test_convert import encoder, padded_input, snapshot

N, WIDTH, HEADS = 40, 8, 2
FAST: dict[str, Any] = {"rounds": 1, "budget": 6}


class OneLayer(nn.Module):
    """A single attention layer, and logits of the mean of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        x, _ = self.attention(x, x, x, key_padding_mask=padding)
        logits: Tensor = self.head(x if padding is None else x.masked_fill(padding[..., None], 0))
        return logits.mean(1)


def heads_of(model: OneLayer, x: Tensor) -> list[Tensor]:
    """q, k, v of the layer, (b, h, n, p)."""
    projected = F.linear(x, model.attention.in_proj_weight, model.attention.in_proj_bias).chunk(3, -1)
    return [y.unflatten(-1, (HEADS, -1)).transpose(1, 2).detach() for y in projected]


def rows(result: Comparison, head: int | None = None) -> list[Record]:
    return [record for record in result.layers if record["head"] == head]


@pytest.mark.parametrize("padded", [False, True])
def test_errors_estimates_and_entropy_are_those_of_the_layer(padded: bool) -> None:
    model, x = OneLayer().eval(), 3 * torch.randn(2, N, WIDTH)
    mask = lengths_mask([N, 25], N) if padded else None
    arguments = (x, None if mask is None else ~mask)
    result = compare(model, arguments, "skeinformer", budget=6, num_pilots=4, entropy_rows=N, rounds=1, seed=3)
    q, k, v = heads_of(model, x)
    bias = None if mask is None else torch.zeros(2, 1, 1, N).masked_fill(~mask[:, None, None], -torch.inf)
    exact = F.scaled_dot_product_attention(q, k, v, bias)
    attention = build("skeinformer", head_dim=WIDTH // HEADS, budget=6, num_pilots=4, seed=layer_seed(3, 0)).eval()
    output, info = attention.certify(q, k, v, key_mask=mask, query_mask=mask)
    weights = (q @ k.mT / math.sqrt(WIDTH // HEADS) + (0 if bias is None else bias)).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)  # (b, h, n)
    per_head: list[tuple[Tensor, Tensor]] = []
    for head in range(HEADS):
        (record,) = rows(result, head)
        e, r = exact[:, head].clone(), output[:, head].clone()
        if mask is not None:
            e[~mask] = 0
        per_head.append((r - e, e))
        assert record["error"] == pytest.approx(float((r - e).norm() / e.norm()), rel=1e-4)
        norms = e.norm(dim=(-2, -1)).double()
        estimate = (info.error[:, head].double() * norms).norm() / norms.norm()
        assert record["estimate"] == pytest.approx(float(estimate), rel=1e-4)
        bound = (info.error_upper[:, head].double() * norms).norm() / norms.norm()
        assert record["bound"] == pytest.approx(float(bound), rel=1e-4)
        means = [float(h if mask is None else h[m].mean()) for h, m in _examples(entropy[:, head], mask)]
        assert record["entropy"] == pytest.approx(sum(means) / 2, rel=1e-4)
        assert record["safe"] == (record["error"] <= 0.3)
        assert record["seconds_exact"] is None
    (whole,) = rows(result)
    missed, norm = (torch.stack(parts).norm() for parts in zip(*per_head, strict=True))
    assert whole["error"] == pytest.approx(float(missed / norm), rel=1e-4)
    assert (whole["layer"], whole["index"], whole["n"], whole["heads"]) == ("attention", 0, N, HEADS)
    assert whole["ratio"] == pytest.approx(whole["seconds_sketched"] / whole["seconds_exact"])


def _examples(entropy: Tensor, mask: Tensor | None) -> list[tuple[Tensor, Any]]:
    return [(entropy[i].mean(), None) if mask is None else (entropy[i], mask[i]) for i in range(len(entropy))]


def test_the_d_that_is_needed_is_decided_by_the_true_error() -> None:
    n, budget = 400, 6
    model, x = OneLayer().eval(), 2 * torch.randn(1, n, WIDTH)
    q, k, v = heads_of(model, x)

    def errors(d: int) -> tuple[list[float], list[float]]:
        """True and estimated, of each head."""
        attention = build("cluster", head_dim=WIDTH // HEADS, budget=d, seed=0).eval()
        output, info = attention.certify(q, k, v)
        true: list[float] = relative_error(output, F.scaled_dot_product_attention(q, k, v))[0].tolist()
        return true, info.error[0].tolist()

    true, estimated = errors(8)
    tolerance = (true[0] + estimated[0]) / 2  # of truth and estimate at d = 8, one meets it and one does not
    ladder = {d: errors(d) for d in (1, 2, 4, 6, 8, 16, 32, 64, 128, 256)}
    result = compare(model, x, "cluster", tolerance=tolerance, rounds=1, budget=budget)
    for head in range(HEADS):
        (record,) = rows(result, head)
        least = 1 if record["safe"] else budget + 1
        enough = [d for d, found in ladder.items() if found[0][head] <= tolerance and d >= least]
        assert record["budget_needed"] == (enough[0] if enough else n)
        chosen = [d for d, found in ladder.items() if found[1][head] <= tolerance]
        assert record["budget_estimated"] == (chosen[0] if chosen else n)
    for name in ("budget_needed", "budget_estimated"):
        assert result.whole[name] == rows(result)[0][name]
        assert rows(compare(model, x, "cluster", tolerance=1e-9, **FAST))[0][name] == n


def test_the_d_that_is_needed_is_not_looked_for_where_it_is_not_wanted() -> None:
    model, x = OneLayer().eval(), torch.randn(1, 64, WIDTH)
    quick, whole = (compare(model, x, "cluster", needed=needed, **FAST) for needed in (False, True))
    assert {record["budget_needed"] for record in quick.records()} == {None}
    assert [r["error"] for r in quick.layers] == [r["error"] for r in whole.layers]
    assert "needed" in whole.text()
    assert "needed" not in quick.text()
    with pytest.raises(TypeError, match="needed"):
        compare(model, x, "cluster", needed="no", **FAST)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["skeinformer:num_pilots=4", "performer"])
def test_safe_and_the_d_that_is_needed_do_not_contradict_each_other(method: str) -> None:
    """Errors of single draws do not fall steadily with d, and estimates are off: no row may say both."""
    model, x = OneLayer().eval(), 3 * torch.randn(1, 64, WIDTH)
    for tolerance in (0.2, 0.4, 0.6, 0.8, 1.0):
        for budget in (7, 16, 100):
            for record in compare(model, x, method, tolerance=tolerance, budget=budget, rounds=1, show=False).layers:
                needed = record["budget_needed"] or math.inf
                assert (needed <= budget) == record["safe"]


def test_every_method_has_an_estimate_and_some_have_no_budget() -> None:
    model, x = OneLayer(), torch.randn(1, N, WIDTH)
    (vmean,) = rows(compare(model, x, "vmean", **FAST))
    assert vmean["budget_needed"] is vmean["budget_estimated"] is vmean["budget"] is None
    (performer,) = rows(compare(model, x, "performer", tolerance=0.9, **FAST))
    needed = performer["budget_needed"]
    assert isinstance(needed, int)
    q, k, v = heads_of(model, x)
    exact = F.scaled_dot_product_attention(q, k, v)
    output = build("performer", head_dim=WIDTH // HEADS, budget=needed, seed=0).eval()(q, k, v)
    assert relative_error(output, exact).min() <= 0.9
    for record, method in ((vmean, "vmean"), (performer, "performer")):
        attention = build(method, head_dim=WIDTH // HEADS, budget=6, seed=0).eval()
        _, info = attention.certify(q, k, v)
        norms = exact.norm(dim=(-2, -1)).double()
        estimate = float((info.error.double() * norms).norm() / norms.norm())
        assert record["estimate"] == pytest.approx(estimate, rel=1e-4)


def test_the_model_as_a_whole() -> None:
    model, x = OneLayer().eval(), 3 * torch.randn(4, N, WIDTH)
    exact = model(x)
    result = compare(model, x, "skeinformer", logits=True, **FAST)
    assert compare(model, x, "skeinformer", **FAST).whole["argmax_agreement"] is None
    convert(model, "skeinformer", budget=6, min_length=0)
    exact, sketched, whole = exact.detach(), model(x).detach(), result.whole
    assert whole["output"] == "logits"
    assert whole["logits_change"] == pytest.approx(float((sketched - exact).abs().mean()), rel=1e-4)
    assert whole["logits_change_max"] == pytest.approx(float((sketched - exact).abs().max()), rel=1e-4)
    assert whole["argmax_agreement"] == float((sketched.argmax(-1) == exact.argmax(-1)).float().mean())
    assert whole["cosine"] == pytest.approx(float(F.cosine_similarity(sketched, exact).mean()), rel=1e-4)
    assert whole["ratio"] == pytest.approx(whole["seconds_sketched"] / whole["seconds_exact"])
    assert (whole["layers"], whole["layers_safe"]) == (1, len(result.safe))


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_a_full_budget_is_exact_and_safe() -> None:
    x, padding = padded_input()
    result = compare(encoder(), {"src": x, "src_key_padding_mask": padding}, rounds=1)
    assert result.safe == ("layers.0.self_attn", "layers.1.self_attn")
    assert result.unsafe == ()
    assert max(float(record["error"] or 0) for record in result.layers) < 1e-5
    assert result.whole["cosine_min"] == pytest.approx(1)
    assert result.whole["pooled_cosine"] == pytest.approx(1)
    assert [check(record)["kind"] for record in result.records()] == ["compare_layer"] * 6 + ["compare_model"]


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_is_never_seen(batch_first: bool) -> None:
    model = encoder(batch_first=batch_first)
    x, padding = padded_input(batch_first)
    spoiled = x.masked_fill((padding if batch_first else padding.T)[..., None], 1e3)
    first, second = (compare(model, {"src": y, "src_key_padding_mask": padding}, **FAST) for y in (x, spoiled))
    for before, after in zip(first.layers, second.layers, strict=True):
        assert before["error"] == pytest.approx(after["error"], rel=1e-3)
        assert before["entropy"] == pytest.approx(after["entropy"], rel=1e-3)
    assert first.whole["cosine"] == pytest.approx(second.whole["cosine"], rel=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_the_model_stays_as_it_was() -> None:
    model = encoder(3).train()
    model.layers[0].eval()
    convert(model, "cluster", budget=3, min_length=0, filter="layers.1.*")
    x, _ = padded_input()
    before, state = snapshot(model), torch.random.get_rng_state()
    result = compare(model, x, "skeinformer", **FAST)
    assert result.whole["layers"] == 3
    assert snapshot(model) == before
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.raises(ValueError, match="a last dimension of 8"):
        compare(model, torch.randn(2, 5, 9), **FAST)
    assert snapshot(model) == before


def test_layers_built_as_ours_are_compared_with_exact_attention() -> None:
    model = OneLayer()
    model.attention = skeinformer.nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, method="vmean")
    x = torch.randn(2, N, WIDTH)
    result = compare(model, x, "softmax", **FAST)
    assert result.whole["cosine_min"] == pytest.approx(1)
    assert compare(model, x, "vmean", **FAST).whole["change"] > 1e-3
    assert model.attention.method == "vmean"


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
def test_what_stays_exact_is_named() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    inputs = (torch.randn(2, 12, 8), torch.randn(2, 7, 8))
    assert "later rows" in compare(model, inputs, **FAST).left["decoder.layers.0.multihead_attn"]
    result = compare(model, inputs, "skeinformer_uniform", **FAST)
    assert [record["layer"] for record in rows(result)] == [
        "encoder.layers.0.self_attn",
        "decoder.layers.0.multihead_attn",
    ]
    assert [record["n"] for record in rows(result)] == [12, 7]
    assert [record["keys"] for record in rows(result)] == [12, 12]
    assert "causal" in result.left["decoder.layers.0.self_attn"]
    assert "decoder.layers.0.self_attn" in str(result.whole["left"])


def test_a_shared_layer_is_measured_at_each_call() -> None:
    shared = nn.TransformerEncoderLayer(WIDTH, HEADS, 16, batch_first=True)
    model = nn.Sequential(shared, shared)
    x = torch.randn(1, N, WIDTH)
    result = compare(model, x, **FAST)
    calls = [(record["layer"], record["index"], record["call"]) for record in rows(result)]
    assert calls == [("0.self_attn", 0, 1), ("0.self_attn", 1, 2)]
    first, second = sorted(float(record["error"] or 0) for record in rows(result))
    both, one = (compare(model, x, tolerance=t, **FAST) for t in (second + 1e-6, (first + second) / 2))
    assert (both.safe, both.unsafe, both.whole["layers"], both.whole["layers_safe"]) == (("0.self_attn",), (), 1, 1)
    assert (one.safe, one.unsafe, one.whole["layers"], one.whole["layers_safe"]) == ((), ("0.self_attn",), 1, 0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"method": "skienformer"}, ValueError, "did you mean"),
        ({"method": "skeinformer:num_pilot=3"}, ValueError, "num_pilot"),
        ({"num_pilot": 3}, TypeError, "num_pilot"),
        ({"tolerance": 0}, ValueError, "tolerance must be above 0"),
        ({"rounds": 0}, ValueError, "rounds must be at least 1"),
        ({"budget": 0}, ValueError, "budget must be at least 1"),
        ({"method": "reformer"}, ValueError, "the same vectors as queries and as keys"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = OneLayer()
    before = snapshot(model)
    with pytest.raises(error, match=message):
        compare(model, torch.randn(1, 5, WIDTH), **{"rounds": 1, **arguments})
    assert snapshot(model) == before


def test_a_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="no attention layer of Linear would be sketched"):
        compare(nn.Linear(2, 2), torch.randn(1, 2))


def test_a_budget_of_none_is_the_methods_own() -> None:
    model, x = OneLayer(), torch.randn(1, N, WIDTH)
    for method, budget in (("cluster", 16), ("cluster:quality=accurate", 128), ("skeinformer", 256)):
        assert compare(model, x, method, rounds=1, show=False).whole["budget"] == budget
    for result in (
        compare(model, x, "skeinformer:num_pilots=3", budget=5, rounds=1, show=False),
        compare(model, x, "skeinformer:budget=5,num_pilots=3", rounds=1, show=False),
    ):
        assert (result.whole["budget"], result.whole["options"]) == (5, "num_pilots=3")
        assert result.whole["label"] == "Skeinformer, 3 pilots"
    with pytest.raises(ValueError, match="budget=6 and 'skeinformer:budget=5' both set d; give one"):
        compare(model, x, "skeinformer:budget=5", budget=6, rounds=1)


def test_another_option_may_set_the_size() -> None:
    model, x = OneLayer(), torch.randn(1, N, WIDTH)
    for result in (
        compare(model, x, "bigbird:block_size=2", rounds=1, show=False),
        compare(model, x, "bigbird", block_size=2, rounds=1, show=False),
    ):
        assert result.whole["budget"] is result.layers[0]["budget_needed"] is None
        assert result.whole["label"] == "Big Bird, block size 2"
    convert(model, "bigbird", block_size=2, min_length=0)
    assert result.whole["cosine"] == pytest.approx(compare(model, x, "bigbird:block_size=2", rounds=1).whole["cosine"])
    with pytest.raises(ValueError, match="budget=8 and block_size=2 both set the size of BigBird; give one"):
        compare(model, x, "bigbird:block_size=2", budget=8, rounds=1)


def test_the_table_names_layers_heads_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    result = compare(OneLayer(), torch.randn(1, N, WIDTH), budget=2, rounds=1, tolerance=1e-6)
    assert str(result) == result.text()
    assert repr(result) == (
        "<Comparison of OneLayer with Cluster sketch, d = 2: 0 of 1 attention layers safe; print() shows all of it>"
    )
    file = io.StringIO()
    result.print(file)
    text = file.getvalue()
    assert capsys.readouterr().out == text  # what `compare` itself has printed
    lines = [line.split() for line in text.splitlines()]
    assert [line[:2] for line in lines if line[:1] == ["attention"]] == [["attention", x] for x in ("all", "0", "1")]
    said = " ".join(text.split())
    estimate = f"By the method's own estimate it would be {N}."
    assert f"All layers are safe at d = {N} ({N} for attention). {estimate}" in said
    assert all(line[-2:] == [f"{N}", f"{N}"] for line in lines if line[:1] == ["attention"])
    assert "Not safe at d = 2, with an error above 1.0e-06: attention." in said
    result.print(heads=False)
    assert capsys.readouterr().out.count("\nattention") == 1


def test_the_function_and_the_package_have_one_name() -> None:
    assert skeinformer.compare is compare
    assert importlib.import_module("skeinformer.compare").compare is compare


def test_no_warning_of_ours_is_raised_for_a_model_in_training() -> None:
    model = encoder(1, dropout=0.1).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(model, padded_input()[0], **FAST)
