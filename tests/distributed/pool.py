"""Real processes that talk over gloo, started once: four of them, of which the first 1, 2, 3 or 4 form a group.

They are forked from a process that has imported torch and nothing else, so that starting all of them takes as long as
one import.
"""

import multiprocessing
import traceback
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLD = 4
TIMEOUT = 60  # seconds: nothing here takes as long, and a test that hangs must end


def context() -> Any:
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["torch.fx.experimental.symbolic_shapes", "tests.distributed.models"])
    return forkserver


class Pool:
    """`run("case", world, ...)` calls `cases.case(group, ...)` on the first `world` ranks and returns all results.

    of: another module of this folder than `cases`.
    """

    def __init__(self, folder: Path, world: int = WORLD, timeout: float = TIMEOUT) -> None:
        forkserver, self.pipes, self.processes = context(), [], []
        for rank in range(world):
            ours, theirs = forkserver.Pipe()
            process = forkserver.Process(
                target=work, args=(theirs, rank, world, str(folder / "store"), timeout), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def start(self, case: str, world: int, *arguments: Any, of: str = "cases", **options: Any) -> None:
        for rank in range(world):
            self.pipes[rank].send((of, case, world, arguments, options))

    def results(self, world: int) -> list[Any]:
        """What each rank returns: a result, or the exception that it raised."""
        return [self.pipes[rank].recv() if self.pipes[rank].poll(TIMEOUT) else TimeoutError() for rank in range(world)]

    def run(self, case: str, world: int, *arguments: Any, of: str = "cases", **options: Any) -> list[Any]:
        self.start(case, world, *arguments, of=of, **options)
        results = self.results(world)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def stop(self) -> None:
        for pipe in self.pipes:
            pipe.close()  # a worker ends where nothing can come
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def work(pipe: Connection, rank: int, world: int, store: str, timeout: float) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    groups = {size: dist.new_group(list(range(size)), timeout=limit) for size in range(1, world + 1)}
    while True:
        try:
            of, case, size, arguments, options = pipe.recv()
        except (EOFError, OSError):
            return
        torch.manual_seed(0)
        try:
            result: Any = getattr(import_module(f"tests.distributed.{of}"), case)(groups[size], *arguments, **options)
        except Exception as error:
            error.add_note(traceback.format_exc())
            result = error
        pipe.send(result)
