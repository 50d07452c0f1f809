"""The largest micro-batch that fits into a memory budget, by measuring; the peak memory of a process."""

import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from lra.data.store import Meta
from skeinformer.cli.measure import peak_memory

UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str) -> int:
    """Return the number of bytes that "16GiB", "500 MB" or "1048576" name."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2] not in UNITS or not float(match[1]) > 0:
        raise ValueError(f"a size of memory is a number with one of {', '.join(filter(None, UNITS))}; got {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def largest_micro_batch(peak: Callable[[int], int], batch: int, budget: int, fixed: int = 0) -> int:
    """Return the largest number of examples, at most `batch`, with which `fixed + peak(number)` fits into `budget`.

    `peak` measures bytes. The search doubles the number until it does not fit, then bisects.
    """
    fits, too_large, trial = 0, batch + 1, 1
    while fits + 1 < too_large:
        if (used := fixed + peak(trial)) <= budget:
            fits = trial
        else:
            too_large = trial
        trial = min(2 * fits, (fits + too_large) // 2) if fits else 1
    if fits == 0:
        raise ValueError(
            f"one example needs {used / 2**20:,.0f} MiB, more than the memory budget of {budget / 2**20:,.0f} MiB"
        )
    return fits


def step_peak(model: nn.Module, meta: Meta, examples: int, length: int, device: torch.device) -> int:
    """Return the most bytes that a forward and backward pass hold at a time, on random tokens of full length."""
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
    """Return the most bytes so far: on CUDA of tensors, as the allocator counts them; else resident, of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    status = Path("/proc/self/status")
    if status.exists():  # what getrusage has there may be the peak of the process that started this one
        (peak,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 2**10
    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
