"""The measuring core: order and number of calls, what a call holds, errors, and multiply-adds."""

import math
import os
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from skeinformer.attention import METHODS
from skeinformer.cli import measure
from skeinformer.cli.flops import attention_backward_flops, attention_flops, count_multiply_adds, flop_counter
from skeinformer.cli.measure import (
    Sizes,
    action,
    busy_machine,
    peak_memory,
    random_inputs,
    relative_error,
    spectral_error,
    threads,
    time_fields,
    timed_rounds,
)
from skeinformer.cli.specs import MethodSpec, parse

MIB = 2**20


def test_calls_take_turns_and_short_ones_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = iter(range(10**6))
    monkeypatch.setattr(measure, "SHORTEST", 3.0)
    monkeypatch.setattr("skeinformer.comparison.measure.time.perf_counter", lambda: float(next(clock)))
    runs = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = timed_rounds(runs, 3, setup={"b": lambda: calls.append("setup")})
    first = ["a", "setup", "b", "c"]
    rounds = ["aaa", "setup", "bbb", "ccc", "setup", "bbb", "ccc", "aaa", "ccc", "aaa", "setup", "bbb"]
    expected = [call for each in rounds for call in ([each] if each == "setup" else each)]
    assert calls == first + expected
    assert seconds == {name: [1 / 3] * 3 for name in "abc"}  # each timing lasts a tick


def test_processes_may_agree_on_how_often() -> None:
    counts = {"a": 0}

    def run() -> None:
        counts["a"] += 1

    timed_rounds({"a": run}, 2, agree=lambda seconds: {"a": measure.SHORTEST / 5})
    assert counts["a"] == 1 + 2 * 5


def test_ratios_are_of_the_same_round() -> None:
    fields = time_fields([1.0, 2.0, 4.0], [2.0, 4.0, 8.0], [1.0, 2.0, 4.0])
    assert (fields["seconds"], fields["ratio"], fields["ratio_q25"]) == (2.0, 2.0, 2.0)


def test_actions_have_the_gradients_of_inputs_and_parameters() -> None:
    q, k, v = random_inputs(Sizes(6, 1, 2, 4))
    weight = torch.ones(1, requires_grad=True)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return weight * F.scaled_dot_product_attention(q, k, v)

    gradients = action(call, (q, k, v), "both", [weight])()
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape, weight.shape]  # type: ignore[attr-defined]
    assert not action(call, (q, k, v), "forward")().requires_grad  # type: ignore[attr-defined]


def test_a_block_has_its_threads_and_the_machine_is_busy_inside() -> None:
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with busy_machine(1):
        children = subprocess.run(
            ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True
        )
        assert "set_num_threads(1)" in children.stdout
    children = subprocess.run(["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="], capture_output=True, text=True)
    assert "set_num_threads(1)" not in children.stdout


def test_peak_memory_counts_what_is_held_at_one_time() -> None:
    def run() -> torch.Tensor:
        first, second = torch.empty(8 * MIB // 4), torch.empty(4 * MIB // 4)
        del first
        return torch.empty(2 * MIB // 4) + second[: 2 * MIB // 4]

    assert peak_memory(run) == pytest.approx(12 * MIB, rel=0.05)
    x = torch.rand(MIB, requires_grad=True)  # 4 MiB; exp keeps its result, and the gradient of x is as large
    assert peak_memory(lambda: x.exp().sum().backward()) == pytest.approx(8 * MIB, rel=0.05)  # type: ignore[no-untyped-call]


def test_errors_by_definition() -> None:
    exact, approx = torch.randn(2, 3, 20, 4, dtype=torch.float64), torch.randn(2, 3, 20, 4, dtype=torch.float64)
    mask = torch.arange(20).expand(2, 20) < torch.tensor([[20], [7]])
    for b, h in ((0, 1), (1, 2)):
        x, y = approx[b, h][mask[b]], exact[b, h][mask[b]]
        norm = torch.linalg.matrix_norm
        assert relative_error(approx, exact, mask)[b, h] == pytest.approx(float((x - y).norm() / y.norm()))
        assert spectral_error(approx, exact, mask)[b, h] == pytest.approx(float(norm(x - y, 2) / norm(y, 2)))
    zero = torch.zeros_like(exact)
    assert (relative_error(zero, zero) == 0).all()
    assert torch.isinf(relative_error(exact, zero)).all()


def total(run: Callable[[], object]) -> int:
    with flop_counter() as counter:
        run()
    return counter.get_total_flops()


@pytest.mark.parametrize("p_v", [4, 6])
def test_attention_is_counted_as_its_products(p_v: int) -> None:
    q, k, v = (torch.randn(2, 3, *shape, requires_grad=True) for shape in ((5, 4), (7, 4), (7, p_v)))
    with sdpa_kernel(SDPBackend.MATH):
        forward = total(lambda: F.scaled_dot_product_attention(q, k, v))
        output = F.scaled_dot_product_attention(q, k, v)
        backward = total(lambda: output.sum().backward())  # type: ignore[no-untyped-call]
    assert attention_flops(q.shape, k.shape, v.shape) == forward == 2 * 6 * 5 * 7 * (4 + p_v)
    scores = 2 * 6 * 5 * 7 * 4  # once more
    assert attention_backward_flops(output.shape, q.shape, k.shape, v.shape) == backward + scores


def test_the_fused_kernel_vectors_and_triangles_are_counted() -> None:
    q = torch.randn(2, 3, 5, 4, requires_grad=True)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert total(lambda: F.scaled_dot_product_attention(q, q, q)) == 2 * 6 * 5 * 5 * 8
    assert total(lambda: torch.ones(5, 7) @ torch.ones(7)) == 2 * 5 * 7
    lower, right = torch.rand(3, 5, 5).tril() + torch.eye(5), torch.randn(3, 5, 7)
    assert total(lambda: torch.linalg.solve_triangular(lower, right, upper=False)) == 3 * 5 * 5 * 7


@pytest.mark.parametrize("name", METHODS)
def test_counting_draws_no_numbers_and_counts_what_real_tensors_do(name: str) -> None:
    n, head_dim = 75, 8
    (spec,) = MethodSpec(name).at((16,))
    module = spec.build(head_dim, n).train()
    query, value = (torch.randn(1, 1, n, head_dim, requires_grad=True) for _ in range(2))

    def run() -> None:
        output = module(query, query, value)
        if output.requires_grad:
            output.sum().backward()

    real, state = total(run), torch.get_rng_state()
    assert 2 * sum(count_multiply_adds(spec, n, head_dim=head_dim, backward=True).values()) == real
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["cluster", "skeinformer"])
def test_the_sketches_are_linear(name: str) -> None:
    (spec,) = parse(name).at((64,))
    once, twice = (sum(count_multiply_adds(spec, n).values()) for n in (2**15, 2**16))
    assert twice <= 2.01 * once
    assert math.log2(sum(count_multiply_adds(MethodSpec("softmax"), 2**16).values()) / twice) > 5
