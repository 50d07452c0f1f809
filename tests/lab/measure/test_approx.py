"""The numbers of the approximation experiment are what slow definitions give, on real queries, keys and values."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra `lab`")

from skeinformer.attention import build
from skeinformer.lab.contender import parse_all
from skeinformer.lab.measure import approx
from skeinformer.lab.measure.approx import VALUES, Experiment, cases, compact, error_records, load_source, summarize
from skeinformer.lab.measure.approx_time import time_records
from skeinformer.lab.measure.pretrained import minilm_folder, pretrained_qkv
from skeinformer.lab.records import Record, check

try:
    minilm_folder()
except FileNotFoundError:
    pytestmark = pytest.mark.skip(reason="the pretrained weights are not installed; run `make install`")

N, D = 64, 8


def experiment(*specs: str, **options: Any) -> Experiment:
    small = {"lengths": (N,), "budgets": (D,), "trials": 2, "weights": ("pretrained",), "gradient_trials": 1}
    return Experiment(contenders=tuple(parse_all(specs)), **{**small, **options})


def run(plan: Experiment, present: list[Record] | None = None) -> list[Any]:
    found = list(error_records(plan, load_source(plan, plan.trials), present or []))
    assert all(check(record) for record in found)
    return found


@pytest.mark.parametrize("weights", ["pretrained", "initialized"])
@pytest.mark.parametrize("trial", [0, 1])
def test_values_by_slow_numpy(weights: str, trial: int) -> None:
    plan = experiment("vmean", weights=(weights,), layers=(1,))
    (record,) = [r for r in run(plan) if r["trial"] == trial]
    seed = approx.stream_seed(0, trial, "weights")
    q, k, v = (
        x[0].double().numpy() for x in pretrained_qkv(N, offset=trial * N, layer=1, weights=weights, seed=seed)
    )  # (h, n, p)
    scores = np.exp(q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1]))
    exact = scores / scores.sum(-1, keepdims=True) @ v
    mean = np.broadcast_to(v.mean(1, keepdims=True), v.shape)
    pairs = list(zip(mean - exact, exact, strict=True))
    norm = np.linalg.norm
    expected = {
        "spectral": np.mean([norm(e, ord=2) for e, _ in pairs]),
        "spectral_relative": np.mean([norm(e, ord=2) / norm(x, ord=2) for e, x in pairs]),
        "frobenius": np.mean([norm(e) for e, _ in pairs]),
        "frobenius_relative": np.mean([norm(e) / norm(x) for e, x in pairs]),
        "row": np.mean([norm(e, axis=1).max() / norm(x, axis=1).max() for e, x in pairs]),
        "cosine": np.mean((mean * exact).sum(-1) / norm(mean, axis=-1) / norm(exact, axis=-1)),
    }
    for name, value in expected.items():
        assert record[name] == pytest.approx(value, rel=1e-4), name
    assert (record["heads"], record["head_dim"], record["budget"]) == (12, 32, None)
    assert record["estimate"] == pytest.approx(record["frobenius_relative"], rel=0.5)  # by 32 rows


@pytest.mark.parametrize("spec", ["vmean", "informer", "linformer"])
def test_gradients_by_autograd_in_float64(spec: str) -> None:
    plan = experiment(spec, trials=1)
    (record,) = run(plan)
    (case,) = cases(plan)
    draws, upstream = (approx.stream_seed(0, 0, name) for name in ("draws", "upstream"))
    inputs = [x.double().requires_grad_() for x in pretrained_qkv(N)]
    generator = torch.Generator().manual_seed(upstream)
    weight = torch.randn(inputs[2].shape, generator=generator, dtype=torch.float64)

    def gradients(output: torch.Tensor) -> list[torch.Tensor]:
        found = torch.autograd.grad((output * weight).sum(), inputs, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, inputs, strict=True)]

    q, k, v = inputs
    exact = gradients((q @ k.mT / 32**0.5).softmax(-1) @ v)
    module = case.build(N, 32, draws).double()
    other = gradients(module(q, k, v, generator=torch.Generator().manual_seed(draws)))
    for name, x, y in zip(approx.GRADIENTS, other, exact, strict=True):
        errors = [float((x[0, h] - y[0, h]).norm() / y[0, h].norm()) for h in range(12)]
        assert record[name] == pytest.approx(np.mean(errors), rel=1e-3), name
    if spec == "vmean":
        assert record["grad_query"] == record["grad_key"] == 1.0


def test_exact_attention_has_no_error_and_dropout_has() -> None:
    exact, dropout = run(experiment("softmax", "softmax_dropout", trials=1))
    for name in ("spectral_relative", "frobenius_relative", "row", *approx.GRADIENTS):
        assert 0 < exact[name] < 1e-4
        assert 0.01 < dropout[name] < 1
    assert exact["cosine"] == pytest.approx(1)


def test_gradients_only_in_the_first_trials() -> None:
    first, second = run(experiment("skeinformer"))
    assert all(first[name] > 0 for name in approx.GRADIENTS)
    assert all(second[name] is None for name in approx.GRADIENTS)


def test_the_estimate_is_the_method_s_own_for_the_same_output() -> None:
    (record,) = run(experiment("skeinformer:num_pilots=16", trials=1))
    module: Any = build("skeinformer", head_dim=32, budget=D, num_pilots=16)
    seed = approx.stream_seed(0, 0, "draws")
    output, info = module.certify(*pretrained_qkv(N), generator=torch.Generator().manual_seed(seed))
    q, k, v = pretrained_qkv(N)
    plain = module(q, k, v, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(plain, output)
    assert record["estimate"] == pytest.approx(float(info.error.mean()), rel=1e-5)
    assert 0.5 < record["estimate_ratio"] < 2


def test_an_exact_sketch_has_nothing_to_estimate() -> None:
    (record,) = run(experiment("skeinformer", budgets=(N,), trials=1))
    assert record["frobenius_relative"] < 1e-5
    assert record["estimate_ratio"] is None


def test_trials_differ_and_a_seed_repeats_them() -> None:
    specs = ("linformer", "performer")
    first, again, other = (run(experiment(*specs, seed=seed, gradient_trials=0)) for seed in (0, 0, 1))
    values = [[r["spectral"] for r in records] for records in (first, again, other)]
    assert values[0] == values[1]
    assert len(set(values[0] + values[2])) == 8


def test_order_and_identity_of_the_records() -> None:
    plan = experiment("vmean", "skeinformer", budgets=(4, 8, 4), layers=(0, 2), lengths=(32, N), gradient_trials=0)
    records = run(plan)
    about = [(r["trial"], r["n"], r["layer"], r["method"], r["budget"]) for r in records]
    assert about == [
        (trial, n, layer, *case)
        for trial in (0, 1)
        for n in (32, N)
        for layer in (0, 2)
        for case in (("vmean", None), ("skeinformer", 4), ("skeinformer", 8))
    ]
    for record in records:
        assert set(VALUES) <= set(record)
        assert record["kind"] == "approx"
        assert record["text"] == "Python language reference"


def test_what_is_present_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = experiment("vmean", "skeinformer", "reformer", layers=(0, 1), gradient_trials=0)
    records = run(plan)
    missing = [r for r in records if r.get("trial") == 1 and r["layer"] == 1 and r["method"] == "vmean"]
    kept = [r for r in records if r not in missing]
    others = [{**missing[0], **change} for change in ({"seed": 5}, {"text": "other"}, {"budget": 3}, {"options": "x"})]
    exact = []
    original = approx.make_reference

    def counted(*arguments: Any) -> Any:
        exact.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(approx, "make_reference", counted)
    (again,) = run(plan, kept + others)
    assert [again[name] for name in VALUES] == [missing[0][name] for name in VALUES]
    assert len(exact) == 1
    assert run(plan, records) == []
    assert len(exact) == 1
    more = run(replace(plan, trials=3), records)
    assert {r["trial"] for r in more} == {2}


def test_a_method_that_cannot_take_the_input_is_left_out_with_its_reason() -> None:
    records = run(experiment("reformer", "vmean"))
    skipped = [r for r in records if r["kind"] == "approx_skipped"]
    assert len(skipped) == 1
    assert "Reformer shares queries and keys" in skipped[0]["reason"]
    assert (skipped[0]["part"], skipped[0]["method"], skipped[0].get("trial")) == ("errors", "reformer", None)
    assert [r["trial"] for r in records if r["kind"] == "approx"] == [0, 1]


def test_steps_grow_from_zero_to_one() -> None:
    plan = experiment("softmax", "skeinformer", lengths=(32, N))
    steps: list[tuple[str, float]] = []
    list(error_records(plan, load_source(plan, 2), (), lambda detail, done: steps.append((detail, done))))
    shares = [done for _, done in steps]
    assert shares == sorted(shares)
    assert shares[0] == 0
    assert 0.8 < shares[-1] < 1
    assert any("trial 2 of 2, n = 64, pretrained, layer 0: Skeinformer, d = 8" in detail for detail, _ in steps)


def test_times_beside_sdpa() -> None:
    plan = experiment("softmax", "reformer", "linformer", "vmean", budgets=(8, 16), time_rounds=2)
    source = load_source(plan, 1)
    records: list[Any] = list(time_records(plan, source))
    assert [(r["method"], r["budget"]) for r in records] == [
        ("softmax", None),
        ("reformer", 8),
        ("linformer", 8),
        ("vmean", None),
        ("reformer", 16),
        ("linformer", 16),
    ]
    for record in records:
        assert check(record)["kind"] == "approx_time"
        for name in ("forward", "both", "forward_ratio", "both_ratio"):
            assert 0 < record[f"{name}_q25"] <= record[name] <= record[f"{name}_q75"]
        assert 0 < record["peak_bytes"] <= record["both_peak_bytes"]
        assert (record["n"], record["heads"], record["head_dim"], record["batch"]) == (N, 12, 32, 1)
    assert records[0]["flops"] == 2 * 12 * 2 * N * N * 32  # scores, and their product with V
    assert records[2]["flops"] == 2 * 12 * 4 * N * 8 * 32
    assert list(time_records(plan, source, records)) == []
    fewer = [r for r in records if r["method"] != "vmean"]
    assert [r["method"] for r in time_records(plan, source, fewer)] == ["vmean"]


def test_summaries_are_means_with_standard_errors() -> None:
    base: Record = {"kind": "approx", "model": "m", "n": 4, "method": "vmean", "options": "", "label": "V-mean"}
    rows: list[Record] = [
        {**base, "trial": t, "spectral": x, "grad_key": g}
        for t, x, g in ((0, 1.0, 5.0), (1, 2.0, None), (2, 6.0, None))
    ]
    other: Record = {**base, "n": 8, "trial": 0, "spectral": 1.0}
    time: Record = {**base, "kind": "approx_time"}
    summary, single = summarize([*rows, other, time])
    assert summary["kind"] == "approx_summary"
    assert (summary["trials"], summary["spectral"], summary["label"]) == (3, 3.0, "V-mean")
    assert summary["spectral_se"] == pytest.approx(np.std([1, 2, 6], ddof=1) / 3**0.5)
    assert (summary["grad_key"], summary["grad_key_se"], summary["cosine"]) == (5.0, None, None)
    assert (single["trials"], single["spectral_se"]) == (1, None)
    assert "trial" not in summary
    skipped: Record = {**base, "kind": "approx_skipped", "reason": "why"}
    assert compact([*rows, other, time, skipped]) == [summary, single, time, skipped]
    # ratios to V-mean's error are taken trial by trial
    skein: list[Record] = [{**r, "method": "skeinformer", "spectral": 0.5 * float(r["spectral"] or 0)} for r in rows]
    assert [r["spectral_to_vmean"] for r in summarize([*skein, *rows])] == [0.5, 1.0]
    assert [r["spectral_to_vmean_se"] for r in summarize([*skein, *rows])] == [0.0, 0.0]
    assert [r["spectral_to_vmean"] for r in summarize(skein)] == [None]
    # a summary passes through; the one of more trials stays
    assert summarize([summary, single]) == [summary, single]
    assert summarize([summary, *rows[:2]]) == [summary]
    assert summarize([{**summary, "trials": 2}, *rows]) == [summary]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": ()}, "lengths is empty"),
        ({"lengths": (0,)}, "length must be at least 1"),
        ({"budgets": (8, 0)}, "budget must be at least 1"),
        ({"trials": 0}, "trials must be at least 1"),
        ({"weights": ("pretraind",)}, "did you mean 'pretrained'"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"time_rounds": -1}, "time_rounds must be at least 0"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        experiment("vmean", **options)


def test_a_text_that_is_too_short_says_how_many_trials_it_allows(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("word " * 100)
    plan = experiment("vmean", text=path, trials=5, lengths=(30, 16))
    with pytest.raises(ValueError, match="the text has 100 tokens, enough for 3 trials of 30 tokens, but 5 are asked"):
        load_source(plan, plan.trials)
    assert len(load_source(plan, 3).tokens) == 90


def test_the_default_text_has_enough_tokens_for_the_default_experiment() -> None:
    plan = Experiment(contenders=tuple(parse_all(["vmean"])))
    assert len(load_source(plan, plan.trials).tokens) == plan.trials * max(plan.lengths)


def test_a_layer_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="layer=6 does not exist"):
        load_source(experiment("vmean", layers=(0, 6)), 1)
