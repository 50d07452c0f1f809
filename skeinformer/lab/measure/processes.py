"""Time and memory of attention whose tokens are divided among processes, beside exact attention over gathered keys.

Real processes that talk over gloo, on this machine, each with its share of standard normal tokens. A round calls every
method once, all processes together; its time is that of the slowest process. Exact attention is what torch offers for
divided tokens in one line: an all-gather of K and V, with its gradient, and scaled_dot_product_attention.
"""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.attention.table import no_group
from skeinformer.checks import check_choice, check_count, check_number
from skeinformer.comparison.measure import quartiles, ratio
from skeinformer.distributed import watch
from skeinformer.lab.contender import OFFERED, Contender, build_contender, has_budget
from skeinformer.lab.measure.memory import peak_memory
from skeinformer.lab.measure.pool import OnMessage, Pool, started
from skeinformer.lab.measure.speed import (
    DTYPES,
    IDENTITY,
    MODES,
    Action,
    InputSizes,
    both_run,
    forward_run,
    matmul_peak,
    quartile_fields,
    random_inputs,
    timed_rounds,
)
from skeinformer.lab.records import Ledger, Record, machine
from skeinformer.lab.work import OnSkip, OnStep, now, part_of, silent

GATHERED = "all_gather_sdpa"
EXACT_LABEL = "all-gather, SDPA"
BACKWARD = 2.5  # multiply-adds of exact attention's gradient, as a multiple of its own


class Task(NamedTuple):
    """What all processes measure together."""

    sizes: InputSizes  # n is that of all processes
    mode: str
    budget: int
    contenders: tuple[Contender, ...]
    exact: bool
    rounds: int
    seed: int


class OfProcess(NamedTuple):
    """Of one process."""

    seconds: list[float]
    peak_bytes: int
    received_bytes: int


def process_records(
    contenders: Sequence[Contender],
    processes: Sequence[int],
    lengths: Sequence[int],
    *,
    batch: int,
    heads: int,
    head_dim: int,
    budget: int,
    dtype: str = "float32",
    modes: Sequence[str] = MODES,
    rounds: int = 7,
    threads: int = 1,
    max_seconds: float = 10.0,
    seed: int = 0,
    known: Sequence[Record] = (),
    on_step: OnStep = silent,
    on_skip: OnSkip = lambda what, reason: None,
) -> Iterator[Record]:
    """Records of kind "bench_processes": for every length n in turn n tokens on each process, and n on all of them.

    What is in `known` is not measured again. Exact attention is left out where its FLOPs alone take longer than
    `max_seconds` at the speed of a matrix product, and `on_skip(what, reason)` told.
    """
    _check(contenders, processes, lengths, modes, rounds)
    for name, size in (("batch", batch), ("heads", heads), ("head_dim", head_dim), ("threads", threads)):
        check_count(name, size)
    check_choice("dtype", dtype, DTYPES)
    check_number("max_seconds", max_seconds, "positive")
    present, began = Ledger(IDENTITY, known), now()
    points = {
        ranks: list(dict.fromkeys(n for each in sorted(set(lengths)) for n in (each * ranks, each)))
        for ranks in sorted(set(processes))
    }
    all_tokens = len(modes) * sum(sum(each) for each in points.values())
    done, speed = 0.0, 0.0
    for ranks, totals in points.items():
        tasks = []
        for n, mode in product(totals, modes):
            task = Task(
                InputSizes(n, batch, heads, head_dim, dtype), mode, budget, tuple(contenders), True, rounds, seed
            )
            wanted = [_settings(task, contender, ranks, threads) for contender in (None, *contenders)]
            if any(settings not in present for settings in wanted):
                tasks.append(task)
            else:
                done += n / all_tokens
        if not tasks:
            continue
        speed = speed or matmul_peak(DTYPES[dtype])
        on_step(f"{several(ranks)}: starting", done)
        with started(ranks, threads) as pool:
            for task in tasks:
                place = f"{several(ranks)}, n = {task.sizes.n:,}, {task.mode}"
                step = part_of(on_step, place, done, task.sizes.n / all_tokens)
                expected = exact_flops(task, ranks) / speed * max(1, ranks * threads / (os.cpu_count() or 1))
                if expected > max_seconds:
                    reason = f"a call would take about {expected:.3g} s, more than max_seconds = {max_seconds:g}"
                    on_skip(f"{EXACT_LABEL}, {place}", reason)
                    task = task._replace(exact=False)
                for record in _records(task, ranks, threads, pool, step):
                    if record not in present:
                        yield {**machine(), **record, "seed": seed, "started": began}
                done += task.sizes.n / all_tokens


def several(ranks: int) -> str:
    """ "1 process", "2 processes"."""
    return f"{ranks} process{'es' * (ranks > 1)}"


def exact_flops(task: Task, ranks: int) -> float:
    """Of one process."""
    n, batch, heads, width = task.sizes[:4]
    return 4.0 * batch * heads * (n / ranks) * n * width * (1 if task.mode == "forward" else 1 + BACKWARD)


