"""What limits training: differences are paired by seed, arms are trained once, and the methods for it are right."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from benchmarks import limits
from benchmarks.ablations import CHANGES, table, variant
from benchmarks.common import t_interval
from benchmarks.finetune import second_half
from benchmarks.gradients import METHODS as GRADIENT_METHODS
from benchmarks.gradients import add_methods
from benchmarks.limits import Limits, differences, exclusions, table_of
from skeinformer import build, cluster_attention
from skeinformer.attention import METHODS, ClusterNoise
from skeinformer.cli.records import Record, read
from skeinformer.noise import LAYERS
from tests.helpers import generator, random_mask, tensors
from tests.lra.tiny import write_tiny

RUN: Record = {"kind": "limits", "task": "text", "steps": 2, "accuracy": 0.5, "second_half_loss": 1.0}
N, D = 60, 6


def test_differences_are_paired_by_seed() -> None:
    records: list[Record] = [
        {**RUN, "arm": arm, "d": d, "seed": seed, "second_half_loss": loss}
        for arm, d, offset in (("softmax", None, 0.0), ("cluster", 16, 0.1))
        for seed, loss in ((0, 1 + offset), (1, 5 + offset), (2, 3 + offset))
        if (arm, seed) != ("cluster", 2)
    ]
    (found,) = differences(records).values()
    cluster = found["cluster", 16]
    assert cluster.seeds == 2
    assert cluster.loss is not None
    assert cluster.loss.mean == pytest.approx(0.1)
    assert cluster.loss.half == pytest.approx(0, abs=1e-6)
    (some,) = differences(records, seeds=(1,)).values()
    assert some["cluster", 16].loss == (pytest.approx(0.1), None)


def test_another_arm_is_compared_with_at_the_same_budget() -> None:
    records: list[Record] = [
        {**RUN, "arm": arm, "d": d, "seed": 0, "accuracy": accuracy}
        for arm, d, accuracy in (("cluster", 16, 0.5), ("cluster", 64, 0.625), ("other", 16, 0.75), ("other", 64, 0.75))
    ]
    (found,) = differences(records, "cluster").values()
    assert {arm: row.accuracy.mean for arm, row in found.items()} == {
        ("cluster", 16): 0.5,
        ("cluster", 64): 0.625,
        ("other", 16): 0.25,
        ("other", 64): 0.125,
    }
    assert differences(records)["Text from scratch, 2 steps"] == {}  # exact attention was not run


def test_the_test_loss_is_shown_where_both_arms_have_it() -> None:
    records: list[Record] = [
        {**RUN, "arm": "softmax", "d": None, "seed": 0, "test_loss": 2.0},
        {**RUN, "arm": "softmax", "d": None, "seed": 1},  # from before it was kept
        {**RUN, "arm": "cluster", "d": 16, "seed": 0, "test_loss": 2.5},
        {**RUN, "arm": "cluster", "d": 64, "seed": 1, "test_loss": 2.5},
    ]
    (found,) = differences(records).values()
    head, rows = table_of(found)
    assert head[-1] == "test loss"
    assert [row[-1] for row in rows] == ["", "+0.500", ""]
    (without,) = differences([record for record in records if "test_loss" not in record]).values()
    assert table_of(without)[0][-1] == "accuracy, %"


def test_runs_of_the_long_range_arena_are_arms() -> None:
    records: list[Record] = []
    for method, offset, overrides in (("softmax", 0.0, ""), ("cluster", 0.25, ""), ("cluster", 9.0, "steps=5")):
        run: Record = {"recipe": "cpu", "task": "listops", "method": method, "options": "", "seed": 0}
        run["overrides"] = overrides
        records += [{"kind": "lra_check", **run, "step": step, "loss": 8.0 / step + offset} for step in (1, 4)]
        records.append({"kind": "lra_run", **run, "steps": 600, "budget": 32, "test_accuracy": 0.3})
    (found,) = differences(records).values()
    assert found["softmax", None].loss == (2, None)
    assert found["cluster", 32].loss == (0.25, None)
    with pytest.raises(ValueError, match="has no checks"):
        differences([record for record in records if record["kind"] == "lra_run"])


def test_arms_differ_by_what_they_are_and_not_by_the_order_of_their_options() -> None:
    arms = ("softmax", "mixed:dq=exact,dk=exact", "mixed:dk=exact,dq=exact")
    (found,) = differences([{**RUN, "arm": arm, "seed": 0, "d": 16} for arm in arms]).values()
    assert set(found) == {("softmax", None), ("mixed:dk=exact,dq=exact", 16)}  # exact attention has no budget
    run: Record = {"kind": "finetune", "n": 8, "steps": 2, "batch": 4, "test_examples": 3, "seed": 0, "options": ""}
    run |= {"second_half_loss": 1.0, "min_tokens": 5, "learning_rate": 1e-4, "model": "MiniLM", "text": "imdb.parquet"}
    run |= {"exact_test_accuracy": 0.75, "exact_test_loss": 0.5, "test_accuracy": 0.5, "test_loss": 1.0}
    tuned: list[Record] = [{**run, "method": "softmax"}, {**run, "method": "cluster", "budget": 16}]
    (found,) = differences(tuned).values()
    assert set(found) == {("softmax", None), ("cluster", 16), ("cluster, tested exact", 16)}
    assert len(differences([*tuned, *({**record, "learning_rate": 5e-5} for record in tuned)])) == 2


def test_v_mean_is_the_scale_and_some_intervals_exclude_0() -> None:
    records: list[Record] = [
        {**RUN, "arm": arm, "d": 16, "seed": seed, "second_half_loss": loss * (1 + 0.01 * seed)}
        | {"accuracy": 0.5 + off * seed}
        for arm, loss, off in (("softmax", 1.0, 0.0), ("cluster", 1.25, 0.1), ("vmean", 2.0, 0.2))
        for seed in range(3)
    ]
    (found,) = differences(records).values()
    assert set(found) == {("softmax", None), ("cluster", 16), ("vmean", None)}
    assert exclusions([found]).startswith("Of 2 intervals, 1 exclude 0")


def test_intervals_and_halves() -> None:
    assert t_interval([1.0, 3.0]) == pytest.approx((2 - 12.7062, 2 + 12.7062), rel=1e-5)
    assert t_interval([2.0, 2.0, 2.0]) == (2.0, 2.0)
    assert second_half([9, 9, 1, 3]) == 2


def test_arms_are_trained_once_and_shown(tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[tuple[Any, Any]] = []

    def train(options: Limits, cell: Record, folder: Path) -> list[Record]:
        trained.append((cell["arm"], cell["d"]))
        checks: list[Record] = [{"kind": "lra_check", "loss": loss} for loss in (3.0, 1.0)]
        run = {"kind": "lra_run", "steps": 2, "test_accuracy": 0.5, "test_loss": 1.0, "cpu_seconds": 1.0}
        return [*checks, run]  # type: ignore[list-item]

    monkeypatch.setattr(limits, "train", train)
    page = tmp_path / "page.md"
    page.write_text("<!-- limits -->\nold\n<!-- end -->\n")
    arms = ("softmax", "mixed:output=exact")
    options = Limits(arms=arms, data=tmp_path / "text", seeds=(0,), steps=2, out=tmp_path / "runs", page=page)
    for _ in range(2):
        options.run(console)
        assert trained == [("softmax", None), ("mixed:output=exact", 16)]
    assert [record["second_half_loss"] for record in read(tmp_path / "runs" / "records.jsonl")] == [1.0, 1.0]
    assert "Text from scratch, 2 steps:\n\n| arm | d | seeds | training loss |" in page.read_text()
    replace(options, steps=3, page=None).run(console)  # another number of steps is another run
    assert len(trained) == 4


@pytest.mark.slow
def test_the_command_of_lra_trains_an_arm_of_this_study(tmp_path: Path) -> None:
    store = write_tiny(tmp_path / "text", "text", sizes={"train": 16, "valid": 4, "test": 4})
    options = Limits(data=store, steps=2, batch=2, max_len=16)
    cell: Record = {"task": "text", "arm": "mixed:output=exact", "d": 4, "seed": 0}
    records = limits.train(options, cell, tmp_path / "run")
    assert [(r["kind"], r["method"], r["options"], r["steps"]) for r in records[-1:]] == [
        ("lra_run", "mixed", "output=exact", 2)
    ]


def test_nothing_to_compare_is_an_error_and_the_page_stays(tmp_path: Path, console: Console) -> None:
    with pytest.raises(ValueError, match="give --records"):
        Limits().run(console)
    records, page = tmp_path / "records.jsonl", tmp_path / "page.md"
    records.write_text(json.dumps({**RUN, "arm": "cluster", "d": 16, "seed": 0}) + "\n")
    page.write_text("<!-- limits -->\nold\n<!-- end -->\n")
    with pytest.raises(ValueError, match="no run of softmax shares task, shape and seed"):
        Limits(records=(records,), page=page).run(console)
    with pytest.raises(ValueError, match="over all seeds; leave out"):
        Limits(records=(records,), shown_seeds=(2,), page=page).run(console)
    assert "old" in page.read_text()


@pytest.mark.parametrize("output", ["exact", "sketch"])
@pytest.mark.parametrize("parts", [("exact",) * 3, ("sketch",) * 3, ("sketch", "exact", "sketch")])
def test_every_part_of_mixed_is_that_of_its_own_attention(output: str, parts: tuple[str, str, str]) -> None:
    add_methods()
    inputs, mask, source = tensors(2, 2, N), random_mask(2, N), generator(3)
    noise = ClusterNoise(*(torch.rand(*x.shape[:3], generator=source) for x in inputs[:2]))
    expected = {
        "exact": F.scaled_dot_product_attention(*inputs, attn_mask=mask[:, None, None, :]),
        "sketch": cluster_attention(*inputs, key_mask=mask, budget=D, noise=noise),
    }
    options = dict(zip(("dq", "dk", "dv"), parts, strict=True))
    attention = build("mixed", head_dim=inputs[0].shape[-1], budget=D, output=output, **options)
    result = attention(*inputs, key_mask=mask, noise=noise)
    torch.testing.assert_close(result, expected[output])
    up = torch.randn_like(result)
    gradients = {name: torch.autograd.grad(out, inputs, up) for name, out in expected.items()}
    for place, (ours, part) in enumerate(zip(torch.autograd.grad(result, inputs, up), parts, strict=True)):
        torch.testing.assert_close(ours, gradients[part][place])


def policy(layer: int = 0, **options: object) -> torch.nn.Module:
    add_methods()
    return build("policy", head_dim=4, seed=2 * LAYERS + layer, **{"budget": D, **options})


def cluster(budget: int = D) -> torch.nn.Module:
    return build("cluster", head_dim=4, seed=2 * LAYERS, budget=budget)


def call(module: torch.nn.Module, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The output with the draws of one seed."""
    output: Tensor = module(*inputs, generator=generator(5))
    return output


