"""Time and memory of every method beside torch's scaled_dot_product_attention (SDPA), in one process.

At each length all methods run in the same interleaved rounds as SDPA, and a method's speed is the quotient of the two
times in the same round: what slows a round down cancels. Calls too short to be timed are repeated within a round.
Inputs are standard normal, so nothing here depends on a model or a text.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.attention import METHODS
from skeinformer.checks import check_choice, check_count, check_number
from skeinformer.comparison.measure import Quartiles, interleaved, quartiles, ratio
from skeinformer.lab.contender import OFFERED, Contender, build_contender, has_budget, parse_all
from skeinformer.lab.device import device_field
from skeinformer.lab.measure.flops import count_multiply_adds, executed_flops
from skeinformer.lab.measure.memory import peak_memory
from skeinformer.lab.records import Ledger, Record, Value, key_of, machine
from skeinformer.lab.work import OnSkip, OnStep, now, part_of, silent

MODES = ("forward", "both")
DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
SHORTEST = 0.02  # seconds that one timing lasts at least
MOST_REPEATS = 1000
PEAK_SIZE = 1024  # of the square matrices whose product is taken for the most that the machine can do
# what tells one measurement from another, whatever its result
IDENTITY = (
    "kind",
    "method",
    "options",
    "peer",
    "n",
    "batch",
    "heads",
    "head_dim",
    "budget",
    "dtype",
    "threads",
    "processes",
    "mode",
    "device",
)

Action = Callable[[], object]


class InputSizes(NamedTuple):
    """Of the inputs: b, h, n, p, their dtype and where they are."""

    n: int
    batch: int
    heads: int = 2
    head_dim: int = 32
    dtype: str = "float32"
    device: str = "cpu"

    @property
    def fields(self) -> Record:
        """How a record names them."""
        fields = self._asdict()
        return fields | device_field(fields.pop("device"))


class Entry(NamedTuple):
    """What is timed under one label: how to make it for n tokens, and its multiply-adds per example and head.

    `make(n)` gives a function of q, k and v; `multiply_adds(n, backward)` counts.
    """

    method: str
    label: str
    make: Callable[[int], Callable[..., Tensor]]
    multiply_adds: Callable[[int, bool], int]
    options: str = ""
    budget: int | None = None
    shares_keys: bool = False

    @property
    def name(self) -> str:
        """Unique among the entries of a run."""
        return f"{self.method}:{self.options}"


def default_contenders(specs: Sequence[str] = (), pilots: Sequence[int] = (256, 32)) -> list[Contender]:
    """The contenders of `specs`; a method whose pilots are varied once for each number of pilots.

    By default all methods, but those that compute the same as another on these inputs.
    """
    for count in pilots:
        check_count("pilots", count)
    names = specs or [name for name, row in METHODS.items() if row.same_as is None]
    found = []
    for name in names:
        varied = name in OFFERED and OFFERED[name].varied_pilots
        found += [f"{name}:num_pilots={count}" for count in pilots] if varied and pilots else [name]
    return parse_all(found)


def contender_entry(contender: Contender, head_dim: int, budget: int) -> Entry:
    """A method of METHODS with the budget; every call draws anew."""
    size, options = contender.settings(budget)
    return Entry(
        method=contender.method,
        label=contender.label,
        make=lambda n: build_contender(contender, head_dim=head_dim, max_len=n, budget=budget),
        multiply_adds=lambda n, backward: sum(
            count_multiply_adds(
                contender.method, n, budget=size, head_dim=head_dim, backward=backward, **options
            ).values()
        ),
        options=contender.options_text,
        budget=budget if has_budget(contender) else None,
        shares_keys=OFFERED[contender.method].shares_keys,
    )


def sdpa_entry(head_dim: int) -> Entry:
    """torch's own attention, called directly: what the others are compared with."""
    return Entry(
        method="sdpa",
        label="SDPA",
        make=lambda n: F.scaled_dot_product_attention,
        multiply_adds=lambda n, backward: sum(
            count_multiply_adds("softmax", n, head_dim=head_dim, backward=backward).values()
        ),
    )