def measure_share(tell: OnMessage, task: Task) -> dict[str, OfProcess]:
    """In a process of the pool: this rank's times, memory and traffic of every contender."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    inputs = random_inputs(task.sizes._replace(n=task.sizes.n // ranks), task.seed + rank, task.mode == "both")
    runs: dict[str, Action] = {}
    received: dict[str, int] = {}
    if task.exact:
        runs[GATHERED] = _run(exact_over_gathered, inputs, task.mode)
        sent = sum(x.numel() * x.element_size() for x in inputs[1:])
        passes = 2 if task.mode == "both" else 1  # gradients are summed where they go
        received[GATHERED] = (ranks - 1) * sent * passes
    for contender in task.contenders:
        module = build_contender(
            contender, head_dim=task.sizes.head_dim, max_len=None, budget=task.budget, group=dist.group.WORLD
        )
        runs[contender.spec] = _run(module.train(task.mode == "both"), inputs, task.mode)
    peaks = {}
    for name, run in runs.items():
        tell(f"memory of {name}")
        dist.barrier()
        with watch() as exchanges:
            peaks[name] = peak_memory(run)
        received.setdefault(name, sum(exchange.received for exchange in exchanges))
    seconds = timed_rounds(
        runs,
        task.rounds,
        lambda number, _: tell(f"time, round {min(number + 1, task.rounds)} of {task.rounds}"),
        setup=dict.fromkeys(runs, dist.barrier),
        agree=_slowest,
    )
    return {name: OfProcess(seconds[name], peaks[name], received[name]) for name in runs}


def exact_over_gathered(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Exact attention of this rank's queries over the keys of all ranks: (b, h, n / R, p) each."""
    import torch.distributed._functional_collectives as collectives

    name = next(x for x in ("all_gather_single_autograd", "all_gather_tensor_autograd") if hasattr(collectives, x))
    keys, values = (getattr(collectives, name)(x, gather_dim=2, group=dist.group.WORLD) for x in (key, value))
    return F.scaled_dot_product_attention(query, keys, values)


def _run(call: Callable[..., Tensor], inputs: Sequence[Tensor], mode: str) -> Action:
    parameters = list(call.parameters()) if isinstance(call, nn.Module) else []
    return forward_run(call, inputs) if mode == "forward" else both_run(call, inputs, parameters)


def _slowest(seconds: dict[str, float]) -> dict[str, float]:
    """The times of the slowest rank, the same on all: they repeat a call equally often."""
    times = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return dict(zip(seconds, times.tolist(), strict=True))


def _records(task: Task, ranks: int, threads: int, pool: Pool, step: OnStep) -> Iterator[Record]:
    names = [*([GATHERED] if task.exact else []), *(contender.spec for contender in task.contenders)]
    steps, said = len(names) + task.rounds + 1, -1

    def on_message(detail: str) -> None:
        nonlocal said
        said += 1
        step(detail, said / steps)

    shares: list[dict[str, OfProcess]] = pool.run(measure_share, task, on_message=on_message)
    # the time of a round is that of the slowest rank
    times = {
        name: [max(each) for each in zip(*(share[name].seconds for share in shares), strict=True)] for name in names
    }
    for name, contender in zip(names, ([None] if task.exact else []) + list(task.contenders), strict=True):
        found = quartiles(times[name])
        yield {
            **_settings(task, contender, ranks, threads),
            "n_each": task.sizes.n // ranks,
            **quartile_fields("seconds", found),
            **quartile_fields("ratio", ratio(times[GATHERED], times[name]) if task.exact else None),
            "seconds_per_token": found.median / (task.sizes.n * task.sizes.batch),
            "peak_bytes": max(share[name].peak_bytes for share in shares),
            "received_bytes": max(share[name].received_bytes for share in shares),
            "rounds": task.rounds,
        }


def _settings(task: Task, contender: Contender | None, ranks: int, threads: int) -> Record:
    """What tells one record from others; without a contender, of exact attention."""
    return {
        "kind": "bench_processes",
        "method": GATHERED if contender is None else contender.method,
        "options": "" if contender is None else contender.options_text,
        "label": EXACT_LABEL if contender is None else contender.label,
        "processes": ranks,
        **task.sizes.fields,
        "budget": task.budget if contender is not None and has_budget(contender) else None,
        "threads": threads,
        "mode": task.mode,
    }


def _check(
    contenders: Sequence[Contender],
    processes: Sequence[int],
    lengths: Sequence[int],
    modes: Sequence[str],
    rounds: int,
) -> None:
    check_count("rounds", rounds)
    for name, values in (("processes", processes), ("lengths", lengths), ("modes", modes)):
        if not values:
            raise ValueError(f"{name} is empty; give at least one")
    for mode in modes:
        check_choice("mode", mode, MODES)
    for contender in contenders:
        if not OFFERED[contender.method].sequence_parallel:
            raise ValueError(no_group(contender.method, OFFERED))
    for ranks in processes:
        check_count("processes", ranks)
    for n in lengths:
        check_count("length", n)
        if n % math.lcm(*processes):
            raise ValueError(
                f"n = {n:,} is not a multiple of {math.lcm(*processes)}, and all of {', '.join(map(str, processes))} "
                "processes must have equal shares of it; give other --lengths"
            )