def test_policies_differ_from_the_cluster_sketch_in_what_they_say() -> None:
    inputs = tensors(2, 2, N)
    exact = F.scaled_dot_product_attention(*inputs)
    assert torch.equal(call(policy(), inputs), call(cluster(), inputs))
    torch.testing.assert_close(policy(1, exact_layer=1)(*inputs), exact)
    assert torch.equal(call(policy(0, exact_layer=1), inputs), call(cluster(), inputs))
    for options, expected in (({"exact_until": 2}, [0, 1, 2]), ({"exact_from": 3}, [3, 4])):
        found = [layer for layer in range(5) if torch.allclose(policy(layer, **options)(*inputs), exact, atol=1e-5)]
        assert found == expected
    assert torch.equal(policy(draws="fixed").train()(*inputs), cluster().eval()(*inputs))
    grown = policy(later=20, after=2)
    for _ in range(2):
        assert torch.equal(call(grown.train(), inputs), call(cluster(), inputs))
    assert torch.equal(call(grown.eval(), inputs), call(cluster(), inputs))  # evaluation is no step
    assert torch.equal(call(grown.train(), inputs), call(cluster(20), inputs))


def test_the_methods_are_added_once() -> None:
    assert not set(GRADIENT_METHODS) & set(METHODS)
    for _ in range(2):
        add_methods()
    assert set(GRADIENT_METHODS) <= set(METHODS)


def test_the_dense_form_of_the_ablations_is_the_library() -> None:
    q, k, v = (x.detach() for x in tensors(1, 2, 90, p=8, p_v=8, peak=2))
    noise = ClusterNoise(*(torch.rand(1, 2, 90, generator=generator(seed)) for seed in (1, 2)))
    ours = cluster_attention(q, k, v, budget=6, num_pilots=5, noise=noise)
    flat = ClusterNoise(*(x[0] for x in noise))
    torch.testing.assert_close(variant(q[0], k[0], v[0], flat, d=6, num_pilots=5)[None], ours)
    plain = variant(q[0], k[0], v[0], flat, d=8, num_pilots=5)
    for name, change in CHANGES.items():
        changed = variant(q[0], k[0], v[0], flat, d=8, num_pilots=5, **change)
        assert changed.isfinite().all()
        assert torch.allclose(changed, plain) == (not change), name
    text = table({"a": {"x": 0.5, "y": 1.0}, "b": {"x": 2.0, "y": 4.0}})
    assert text.splitlines()[2:] == ["| x | 0.500 | 2.000 | 1.000 |", "| y | 1.000 | 4.000 | 2.000 |"]