def bench_records(
    entries: Sequence[Entry],
    lengths: Sequence[int],
    *,
    batch: int = 4,
    long_batch: int = 1,
    long_from: int = 16384,
    heads: int = 2,
    head_dim: int = 32,
    dtype: str = "float32",
    device: str = "cpu",
    modes: Sequence[str] = MODES,
    rounds: int = 7,
    max_seconds: float = 10.0,
    seed: int = 0,
    known: Sequence[Record] = (),
    on_step: OnStep = silent,
    on_skip: OnSkip = lambda what, reason: None,
) -> Iterator[Record]:
    """Records of kind "bench": SDPA and every entry, at each length, shortest first, in each mode.

    Mode "forward" is a call in evaluation, without gradients; "both" a call in training and the gradients of q, k, v
    and the method's parameters. From n = `long_from` the batch is `long_batch`. What is in `known` is not measured
    again. A call that must be expected to take more than `max_seconds`, from its time at a smaller length and its
    FLOPs, is skipped, and `on_skip(what, reason)` told; where nothing smaller was measured, one whose FLOPs alone take
    longer at the speed of a matrix product.
    """
    _check(lengths, modes, rounds, max_seconds, batch, long_batch, long_from, heads, head_dim)
    check_choice("dtype", dtype, DTYPES)
    started = now()
    history = [record for record in known if record.get("kind") == "bench"]
    present = Ledger(IDENTITY, history)
    lengths = sorted(set(lengths))
    speed = cache(partial(matmul_peak, DTYPES[dtype], device))
    done, share = 0.0, 1 / sum(lengths) / len(modes)
    for n in lengths:
        sizes = InputSizes(n, long_batch if n >= long_from else batch, heads, head_dim, dtype, device)
        for mode in modes:
            field = {}
            for entry in (sdpa_entry(head_dim), *entries):
                settings = _settings(entry, sizes, mode)
                if settings in present and entry.method != "sdpa":
                    continue
                settings["flops"] = 2 * sizes.batch * heads * entry.multiply_adds(n, mode == "both")
                expected = expected_seconds(settings, history)
                if expected is None:
                    expected = _number(settings, "flops") / speed()
                if expected > max_seconds:
                    reason = f"a call would take about {expected:.3g} s, more than max_seconds = {max_seconds:g}"
                    on_skip(f"{entry.label} at n = {n:,}, {mode}", reason)
                else:
                    field[entry.name] = (entry, settings)
            if any(settings not in present for _, settings in field.values()):
                step = part_of(on_step, f"n = {n:,}, {mode}", done, share * n)
                for record in _measure(field, sizes, mode, rounds, seed, step):
                    history.append(record)
                    if record not in present:
                        yield {**record, "rounds": rounds, "seed": seed, "started": started, **machine()}
            done += share * n


def expected_seconds(settings: Record, history: Sequence[Record]) -> float | None:
    """The time of a call by that of the same method at the greatest smaller length: it grows as the FLOPs or as b n.

    The larger of the two. None where nothing smaller was measured.
    """

    alike = [name for name in IDENTITY if name not in ("n", "batch")]
    wanted = key_of(settings, alike)
    shorter = [r for r in history if key_of(r, alike) == wanted and _number(r, "n") < _number(settings, "n")]
    if not shorter:
        return None
    last = max(shorter, key=lambda record: _number(record, "n"))
    tokens = _number(settings, "n") * _number(settings, "batch") / (_number(last, "n") * _number(last, "batch"))
    flops = _number(settings, "flops") / max(1.0, _number(last, "flops"))
    return _number(last, "seconds") * max(tokens, flops)


