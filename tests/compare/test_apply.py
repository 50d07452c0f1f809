"""`apply`: the verdict of `compare` in models of torch and in those that call SDPA, from anything that holds it."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer
from skeinformer import Verdict, apply, compare, convert, restore
from skeinformer.compare import Comparison
from skeinformer.nn.verdict import Choice
from tests.nn.test_convert import encoder, padded_input, snapshot

NAMES = ["layers.0.self_attn", "layers.1.self_attn"]
FAST: dict[str, Any] = {"budget": 4, "rounds": 1, "show": False}
# torch of its nested tensors, which an exact encoder takes
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch")


def compared() -> tuple[nn.TransformerEncoder, dict[str, Tensor], Comparison]:
    """An encoder of which one layer is safe, and one is not."""
    model = encoder().eval()
    x, padding = padded_input()
    inputs = {"src": x, "src_key_padding_mask": padding}
    options = {"num_pilots": 3, **FAST}
    errors = [r["error"] for r in compare(model, inputs, "cluster", **options).layers if r["head"] is None]
    result = compare(model, inputs, "cluster", tolerance=sum(errors) / 2, **options)
    assert (len(result.safe), len(result.unsafe)) == (1, 1)
    return model, inputs, result


@torch.no_grad()
def test_safe_layers_get_the_method_and_others_are_exact_on_padded_batches() -> None:
    model, inputs, result = compared()
    exact, twin = model(**inputs), copy.deepcopy(model)
    verdict = apply(model, result, min_length=0)
    assert [str(verdict.layers[name]) for name in result.safe] == ["cluster(budget=4, num_pilots=3)"]
    assert [str(verdict.layers[name]) for name in result.unsafe] == ["exact"]
    convert(twin, "cluster", budget=4, num_pilots=3, min_length=0, filter=list(result.safe))
    found, real = model(**inputs), ~inputs["src_key_padding_mask"]
    assert torch.equal(found, twin(**inputs))
    assert not torch.allclose(found[real], exact[real])
    assert restore(model) == result.safe
    assert torch.equal(model(**inputs), exact)


def test_every_form_of_a_result_says_the_same(tmp_path: Path) -> None:
    model, _, result = compared()
    result.save(tmp_path / "result.json")
    result.verdict.save(tmp_path / "verdict.json")
    lines = tmp_path / "records.jsonl"
    lines.write_text("".join(json.dumps(record) + "\n" for record in result.records()))
    forms = [
        result.verdict,
        result.json(),
        json.loads(result.json()),
        result.verdict.json(),
        result.verdict.to_dict(),
        result.records(),
        json.dumps(result.records()),
        tmp_path / "result.json",
        str(tmp_path / "verdict.json"),
        lines,
    ]
    expected = apply(model, result)
    assert expected == result.verdict
    for form in forms:
        restore(model)
        assert apply(model, form) == expected
        assert (type(model.layers[0].self_attn) is nn.MultiheadAttention) == (NAMES[0] in result.unsafe)


def test_it_undoes_what_the_model_attended_by_before() -> None:
    model, _, result = compared()
    before = snapshot(model)
    convert(model, "vmean")
    apply(model, result)
    assert [type(model.get_submodule(name)) is nn.MultiheadAttention for name in NAMES] == [
        name in result.unsafe for name in NAMES
    ]
    apply(model, Verdict())
    assert snapshot(model) == before


def test_a_layer_built_as_ours_is_exact_by_softmax() -> None:
    model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True))
    ours = skeinformer.nn.MultiheadAttention(8, 2, batch_first=True, method="vmean")
    model[0].self_attn = ours
    apply(model, Verdict({"0.self_attn": Choice()}))
    assert ours.method == "softmax"
    assert restore(model) == ("0.self_attn",)
    assert ours.method == "vmean"


@torch.no_grad()
def test_a_model_that_is_a_layer_itself() -> None:
    model, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 30, 8)

    class Whole(nn.MultiheadAttention):
        def __init__(self) -> None:
            super().__init__(8, 2, batch_first=True)

    result = compare(model, (x, x, x), "cluster", tolerance=9.0, **FAST)
    assert list(apply(model, result).layers) == [""]
    assert isinstance(model, skeinformer.nn.MultiheadAttention)


class Own(nn.Module):
    """Three calls, the last of them causal, between two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x).unflatten(-1, (2, 4)).transpose(1, 2)
        for causal in (False, False, True):
            y = y + F.scaled_dot_product_attention(y, y, y, is_causal=causal)
        output: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return output


@torch.no_grad()
def test_calls_of_a_model_keep_their_numbers() -> None:
    model, x = Own().eval(), 3 * torch.randn(2, 40, 8)
    errors = [float(r["error"] or 0) for r in compare(model, x, "cluster", **FAST).layers if r["head"] is None]
    result = compare(model, x, "cluster", tolerance=sum(errors) / 2, **FAST)
    exact = model(x)
    for form in (result, result.records()):
        verdict = apply(model, form, min_length=0)
        assert list(verdict.layers) == ["call 0", "call 1", "call 2"]
        assert verdict.sketched == result.safe
        assert len(result.safe) == 1
        found = model(x)
        assert not torch.allclose(found, exact)
        assert restore(model) == result.safe
        assert torch.equal(model(x), exact)
    apply(model, result, min_length=0)
    assert compare(model, x, "cluster", **FAST).layers[0]["error"] == errors[0]  # exact inside of compare
    assert torch.equal(model(x), found)


def test_a_verdict_of_a_part_fits_the_whole_and_the_other_way_round() -> None:
    model, _, result = compared()

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder()

    whole = Classifier()
    longer = apply(whole, result)
    assert list(longer.layers) == [f"encoder.{name}" for name in NAMES]
    assert apply(model, longer) == result.verdict


@pytest.mark.parametrize(
    ("result", "error", "message"),
    [
        ({"layers": {"layers.7.self_attn": {"method": "cluster"}}}, ValueError, "made on another model"),
        ({"layers": {NAMES[0]: {"method": "cluster", "budgets": 3}}}, TypeError, "budgets"),
        ({"layers": {NAMES[0]: {"method": "reformer"}}}, ValueError, "the same vectors as queries and as keys"),
        ({"model": "x"}, ValueError, "not a result of skeinformer.compare"),
        ([{"kind": "approx"}], ValueError, "these records hold no complete comparison"),
        ("nowhere.json", FileNotFoundError, "there is no file nowhere.json"),
        ('{"layers": ', ValueError, "this is not JSON"),
        ("[" * 100_000, ValueError, "this is not JSON.*nested too deeply"),
        (7, TypeError, "expected a result of skeinformer.compare or its JSON"),
        (None, ValueError, "has no verdict in its configuration"),
    ],
)
def test_what_cannot_be_applied_is_named_and_nothing_changes(result: Any, error: Any, message: str) -> None:
    model = encoder()
    convert(model, "vmean", filter=NAMES[1])
    before = snapshot(model)
    with pytest.raises(error, match=message):
        apply(model, result)
    assert snapshot(model) == before


def test_several_comparisons_in_one_file_are_refused() -> None:
    model, inputs, result = compared()
    other = compare(model, inputs, "vmean", rounds=1, show=False)
    with pytest.raises(ValueError, match=r"2 comparisons are among these records \(Cluster.*V-mean"):
        apply(model, [*result.records(), *other.records()])
