"""Work on indices by several processes, with results in the order of the indices."""

import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

from skeinformer.checks import check_count

T = TypeVar("T")
AHEAD = 4  # pieces of work per process that may be waiting or done, so that memory stays small


def in_order(
    make: Callable[[range], list[T]], count: int | None = None, *, workers: int = 1, piece: int = 32
) -> Generator[T, None, None]:
    """Yield what `make` gives for range(0, piece), range(piece, 2 piece), ..., one result after the other.

    `count` indices in all, without end if it is None. The results do not depend on `workers` if `make` depends on its
    indices only; it must be picklable (a function of a module, or a `functools.partial` of one). One worker is this
    process. Worker processes end with the iterator, with an error or interrupt, and when this process is killed. They
    import the main script, which must therefore work under `if __name__ == "__main__":`.
    """
    check_count("workers", workers)
    check_count("piece", piece)
    starts = itertools.count(0, piece) if count is None else range(0, count, piece)
    pieces = (range(start, start + piece if count is None else min(start + piece, count)) for start in starts)
    if workers == 1:
        for indices in pieces:
            yield from make(indices)
        return
    # not forked from here: this process may have threads, whose locks a fork would copy as they are
    method = "spawn" if sys.platform == "win32" else "forkserver"
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload([__name__])  # torch and numpy are imported once, not by each worker
    pool = ProcessPoolExecutor(workers, context, initializer=_end_with_parent)
    waiting: deque[Future[list[T]]] = deque()
    try:
        for indices in itertools.islice(pieces, AHEAD * workers):
            waiting.append(pool.submit(make, indices))
        while waiting:
            yield from waiting.popleft().result()
            for indices in itertools.islice(pieces, 1):
                waiting.append(pool.submit(make, indices))
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Let a worker leave an interrupt to its parent, and exit when the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
