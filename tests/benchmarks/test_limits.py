"""What limits training: differences are paired by seed, arms are trained once, and the methods for it are right."""

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
from benchmarks.limits import Limits, differences
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
