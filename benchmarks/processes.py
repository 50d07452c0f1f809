"""Time and memory of attention whose tokens are divided among processes, and of exact attention over gathered keys.

    python -m benchmarks.processes --processes 1 2 4 --lengths 16384

Real processes that talk over gloo, on this machine, each with its share of standard normal tokens. A round calls every
method once, all processes together; its time is that of the slowest process. Exact attention is what torch offers for
divided tokens in one line: an all-gather of K and V, with its gradient, and scaled_dot_product_attention.
"""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn import functional as F

from benchmarks.common import check_options, start
from skeinformer.attention.table import no_group
from skeinformer.cli.measure import (
    Action,
    Sizes,
    action,
    matmul_speed,
    peak_memory,
    quartile_fields,
    quartiles,
    random_inputs,
    ratio,
    timed_rounds,
)
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, Value, append, machine, now, read
from skeinformer.cli.specs import MethodSpec, parse_all
from skeinformer.cli.tables import Table, count, label, number, seconds, size, table_of
from skeinformer.distributed import watch

GATHERED, EXACT_LABEL = "all_gather_sdpa", "all-gather, SDPA"
BACKWARD = 2.5  # multiply-adds of exact attention's gradient, as a multiple of its own
SIZES = ("n", "batch", "heads", "head_dim", "budget", "dtype")
IDENTITY = ("kind", "method", "options", "processes", *SIZES, "threads", "mode")


@dataclass(frozen=True)
class Processes:
    """Time attention over tokens that are divided among processes, beside exact attention over gathered keys."""

    processes: tuple[int, ...] = (1, 2, 4)
    """Numbers of processes."""
    lengths: tuple[int, ...] = (16384,)
    """Tokens of a process's share, and then of the whole sequence."""
    methods: tuple[str, ...] = ("skeinformer", "cluster")
    """Methods, with options as in skeinformer:num_pilots=32."""
    budgets: tuple[int, ...] = (256,)
    """Sketch sizes d."""
    modes: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    """Passes to time."""
    batch: int = 1
    """Sequences in a batch."""
    heads: int = 2
    """Attention heads."""
    head_dim: int = 32
    """The head width p."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Precision of queries, keys and values."""
    rounds: int = 7
    """Rounds in which each method is timed."""
    threads: int = 1
    """Threads of each process."""
    max_seconds: float = 10.0
    """Leave out exact attention where one call is expected to take longer."""
    seed: int = 0
    """Seed of the inputs."""
    records: Path = Path("processes/records.jsonl")
    """File that records are appended to."""

    def check(self) -> None:
        """Raise a ValueError that names the first wrong option."""
        names = ("processes", "lengths", "budgets", "batch", "heads", "head_dim", "rounds", "threads")
        check_options(self, dict.fromkeys(names, 1), ("processes", "lengths", "budgets", "modes"))
        least = math.lcm(*self.processes)
        for n in self.lengths:
            if n % least:
                raise ValueError(f"n = {n:,} is not a multiple of {least}, and all processes must have equal shares")

    def specs(self) -> list[MethodSpec]:
        """Return every method at every d; a ValueError names one that takes no group."""
        specs = [spec for method in parse_all(self.methods) for spec in method.at(self.budgets)]
        for spec in specs:
            if not spec.entry.sequence_parallel:
                raise ValueError(no_group(spec.method))
        return specs

    def run(self, console: Console | None = None) -> None:
        """Measure what is missing in the records file, and print a table."""
        console = console or Console(highlight=False)
        self.check()
        specs = self.specs()
        records = read(self.records, missing_ok=True)
        with show_steps(console) as steps:
            for record in process_records(self, specs, tuple(records), steps):
                append(self.records, record)
                records.append(record)
        process_table(records).print(console)


class Task(NamedTuple):
    """What all processes measure together."""

    sizes: Sizes  # n is that of all processes
    mode: str
    specs: tuple[MethodSpec, ...]
    exact: bool
    rounds: int
    seed: int


class Share(NamedTuple):
    """What one process measured of one method."""

    seconds: list[float]
    peak_bytes: int
    received_bytes: int


def process_records(
    options: Processes, specs: Sequence[MethodSpec], present: Sequence[Record], steps: Steps
) -> Iterator[Record]:
    """Yield records of kind "bench_processes": n tokens on each process, then n on all of them, for each length."""
    done, began = Ledger(IDENTITY, present), now()
    speed = 0.0
    for ranks in sorted(set(options.processes)):
        tasks = []
        for n, mode in product(
            dict.fromkeys(m for each in options.lengths for m in (each * ranks, each)), options.modes
        ):
            sizes = Sizes(n, options.batch, options.heads, options.head_dim, options.dtype)
            task = Task(sizes, mode, tuple(specs), True, options.rounds, options.seed)
            if all(settings_of(task, spec, ranks, options.threads) in done for spec in (None, *specs)):
                continue
            speed = speed or matmul_speed(options.dtype)
            crowded = max(1, ranks * options.threads / (os.cpu_count() or 1))
            expected = exact_flops(task, ranks) / speed * crowded
            if expected > options.max_seconds:
                steps.print(f"Left out: {EXACT_LABEL}, n = {n:,}, {mode}: a call would take about {expected:.3g} s")
                task = task._replace(exact=False)
            tasks.append(task)
        if tasks:
            steps(f"{several(ranks)}: {len(tasks)} sizes and modes")
            of_rank = run_ranks(ranks, options.threads, measure_shares, tasks)
            for task, *shares in zip(tasks, *of_rank, strict=True):
                for record in task_records(task, shares, options.threads):
                    if record not in done:
                        yield {**machine(), **record, "seed": options.seed, "started": began}


