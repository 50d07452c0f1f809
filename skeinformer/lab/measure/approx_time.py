"""Time, memory and FLOPs of the contenders of an approximation experiment, beside torch's own fused attention.

At each n and d all contenders take turns with `scaled_dot_product_attention` in float32, on the queries, keys and
values of the first weights, layer and trial: what slows the machine down slows all alike, and ratios are taken round by
round. A method that only takes shared queries and keys gets the queries as keys; that changes no size.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.comparison.measure import quartiles, ratio
from skeinformer.lab.contender import OFFERED
from skeinformer.lab.measure.approx import QKV, Case, Experiment, Projected, TextSource, cases, stream_seed
from skeinformer.lab.measure.flops import flop_counter
from skeinformer.lab.measure.memory import peak_memory
from skeinformer.lab.measure.speed import Action, both_run, forward_run, quartile_fields, timed_rounds
from skeinformer.lab.records import Ledger, Record, machine
from skeinformer.lab.work import OnStep, Work, now, silent

TIME_KEYS = ("model", "layer", "n", "method", "options", "budget", "batch", "threads", "device")
REFERENCE = "sdpa"
BOTH = 4.5  # a forward pass, and a forward and a backward pass, in forward passes


class Runs(NamedTuple):
    """A forward pass, and a forward and backward pass, as functions without arguments; every call draws anew."""

    forward: Action
    both: Action


def time_records(
    experiment: Experiment, source: TextSource, present: Iterable[Record] = (), on_step: OnStep = silent
) -> Iterator[Record]:
    """A Record of kind "approx_time" for each n, d and contender that `present` does not hold.

    A method that cannot take the input (a ValueError of its own) gives one of kind "approx_skipped".
    """
    weights, layer, rounds = experiment.weights[0], experiment.layers[0], experiment.time_rounds
    common: Record = {
        **experiment.common,
        "weights": weights,
        "layer": layer,
        "batch": 1,
        "rounds": rounds,
        "started": now(),
        **machine(),
    }
    times = (record for record in present if record.get("kind") == "approx_time" or record.get("part") == "time")
    done = Ledger(TIME_KEYS, times)
    groups: list[tuple[int, int | None, list[Case]]] = []
    for n in dict.fromkeys(experiment.lengths):
        left = [case for case in cases(experiment) if {**common, "n": n, **case.fields} not in done]
        sizes = list(dict.fromkeys(case.budget for case in left))
        # those without a budget run with the first d that there is
        first = next((d for d in sizes if d is not None), None)
        for d in sizes:
            if d is not None or first is None:
                together = [case for case in left if case.budget == d or (case.budget is None and d == first)]
                groups.append((n, d, together))
    total = sum((rounds + 2) * BOTH * (n * n + sum(case.cost(n) for case in left)) for n, _, left in groups)
    work = Work(total, on_step)
    for n, d, left in groups:
        qkv = source.qkv(source.states(0, n, [layer]), Projected(0, n, weights, layer), experiment.seed)
        shape: Record = {"n": n, "heads": qkv[0].shape[1], "head_dim": qkv[0].shape[3]}
        place = f"time at n = {n:,}" + (f", d = {d}" if d else "")
        for record in _time(left, qkv, rounds, stream_seed(experiment.seed, 0, "draws"), place, work):
            yield {"kind": "approx_time", **common, **shape, **record}


def _time(left: Sequence[Case], qkv: QKV, rounds: int, seed: int, place: str, work: Work) -> Iterator[Record]:
    n, device = qkv[0].shape[-2], qkv[0].device
    runs: dict[str, Runs] = {}
    rows: dict[str, Record] = {}
    for case in left:
        work.step(f"{place}: memory of {case}", 2 * BOTH * case.cost(n))
        try:
            run = passes_of(case, qkv, seed)
            with flop_counter() as counter:
                run.forward()
        except ValueError as error:
            yield {"kind": "approx_skipped", **case.fields, "part": "time", "reason": str(error)}
            continue
        runs[case.contender.spec] = run
        rows[case.contender.spec] = {
            **case.fields,
            "peak_bytes": peak_memory(run.forward, device),
            "both_peak_bytes": peak_memory(run.both, device),
            "flops": counter.get_total_flops(),
        }
    if not rows:
        return
    leaves = [x.clone().requires_grad_() for x in qkv]
    sdpa = F.scaled_dot_product_attention
    runs[REFERENCE] = Runs(forward_run(sdpa, qkv), both_run(sdpa, leaves))
    cost = BOTH * (n * n + sum(case.cost(n) for case in left))
    work.step(f"{place}: round 1 of {rounds}", 2 * BOTH * n * n)

    def on_round(number: int, seconds: dict[str, list[float]]) -> None:
        work.step(f"{place}: round {min(number + 1, rounds)} of {rounds}", cost / 2)

    forward = timed_rounds({name: run.forward for name, run in runs.items()}, rounds, on_round)
    both = timed_rounds({name: run.both for name, run in runs.items()}, rounds, on_round)
    for name, row in rows.items():
        yield {
            **row,
            **quartile_fields("forward", quartiles(forward[name])),
            **quartile_fields("forward_ratio", ratio(forward[name], forward[REFERENCE])),
            **quartile_fields("both", quartiles(both[name])),
            **quartile_fields("both_ratio", ratio(both[name], both[REFERENCE])),
        }


def passes_of(case: Case, qkv: QKV, seed: int) -> Runs:
    """The passes of a method; its parameters get gradients too."""
    (n, head_dim), device = qkv[0].shape[-2:], qkv[0].device
    module = case.build(n, head_dim, seed).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    query, key, value = (x.clone().requires_grad_() for x in qkv)
    inputs = (query, query, value) if OFFERED[case.contender.method].shares_keys else (query, key, value)

    def call(*inputs: Tensor) -> Tensor:
        output: Tensor = module(*inputs, generator=generator)
        return output

    return Runs(forward_run(call, inputs), both_run(call, inputs, list(module.parameters())))
