"""What `skein bench` and the benchmarks measure: the times of calls in interleaved rounds, memory and errors."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.certificate import bound_of_mean
from skeinformer.cli.flops import count_multiply_adds
from skeinformer.cli.measure import (
    QKV,
    Action,
    action,
    busy_machine,
    exact_attention,
    finite,
    interleaved,
    peak_memory,
    relative_error,
    spectral_error,
    time_fields,
    timed_rounds,
)
from skeinformer.cli.progress import Steps
from skeinformer.cli.records import Record
from skeinformer.cli.specs import MethodSpec
from skeinformer.cli.tables import real

BUSY_CALLS = 30
ERRORS = ("error", "spectral", "spectral_relative")  # that have a standard error over pieces of the text


def timed_records(
    chosen: Mapping[MethodSpec, Record], sdpa: Record, qkv: QKV, rounds: int, steps: Steps, title: str
) -> Iterator[Record]:
    """Add times and memory to the records of one input and mode, all from the same rounds, SDPA's first."""
    mode, busy, device = str(sdpa["mode"]), bool(sdpa.get("busy")), qkv[0].device
    runs: dict[str, Action] = {"sdpa": action(F.scaled_dot_product_attention, leaves(qkv, mode), mode)}
    rows = {"sdpa": {**sdpa, "peak_bytes": peak_memory(runs["sdpa"], device)}}
    for spec, row in chosen.items():
        steps(f"{title}: memory of {spec}")
        try:
            run = call_of(spec, qkv, mode)
            rows[str(spec)] = {**row, "peak_bytes": peak_memory(run, device)}
            runs[str(spec)] = run
        except ValueError as error:
            steps.print(f"Left out: {spec} at {title}: {error}")
    steps(f"{title}: time in {rounds} rounds")
    if busy:
        with busy_machine():
            times = interleaved(runs, BUSY_CALLS, warmup=3)
    else:
        times = timed_rounds(runs, rounds)
    for name, row in rows.items():
        worst = {"seconds_worst": max(times[name])} if busy else {}
        yield {**row, **time_fields(times[name], times["sdpa"], times[name]), **worst}


def error_fields(
    specs: Sequence[MethodSpec], pieces: Sequence[QKV], seed: int, steps: Steps, title: str
) -> dict[MethodSpec, Record]:
    """Measure errors and the methods' own estimates, means over heads and pieces; or the `reason` why there is none."""
    found: dict[MethodSpec, list[dict[str, Tensor]]] = {spec: [] for spec in specs}
    refused: dict[MethodSpec, Record] = {}
    for i, qkv in enumerate(pieces):
        steps(f"{title}: exact attention in float64, piece {i + 1} of {len(pieces)}")
        exact = exact_attention(*(x.cpu() for x in qkv))
        for spec in specs:
            try:
                found[spec].append(errors_of(spec, qkv, exact, seed + i))
            except ValueError as error:
                refused[spec] = {"reason": " ".join(str(error).split())}
    means: dict[MethodSpec, Record] = {}
    for spec, trials in found.items():
        means[spec] = refused.get(spec) or {}
        for name in trials[0] if trials and spec not in refused else ():
            values = torch.stack([x[name] for x in trials])
            means[spec][name] = finite(values.mean())
            if name in ERRORS and len(values) > 1:
                means[spec][f"{name}_se"] = finite(values.std() / len(values) ** 0.5)
    return means


@torch.no_grad()
def errors_of(spec: MethodSpec, qkv: QKV, exact: Tensor, seed: int) -> dict[str, Tensor]:
    """Measure one call: the paper's spectral error, relative errors, and the method's own estimate and bound."""
    device = qkv[0].device
    module = spec.build(qkv[0].shape[-1], qkv[0].shape[-2], seed).to(device)
    output, info = module.certify(*qkv, generator=torch.Generator(device).manual_seed(seed))
    output = output.cpu()
    return {
        "error": relative_error(output, exact).mean(),
        "spectral": spectral_error(output, exact, relative=False).mean(),
        "spectral_relative": spectral_error(output, exact).mean(),
        "estimate": info.error.cpu().double().mean(),
        "bound": torch.as_tensor(bound_of_mean(info)).cpu().double(),
    }


def call_of(spec: MethodSpec, qkv: QKV, mode: str, seed: int | None = None) -> Action:
    """Return a call of a method, which draws again each time, as a function without arguments."""
    module: Any = spec.build(qkv[0].shape[-1], qkv[0].shape[-2], seed).to(qkv[0].device).train(mode == "both")
    query, key, value = leaves(qkv, mode)
    inputs = (query, query if spec.entry.shares_keys else key, value)
    return action(module, inputs, mode, list(module.parameters()))


def leaves(qkv: QKV, mode: str) -> tuple[Tensor, ...]:
    """Return the inputs as leaves that need gradients in mode "both"."""
    return tuple(x.detach().clone().requires_grad_(mode == "both") for x in qkv)


def flops_of(spec: MethodSpec, row: Record) -> int:
    """Count the FLOPs of a record's call by its shapes, two for a multiply-add."""
    n, batch, heads, head_dim = (int(row[name] or 0) for name in ("n", "batch", "heads", "head_dim"))
    return (
        2
        * batch
        * heads
        * sum(count_multiply_adds(spec, n, head_dim=head_dim, backward=row["mode"] == "both").values())
    )


def too_slow(row: Record, shorter: Sequence[Record], speed: Callable[[], float], most: float) -> str:
    """Say how long a call would take, if that is more than `most` seconds.

    It is expected to take its time at the length before, times the growth of its tokens or of its FLOPs, whichever is
    more; without such a time, that of its FLOPs at the `speed` of a matrix product.
    """
    flops = real(row, "flops") or 1.0
    timed = [r for r in shorter if r.get("seconds") and int(r["n"] or 0) < int(row["n"] or 0)]
    if timed:
        last = max(timed, key=lambda r: int(r["n"] or 0))
        tokens = [float(r["n"] or 0) * float(r["batch"] or 1) for r in (row, last)]
        growth = max(tokens[0] / tokens[1], flops / (real(last, "flops") or flops))
        expected = (real(last, "seconds") or 0) * growth
    else:
        expected = flops / speed()
    return f"a call would take about {expected:.3g} s, more than --max-seconds {most:g}" if expected > most else ""