def several(ranks: int) -> str:
    """Say "1 process", "2 processes"."""
    return f"{ranks} process{'es' * (ranks > 1)}"


def microseconds(value: Value) -> str:
    """Format the time of a token."""
    return number(value, " us", 1e6)


def exact_flops(task: Task, ranks: int) -> float:
    """Estimate the FLOPs of exact attention in one process."""
    n, batch, heads, width = task.sizes[:4]
    return 4.0 * batch * heads * (n / ranks) * n * width * (1 if task.mode == "forward" else 1 + BACKWARD)


def task_records(task: Task, shares: Sequence[dict[str, Share]], threads: int) -> Iterator[Record]:
    """Yield the records of a task; the time of a round is that of the slowest process."""
    ranks = len(shares)
    exact: float | list[float] | None = None
    for spec in ([None] if task.exact else []) + list(task.specs):
        name = GATHERED if spec is None else str(spec)
        of_rank = [share[name] for share in shares]
        times = [max(each) for each in zip(*(share.seconds for share in of_rank), strict=True)]
        exact = times if spec is None else exact
        found = quartiles(times)
        yield {
            **settings_of(task, spec, ranks, threads),
            "n_each": task.sizes.n // ranks,
            **quartile_fields("seconds", found),
            **quartile_fields("ratio", ratio(exact, times) if isinstance(exact, list) else None),
            "seconds_per_token": found.median / (task.sizes.n * task.sizes.batch),
            "peak_bytes": max(share.peak_bytes for share in of_rank),
            "received_bytes": max(share.received_bytes for share in of_rank),
            "rounds": task.rounds,
        }


def run_ranks(ranks: int, threads: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function in so many processes, which form a gloo group, and return what each of them returned."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            start_processes(_rank, (ranks, threads, folder, function, arguments), nprocs=ranks)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            raise ChildProcessError(str(error).strip().splitlines()[-1]) from error
        return [torch.load(Path(folder) / f"rank-{rank}", weights_only=False) for rank in range(ranks)]


def _rank(
    rank: int, ranks: int, threads: int, folder: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    torch.save(function(*arguments), Path(folder) / f"rank-{rank}")
    dist.destroy_process_group()


def measure_shares(tasks: Sequence[Task]) -> list[dict[str, Share]]:
    """Measure all tasks in turn in this process."""
    return [measure_share(task) for task in tasks]


def measure_share(task: Task) -> dict[str, Share]:
    """Measure this rank's times, memory and traffic of every method."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    inputs = random_inputs(task.sizes._replace(n=task.sizes.n // ranks), task.seed + rank, task.mode == "both")
    runs: dict[str, Action] = {}
    received: dict[str, int] = {}
    if task.exact:
        runs[GATHERED] = action(exact_over_gathered, inputs, task.mode)
        sent = sum(x.numel() * x.element_size() for x in inputs[1:])
        # gradients are summed where they go
        received[GATHERED] = (ranks - 1) * sent * (2 if task.mode == "both" else 1)
    for spec in task.specs:
        module = spec.build(task.sizes.head_dim, None, group=dist.group.WORLD).train(task.mode == "both")
        runs[str(spec)] = action(module, inputs, task.mode, list(module.parameters()))
    peaks = {}
    for name, run in runs.items():
        dist.barrier()
        with watch() as exchanges:
            peaks[name] = peak_memory(run)
        received.setdefault(name, sum(exchange.received for exchange in exchanges))
    times = timed_rounds(runs, task.rounds, setup=dict.fromkeys(runs, dist.barrier), agree=_slowest)
    return {name: Share(times[name], peaks[name], received[name]) for name in runs}


def exact_over_gathered(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute exact attention of this rank's queries over the keys of all ranks: (b, h, n / R, p) each."""
    import torch.distributed._functional_collectives as collectives

    name = next(x for x in ("all_gather_single_autograd", "all_gather_tensor_autograd") if hasattr(collectives, x))
    keys, values = (getattr(collectives, name)(x, gather_dim=2, group=dist.group.WORLD) for x in (key, value))
    return F.scaled_dot_product_attention(query, keys, values)


def _slowest(times: dict[str, float]) -> dict[str, float]:
    """Return the times of the slowest rank on all ranks, so that they repeat a call equally often."""
    slowest = torch.tensor(list(times.values()), dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(times, slowest.tolist(), strict=True))


def settings_of(task: Task, spec: MethodSpec | None, ranks: int, threads: int) -> Record:
    """Return what distinguishes one record from others; without a method, of exact attention."""
    exact: Record = {"method": GATHERED, "options": "", "label": EXACT_LABEL, "budget": None}
    fields = exact if spec is None else spec.fields
    common: Record = {"kind": "bench_processes", "processes": ranks, **task.sizes.fields}
    return {**common, **fields, "threads": threads, "mode": task.mode}


def process_table(records: Sequence[Record]) -> Table:
    """Make a table with a row for each record."""
    columns: dict[str, Callable[[Record], str]] = {
        "method": label,
        "n in all": lambda r: count(r.get("n")),
        "time": lambda r: seconds(r.get("seconds")),
        "mode": lambda r: str(r.get("mode")),
        "processes": lambda r: count(r.get("processes")),
        "n each": lambda r: count(r.get("n_each")),
        "per token": lambda r: microseconds(r.get("seconds_per_token")),
        "memory of one": lambda r: size(r.get("peak_bytes")),
        "received by one": lambda r: size(r.get("received_bytes")),
    }
    return table_of("", columns, [r for r in records if r.get("kind") == "bench_processes"])


if __name__ == "__main__":
    sys.exit(start(Processes))