def random_inputs(sizes: InputSizes, seed: int = 0, requires_grad: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k and v, (b, h, n, p): the same numbers on every device."""
    generator = torch.Generator().manual_seed(seed)
    shape = (sizes.batch, sizes.heads, sizes.n, sizes.head_dim)
    q, k, v = (torch.randn(shape, generator=generator).to(sizes.device, DTYPES[sizes.dtype]) for _ in range(3))
    return q.requires_grad_(requires_grad), k.requires_grad_(requires_grad), v.requires_grad_(requires_grad)


def forward_run(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Action:
    """A call without gradients, as a function without arguments."""

    def run() -> object:
        with torch.no_grad():
            return call(*inputs)

    return run


def both_run(call: Callable[..., Tensor], inputs: Sequence[Tensor], parameters: Sequence[Tensor] = ()) -> Action:
    """A call and the gradients of inputs and parameters, those that it has, for a fixed gradient of the output.

    The output has the shape of the last input, (b, h, n, p), and its gradient the layout that a model hands back: the
    heads of a token beside each other.
    """
    last = inputs[-1].transpose(1, 2)  # (b, n, h, p)
    upstream = torch.randn(last.shape, generator=torch.Generator().manual_seed(1)).to(last).transpose(1, 2)
    sources = list({id(x): x for x in (*inputs, *parameters)}.values())

    def run() -> object:
        return torch.autograd.grad(call(*inputs), sources, upstream, allow_unused=True)

    return run


def timed_rounds(
    runs: Mapping[str, Action],
    rounds: int,
    on_round: Callable[[int, dict[str, list[float]]], None] | None = None,
    *,
    setup: Mapping[str, Action] = {},
    agree: Callable[[dict[str, float]], dict[str, float]] = dict,
) -> dict[str, list[float]]:
    """Seconds of one call of every function in each of `rounds` interleaved rounds.

    A function is called as often in a round as it takes for a timing of 20 ms. Call each once before: nothing is
    warmed up here but by the call that finds out how often. setup: called before a timing, and not timed. agree: from
    the seconds of the first call those that decide how often, for processes that must do alike.
    """
    once = agree({name: seconds for name, (seconds,) in interleaved(runs, 1, warmup=0, setup=setup).items()})
    repeats = {name: min(MOST_REPEATS, math.ceil(SHORTEST / max(seconds, 1e-9))) for name, seconds in once.items()}
    repeated = {name: partial(_repeat, run, repeats[name]) for name, run in runs.items()}
    seconds = interleaved(repeated, rounds, warmup=0, on_round=on_round, setup=setup)
    return {name: [value / repeats[name] for value in values] for name, values in seconds.items()}


def matmul_peak(dtype: torch.dtype, device: str = "cpu", calls: int = 5) -> float:
    """FLOPs in a second of the fastest of a few products of two square matrices: what the machine can do."""
    a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE).to(device, dtype)
    times = interleaved({"product": lambda: a @ b}, calls)["product"]
    return 2 * PEAK_SIZE**3 / min(times)


def quartile_fields(name: str, values: Quartiles | None) -> Record:
    """Median and quartiles as fields `name`, `name_q25` and `name_q75`."""
    names = (name, f"{name}_q25", f"{name}_q75")
    return dict.fromkeys(names) if values is None else dict(zip(names, values, strict=True))


def _measure(
    field: Mapping[str, tuple[Entry, Record]],
    sizes: InputSizes,
    mode: str,
    rounds: int,
    seed: int,
    step: OnStep,
) -> Iterator[Record]:
    """The records of one length and mode, all from the same rounds."""
    inputs = random_inputs(sizes, seed, requires_grad=mode == "both")
    runs: dict[str, Action] = {}
    peaks: dict[str, int] = {}
    executed: dict[str, int] = {}
    steps = len(field) + rounds + 1
    for index, (name, (entry, _)) in enumerate(field.items()):
        step(f"memory of {entry.label}", index / steps)
        runs[name] = _run_of(entry, inputs, mode)
        peaks[name] = peak_memory(runs[name], inputs[0].device)
        executed[name] = executed_flops(runs[name])

    def on_round(number: int, seconds: dict[str, list[float]]) -> None:
        step(f"time, round {min(number + 1, rounds)} of {rounds}", (len(field) + 1 + number) / steps)

    step(f"time, round 1 of {rounds}", len(field) / steps)
    before = matmul_peak(DTYPES[sizes.dtype], sizes.device)
    seconds = timed_rounds(runs, rounds, on_round)
    peak = max(before, matmul_peak(DTYPES[sizes.dtype], sizes.device))
    reference = next((seconds[name] for name, (entry, _) in field.items() if entry.method == "sdpa"), None)
    for name, (_, settings) in field.items():
        times = quartiles(seconds[name])
        yield {
            **settings,
            **quartile_fields("seconds", times),
            **quartile_fields("ratio", None if reference is None else ratio(reference, seconds[name])),
            "peak_bytes": peaks[name],
            "executed_flops": executed[name],
            "peak_fraction": executed[name] / times.median / peak,
            "matmul_flops": peak,
        }


def _run_of(entry: Entry, inputs: tuple[Tensor, Tensor, Tensor], mode: str) -> Action:
    call = entry.make(inputs[0].shape[-2])
    parameters: list[Tensor] = []
    if isinstance(call, nn.Module):
        parameters = list(call.to(inputs[0].device).train(mode == "both").parameters())
        inputs = (inputs[0], inputs[0], inputs[2]) if entry.shares_keys else inputs
    return forward_run(call, inputs) if mode == "forward" else both_run(call, inputs, parameters)


def _settings(entry: Entry, sizes: InputSizes, mode: str) -> Record:
    """What tells the record of an entry from others."""
    return {
        "kind": "bench",
        "method": entry.method,
        "options": entry.options,
        "label": entry.label,
        **sizes.fields,
        "budget": entry.budget,
        "threads": torch.get_num_threads(),
        "mode": mode,
    }


def _repeat(run: Action, count: int) -> None:
    for _ in range(count):
        run()


def _number(record: Mapping[str, Value], name: str) -> float:
    value = record[name]
    if not isinstance(value, int | float):
        raise ValueError(f"record field {name!r} is {value!r}, expected a number")
    return float(value)


def _check(lengths: Sequence[int], modes: Sequence[str], rounds: int, max_seconds: float, *counts: int) -> None:
    if not lengths:
        raise ValueError("lengths is empty; give at least one sequence length")
    if not modes:
        raise ValueError("modes is empty; give forward, both, or the two")
    for mode in modes:
        check_choice("mode", mode, MODES)
    for n in lengths:
        check_count("length", n)
    check_count("rounds", rounds)
    names = ("batch", "long_batch", "long_from", "heads", "head_dim")
    for name, count in zip(names, counts, strict=True):
        check_count(name, count)
    if not check_number("max_seconds", max_seconds, "positive") > 0:
        raise ValueError(f"max_seconds must be positive, got {max_seconds}")
