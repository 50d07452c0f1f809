"""Processes of this machine that form a group of torch.distributed, and measure together what they are told to."""

import multiprocessing
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from skeinformer.lab.threads import use_threads

OnMessage = Callable[[str], None]
"""Told what the first process does."""
ENDED_WITHIN = 5.0  # seconds that a process may take to end by itself


@contextmanager
def started(ranks: int, threads: int) -> Iterator["Pool"]:
    """So many processes, a gloo group, with so many threads each; they end with the block, or with this process."""
    with tempfile.TemporaryDirectory() as folder:
        pool = Pool(ranks, threads, Path(folder) / "store")
        try:
            yield pool
        finally:
            pool.stop()


class Pool:
    """`run(function, *arguments)` calls `function(tell, *arguments)` in all processes and returns all results."""

    def __init__(self, ranks: int, threads: int, store: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["skeinformer.lab.measure.processes"])
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, rank, ranks, threads, str(store)), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(
        self, function: Callable[..., Any], *arguments: Any, on_message: OnMessage = lambda text: None
    ) -> list[Any]:
        """What the processes return, in the order of ranks. One that fails or dies is a ChildProcessError that says so.

        The others may then wait for it: the pool is of no use any more.
        """
        for rank, pipe in enumerate(self.pipes):
            try:
                pipe.send((function, arguments))
            except OSError:
                self._fail(rank)
        results: dict[int, Any] = {}
        while len(results) < len(self.pipes):
            waiting = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in results}
            ready = wait(list(waiting))
            for pipe in (pipe for pipe in waiting if pipe in ready):
                rank = waiting[pipe]
                try:
                    kind, said = pipe.recv()
                except (EOFError, OSError):
                    self._fail(rank)
                if kind == "error":
                    raise ChildProcessError(f"process {rank} of {len(self.pipes)} raised {said}")
                if kind == "result":
                    results[rank] = said
                elif rank == 0:
                    on_message(said)
        return [results[rank] for rank in range(len(self.pipes))]

    def _fail(self, rank: int) -> NoReturn:
        self.processes[rank].join(ENDED_WITHIN)
        status = self.processes[rank].exitcode
        how = f"ended with status {status}"
        if status is not None and status < 0:
            how = f"was ended by {signal.Signals(-status).name}"
            how += "; the system does this when memory runs out" if -status == signal.SIGKILL else ""
        raise ChildProcessError(f"process {rank} of {len(self.pipes)} {how}")

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # a process ends where nothing can come
        for process in self.processes:
            process.join(ENDED_WITHIN)
            if process.is_alive():
                process.kill()
                process.join()


def _work(pipe: Connection, rank: int, ranks: int, threads: int, store: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, which ends it
    try:
        use_threads(threads)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
        while True:
            function, arguments = pipe.recv()
            pipe.send(("result", function(lambda text: pipe.send(("message", text)), *arguments)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
