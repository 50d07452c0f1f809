"""Time of a part of a run: wall time, processor time, and apart from both the time in which torch compiles."""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass


@dataclass
class Spent:
    """Seconds; the first two fields are without compilation."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    compile_seconds: float = 0.0


@contextmanager
def timed(*, compiled: bool = False) -> Iterator[Spent]:
    """Measure the time within the block; the fields are set when it ends.

    With `compiled`, the time of torch.compile is counted apart: it compiles in the middle of training, at the first
    forward pass, at the first backward pass, and again where a shape is new.
    """
    spent, compilation = Spent(), Spent()
    with _compilation(compilation) if compiled else nullcontext():
        wall, processor = time.perf_counter(), time.process_time()
        yield spent
        spent.seconds = time.perf_counter() - wall - compilation.seconds
        spent.cpu_seconds = time.process_time() - processor - compilation.cpu_seconds
        spent.compile_seconds = compilation.seconds


@contextmanager
def _compilation(total: Spent) -> Iterator[None]:
    """Add the time between the beginning and the end of each compilation to `total`."""
    from torch._dynamo.callback import callback_handler

    began = (0.0, 0.0)

    def start(*_: object) -> None:
        nonlocal began
        began = time.perf_counter(), time.process_time()

    def end(*_: object) -> None:
        total.seconds += time.perf_counter() - began[0]
        total.cpu_seconds += time.process_time() - began[1]

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        with suppress(ValueError):  # torch._dynamo.reset removes them
            callback_handler.remove_start_callback(start)
            callback_handler.remove_end_callback(end)
