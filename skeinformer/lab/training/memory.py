"""The largest micro-batch that fits into a memory budget, by measuring; the peak of a process; what it keeps."""

import ctypes
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from skeinformer.lab.lra.store import Meta
from skeinformer.lab.measure.memory import peak_memory

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
KEPT = 32 * 2**20  # bytes: the greatest tensor that is kept; greater ones would leave holes
PREDICTIONS = 3  # that may fail before the largest micro-batch is found by bisection


def keep_freed_memory() -> bool:
    """Have glibc keep what is freed for the next step, which else faults in every page again. Is it so now?

    A step takes and frees hundreds of tensors of megabytes. No number changes. Nothing happens with another libc, or
    where the environment has settings of malloc.
    """
    set_already = any(name.startswith("MALLOC_") for name in os.environ) or "GLIBC_TUNABLES" in os.environ
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is None or set_already:
        return False
    return bool(mallopt(M_MMAP_THRESHOLD, KEPT) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def parse_bytes(text: str) -> int:
    """The number of bytes that "16GiB", "500 MB" or "1048576" name."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS or not float(match[1]) > 0:
        raise ValueError(f"a size of memory is a number with one of {', '.join(filter(None, UNITS))}; got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def largest_micro_batch(peak: Callable[[int], int], batch: int, budget: int, fixed: int = 0) -> int:
    """The largest number of examples, at most `batch`, with which `fixed + peak(number)` bytes fit into `budget`.

    `peak` measures. Most of a peak grows with the number, so one measurement predicts the next number to try; none is
    more than twice what is known to fit. Where predictions have failed to halve what is left, bisection goes on.
    """
    fits, too_large, trial, used, failed = 0, batch + 1, 1, 0, 0
    while fits + 1 < too_large:
        left, doubled = too_large - fits, trial in (1, 2 * fits)
        used = fixed + peak(trial)
        if used <= budget:
            fits = trial
        else:
            too_large = trial
        failed += not doubled and 2 * (too_large - fits) > left + 1
        predicted = trial * (budget - fixed) // max(used - fixed, 1)
        if failed > PREDICTIONS or not fits < predicted < too_large:
            predicted = (fits + too_large) // 2
        trial = min(predicted, 2 * fits)
    if fits == 0:
        raise ValueError(
            f"one example needs {used / 2**20:,.0f} MiB, more than the memory budget of {budget / 2**20:,.0f} MiB"
        )
    return fits


def step_peak(model: nn.Module, meta: Meta, examples: int, length: int, device: torch.device) -> int:
    """The most bytes of tensors that a forward and backward pass hold, on random tokens of full length."""
    tokens = torch.randint(meta.vocab_size, (examples, length), device=device)
    mask = torch.ones(examples, length, dtype=torch.bool, device=device)

    def run() -> None:
        logits = model(*(tokens,) * meta.sequences, *(mask,) * meta.sequences)
        torch.autograd.backward(logits.float().logsumexp(-1).sum())

    try:
        return peak_memory(run, device)
    except torch.cuda.OutOfMemoryError:
        return 1 << 62  # more than there is
    finally:
        model.zero_grad(set_to_none=True)


def process_peak(device: torch.device) -> int:
    """The most bytes so far: on CUDA of tensors, as the allocator counts them; else resident, of the whole process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage has there may be the peak of the process that started this one
        (peak,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 2**10
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
