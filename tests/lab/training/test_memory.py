"""Sizes of memory are read, and the largest micro-batch is found with few measurements."""

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from skeinformer.lab.lra.store import Meta
from skeinformer.lab.training.memory import (
    keep_freed_memory,
    largest_micro_batch,
    parse_bytes,
    process_peak,
    step_peak,
)
from skeinformer.lab.training.model import Classifier, ModelConfig

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GiB", 16 * 2**30), ("500 MB", 500 * 10**6), ("1.5 KiB", 1536), ("7", 7), (" 2TiB ", 2**41)],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "0", "16 gigs", "1e9", "nan"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a size of memory is a number with one of"):
        parse_bytes(text)


@given(
    batch=st.integers(1, 600),
    fixed=st.integers(0, 1000),
    base=st.integers(0, 500),
    each=st.integers(1, 90),
    bend=st.floats(0.5, 1.5),
    budget=st.integers(1, 100_000),
)
@example(batch=65, fixed=0, base=8, each=1, bend=0.5, budget=13)  # predictions crept up by one
def test_the_largest_that_fits_is_found(batch: int, fixed: int, base: int, each: int, bend: float, budget: int) -> None:
    tried = []

    def peak(examples: int) -> int:
        tried.append(examples)
        return base + int(each * examples**bend)

    fitting = [size for size in range(1, batch + 1) if fixed + base + int(each * size**bend) <= budget]
    if not fitting:
        with pytest.raises(ValueError, match=r"one example needs .* MiB, more than the memory budget"):
            largest_micro_batch(peak, batch, budget, fixed)
        return
    assert largest_micro_batch(peak, batch, budget, fixed) == max(fitting)
    assert all(size <= 2 * max(fitting) for size in tried)  # never far above what fits
    assert len(set(tried)) == len(tried) <= 25


def test_a_step_is_measured_and_leaves_no_gradient() -> None:
    meta = Meta(1, "text", "test", vocab_size=16, num_classes=2, sequences=1, max_len=64)
    model = Classifier(ModelConfig(vocab_size=16, num_classes=2, max_len=64, method="softmax"))
    one, four = (step_peak(model, meta, examples, 64, torch.device("cpu")) for examples in (1, 4))
    assert one < four <= 4 * one
    assert all(parameter.grad is None for parameter in model.parameters())
    assert process_peak(torch.device("cpu")) > 2**20


def test_freed_memory_is_kept_unless_the_user_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    libc = SimpleNamespace(mallopt=lambda option, value: asked.append((option, value)) or 1)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: libc)
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    assert keep_freed_memory()
    assert [option for option, _ in asked] == [-3, -1]
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "1000")
    assert not keep_freed_memory()
    assert len(asked) == 2
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())  # another libc
    assert not keep_freed_memory()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel does not say it")
def test_the_peak_is_that_of_the_process_and_not_of_its_parent() -> None:
    program = """
import torch
from skeinformer.lab.training.memory import process_peak
print(process_peak(torch.device("cpu")))
"""
    held = torch.ones(2**28)  # 1 GiB, which a fork hands on
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(result.stdout) < held.numel() * 4
