"""The memory of a call is what it holds at one time."""

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from skeinformer.lab.measure.memory import peak_memory

MIB = 2**20


def floats(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB // 4)


def test_peak_memory_counts_what_is_held_at_one_time() -> None:
    def held_together() -> torch.Tensor:
        first = floats(8)
        second = floats(4)
        del first
        third = floats(2)
        return third + second[: third.numel()]

    assert peak_memory(held_together) == pytest.approx(12 * MIB, rel=0.05)


def test_peak_memory_counts_temporaries_that_are_freed_inside() -> None:
    x = torch.rand(MIB)  # 4 MiB
    # x + 1 and its square are 4 MiB each and live together; the sum is one number
    assert peak_memory(lambda: (x + 1).square().sum()) == pytest.approx(8 * MIB, rel=0.05)


def test_peak_memory_leaves_out_what_was_there_before() -> None:
    x = floats(16)
    assert peak_memory(lambda: x.zero_()) < 0.05 * MIB


def test_peak_memory_of_attention_with_and_without_the_matrix() -> None:
    n, p = 1024, 32
    q = torch.rand(1, 2, n, p)
    matrix, output = 2 * n * n * 4, 2 * n * p * 4
    # the scores and their softmax live together
    assert peak_memory(lambda: (q @ q.mT).softmax(-1) @ q) == pytest.approx(2 * matrix, rel=0.05)
    fused = peak_memory(lambda: F.scaled_dot_product_attention(q, q, q))
    assert output < fused < matrix / 2  # the kernel's scratch is seen, too


def test_peak_memory_of_a_backward_pass_sees_other_threads() -> None:
    x: Any = torch.rand(MIB, requires_grad=True)
    # exp keeps its result for the gradient: result, gradient of the sum (expanded, no memory), gradient of x
    assert peak_memory(lambda: x.exp().sum().backward()) == pytest.approx(8 * MIB, rel=0.05)


def test_peak_memory_passes_errors_on_and_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    def fails() -> None:
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        peak_memory(fails)
    peak_memory(lambda: floats(1))
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == ""
