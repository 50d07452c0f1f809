"""The most memory that a call holds."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch.autograd.profiler import profile


def peak_memory(fn: Callable[[], object], device: torch.device | str = "cpu") -> int:
    """The most bytes of tensors that `fn` holds at one time on `device`, above what was there when it was called.

    On CUDA the allocator counts. On a CPU the events of torch's allocator are summed in the order of time: results,
    temporaries, and scratch space that kernels take from that allocator. What libraries below torch take from the
    system is not seen (packed operands of a matrix product), nor is the release of what was there before. Calls `fn`
    once.
    """
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        fn()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - int(before)
    with quiet_profiler(), profile(profile_memory=True) as profiler:
        result = fn()  # held, so that its release is not among the events
    del result
    events = profiler.kineto_results.events() if profiler.kineto_results else []
    allocations = [(int(event.start_ns()), int(event.nbytes())) for event in events if event.name() == "[memory]"]
    allocations.sort(key=lambda allocation: allocation[0])
    return max(accumulate((size for _, size in allocations), initial=0))


@contextmanager
def quiet_profiler() -> Iterator[None]:
    """Keep the profiler from writing a line to stderr at each start and stop."""
    name = "KINETO_LOG_LEVEL"
    before = os.environ.get(name)
    os.environ[name] = before or "9"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
