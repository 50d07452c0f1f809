"""`skein bench`: time and memory of every method beside SDPA, beside other packages, in a training step, and over
several processes."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from rich.console import Console
from rich.table import Table

from skeinformer.checks import check_count
from skeinformer.lab.console import plain_table
from skeinformer.lab.contender import offer
from skeinformer.lab.device import Device, check_device
from skeinformer.lab.files import write_whole
from skeinformer.lab.measure.crossing import faster_from, growth_exponent
from skeinformer.lab.measure.speed import IDENTITY, bench_records, contender_entry, default_contenders
from skeinformer.lab.progress import Filling, filling
from skeinformer.lab.records import Record, Value, append, key_of, read, read_known
from skeinformer.lab.report.format import (
    between,
    count,
    label,
    microseconds,
    number,
    percent,
    real,
    required,
    seconds,
    size,
)
from skeinformer.lab.threads import with_threads
from skeinformer.lab.work import OnSkip, OnStep

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PAPER_LENGTHS = (4096,)  # of the Text task, for peers and training steps
DIVIDED_LENGTHS, DIVIDED_METHODS = (16384,), ("skeinformer", "cluster")  # over several processes


@dataclass(frozen=True)
class Bench:
    """Time every method beside torch's scaled_dot_product_attention (SDPA) in interleaved rounds, and its memory.

    What the records file already holds is not measured again: a run can be stopped, continued and extended.
    """

    lengths: tuple[int, ...] = ()
    """Sequence lengths, in tokens; with --processes, of a process's share, and then of the whole sequence. Default: 256
    to 16384 by doubling; 4096 with --peers or --step; 16384 with --processes."""
    methods: tuple[str, ...] = ()
    """Names of methods, with options as in sketched:sketch=srht. Default: all."""
    contenders: str | None = None
    """A module with a table METHODS of its own, as studies.rivals: --methods may then name these too."""
    modes: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    """Passes to time. forward: a call without gradients; both: a call and its gradients."""
    budget: int = 256
    """The sketch size d, the same for every method."""
    pilots: tuple[int, ...] = (256, 32)
    """Numbers of Skeinformer's pilot rows, each a row of the table."""
    batch: int = 4
    """Sequences in a batch."""
    long_batch: int = 1
    """The batch from --long-from tokens on."""
    long_from: int = 16384
    """The length from which --long-batch counts."""
    heads: int = 2
    """Attention heads."""
    head_dim: int = 32
    """The head width p."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Precision of queries, keys and values; --peers and --step are always in float32."""
    device: Device = "cpu"
    """Device to measure on: cpu, or cuda for the GPU that torch takes first."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice; one with --processes."""
    rounds: int = 7
    """Rounds in which each method is timed."""
    max_seconds: float = 10.0
    """Leave out a method at lengths where one call is expected to take longer than this."""
    seed: int = 0
    """Seed of the inputs."""
    peers: bool = False
    """Time our methods beside the packages that implement the same, in place of SDPA."""
    step: bool = False
    """Time training steps of the Long Range Arena's Text model, in place of calls."""
    processes: tuple[int, ...] = ()
    """Divide each sequence among so many processes, which are started for it, beside exact attention over keys and
    values that torch gathers. 1 2 4 measures all three numbers."""
    again: bool = False
    """Measure anew what the records file holds, and replace it there."""
    records: Path = Path("bench/records.jsonl")
    """File that records are appended to, one JSON line each."""


def command(options: Bench) -> None:
    """Measure, and say what to do next."""
    print(f"For a page of this: skein report --records {run_bench(options)}", flush=True)


def run_bench(options: Bench, console: Console | None = None) -> Path:
    """Measure what is missing in the records file, print what came out, and return the path of the file."""
    console = console or Console(highlight=False)
    check_device(options.device)
    options.records.parent.mkdir(parents=True, exist_ok=True)  # fails before anything is measured
    known = read_known(options.records)
    measured = []
    threads = 1 if options.processes and options.threads is None else options.threads
    with with_threads(threads), filling(console, tables, line, key=_identity) as display:
        for record in measure(options, () if options.again else known, display):
            _save(options.records, record, known if options.again else ())
            measured.append(record)
            display.row(record)
    if not measured:
        console.print("Nothing was measured: the records hold it all, or it was left out. --again measures anew.")
    latest = {_identity(record): record for record in (*known, *measured)}
    bench = [record for record in latest.values() if record.get("kind") == "bench"]
    if bench and not (options.peers or options.step or options.processes):
        show_growth(bench, console)
    return options.records


def measure(options: Bench, known: Sequence[Record], display: Filling) -> Iterator[Record]:
    """The records that the options ask for and that are not known."""

    def on_skip(what: str, reason: str) -> None:
        display.note(f"Left out: {what}: {' '.join(reason.split())}")

    check_count("budget", options.budget)
    if sum(map(bool, (options.peers, options.step, options.processes))) > 1:
        raise ValueError("give one of --peers, --step and --processes: each is a measurement of its own")
    if options.contenders is not None:
        offer(options.contenders)
    if options.processes:
        if options.device != "cpu":
            raise ValueError(f"--processes runs on the CPU, not on {options.device}; leave out --device")
        yield from measure_processes(options, known, display.step, on_skip)
        return
    lengths = options.lengths or (PAPER_LENGTHS if options.peers or options.step else LENGTHS)
    if options.peers:
        from skeinformer.lab.measure.peers import peer_records

        for n in lengths:
            yield from peer_records(
                n,
                methods=options.methods,
                batch=options.batch,
                heads=options.heads,
                head_dim=options.head_dim,
                budget=options.budget,
                rounds=options.rounds,
                device=options.device,
                known=known,
                on_step=display.step,
                on_skip=on_skip,
            )
    contenders = [] if options.peers and not options.step else default_contenders(options.methods, options.pilots)
    if options.step:
        from skeinformer.lab.measure.steps import step_records

        for n in lengths:
            yield from step_records(
                contenders,
                n,
                batch=options.batch,
                budget=options.budget,
                rounds=options.rounds,
                seed=options.seed,
                device=options.device,
                known=known,
                on_step=display.step,
            )
    if options.peers or options.step:
        return
    yield from bench_records(
        [contender_entry(contender, options.head_dim, options.budget) for contender in contenders],
        lengths,
        batch=options.batch,
        long_batch=options.long_batch,
        long_from=options.long_from,
        heads=options.heads,
        head_dim=options.head_dim,
        dtype=options.dtype,
        device=options.device,
        modes=options.modes,
        rounds=options.rounds,
        max_seconds=options.max_seconds,
        seed=options.seed,
        known=known,
        on_step=display.step,
        on_skip=on_skip,
    )


def measure_processes(options: Bench, known: Sequence[Record], on_step: OnStep, on_skip: OnSkip) -> Iterator[Record]:
    """The records of --processes. The batch goes by the length that is given, whatever it is multiplied by."""
    from skeinformer.lab.measure.processes import process_records

    lengths = options.lengths or DIVIDED_LENGTHS
    contenders = default_contenders(options.methods or DIVIDED_METHODS, options.pilots)
    for batch in sorted({options.long_batch if n >= options.long_from else options.batch for n in lengths}):
        yield from process_records(
            contenders,
            options.processes,
            [n for n in lengths if (options.long_batch if n >= options.long_from else options.batch) == batch],
            batch=batch,
            heads=options.heads,
            head_dim=options.head_dim,
            budget=options.budget,
            dtype=options.dtype,
            modes=options.modes,
            rounds=options.rounds,
            threads=torch.get_num_threads(),
            max_seconds=options.max_seconds,
            seed=options.seed,
            known=known,
            on_step=on_step,
            on_skip=on_skip,
        )


def _ratio(record: Record) -> str:
    """Median and quartiles of a ratio of times."""
    quartiles = between(number(record.get("ratio_q25")), number(record.get("ratio_q75")))
    return f"{number(record.get('ratio'))} ({quartiles})" if quartiles else ""


Columns = dict[str, Callable[[Record], str]]
TIME: Columns = {"n": lambda r: count(r.get("n")), "method": label, "time": lambda r: seconds(r.get("seconds"))}
MEMORY: Columns = {"memory": lambda r: size(r.get("peak_bytes"))}
COLUMNS: dict[str, Columns] = {
    "bench": {
        "mode": lambda r: str(r.get("mode")),
        **TIME,
        "SDPA / its time": _ratio,
        **MEMORY,
        "of peak": lambda r: percent(r.get("peak_fraction")),
    },
    "bench_peer": {
        "n": lambda r: count(r.get("n")),
        "method": lambda r: f"{label(r)} beside {r.get('peer')}",
        "time": lambda r: seconds(r.get("seconds")),
        "peer's\ntime": lambda r: seconds(r.get("peer_seconds")),
        "peer / ours": lambda r: _ratio(r).replace(" (", "\n("),  # on two lines, to fit
        **MEMORY,
        "peer's\nmemory": lambda r: size(r.get("peer_peak_bytes")),
    },
    "bench_step": {**TIME, "Standard / its time": _ratio, **MEMORY},
    "bench_processes": {
        "mode": lambda r: str(r.get("mode")),
        "processes": lambda r: count(r.get("processes")),
        "n in all": lambda r: count(r.get("n")),
        "n each": lambda r: count(r.get("n_each")),
        "method": label,
        "time": lambda r: seconds(r.get("seconds")),
        "per token": lambda r: microseconds(r.get("seconds_per_token")),
        **MEMORY,
    },
}
# columns that are in the title of a table, so that the others fit beside each other
TITLES = {"bench": ("mode", "n"), "bench_peer": ("n",), "bench_step": ("n",), "bench_processes": ("mode", "processes")}
GROWTH = ("mode", "method", "faster than SDPA", "exponent")


def show_growth(records: Sequence[Record], console: Console) -> None:
    """Print from which length each method is faster than SDPA, and how its time grows between the greatest lengths."""
    console.print(plain_table(GROWTH, growth_rows(records), broken="method"))


def growth_rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """A row of text for each mode, method and setting, in the order of GROWTH. Times are per example."""

    groups: dict[tuple[object, ...], list[Record]] = {}
    # of an n with several batches the greatest stays
    for record in sorted(records, key=lambda r: (required(r, "n"), required(r, "batch"))):
        names = ("mode", "label", "budget", "heads", "head_dim", "dtype", "threads", "device")
        groups.setdefault(tuple(record.get(name) for name in names), []).append(record)
    for rows in groups.values():
        times = {required(r, "n"): required(r, "seconds") / required(r, "batch") for r in rows}
        ratios = {int(required(r, "n")): value for r in rows if (value := real(r, "ratio")) is not None}
        overtakes = exponent = ""
        if ratios and rows[0].get("method") != "sdpa":
            overtakes = faster_from(list(ratios), list(ratios.values()))
        if len(times) > 1:
            (n1, t1), (n2, t2) = list(times.items())[-2:]
            exponent = f"{growth_exponent(n1, t1, n2, t2):.2f}"
        yield str(rows[0]["mode"]), label(rows[0]), overtakes, exponent


def tables(records: Iterable[Record]) -> Iterator[Table]:
    """A table for each kind of record, and what its title says: mode, length, number of processes."""
    for (kind, title), group in groupby(records, key=lambda r: (str(r["kind"]), _title(r))):
        columns = {name: show for name, show in COLUMNS[kind].items() if name not in TITLES[kind]}
        rows = [[show(record) for show in columns.values()] for record in group]
        sections = list(columns).index("method")
        yield plain_table(columns, rows, sections=sections, title=f"\n{title}", broken="method")


def _title(record: Record) -> str:
    """What is the same in a table."""
    kind = str(record["kind"])
    shown = {name: COLUMNS[kind][name](record) for name in TITLES[kind]}
    words = {"mode": "{}", "n": "n = {}", "processes": "processes: {}"}
    return ", ".join(words[name].format(text) for name, text in shown.items())


def line(record: Record) -> str:
    """A record in one line."""
    values = ((name, show(record)) for name, show in COLUMNS[str(record["kind"])].items() if name != "method")
    values = ((" ".join(name.split()), " ".join(value.split())) for name, value in values)
    return f"  {label(record)}: " + ", ".join(f"{name} {value}" for name, value in values if value)


def _identity(record: Record) -> tuple[Value, ...]:
    return key_of(record, IDENTITY)


def _save(path: Path, record: Record, replaced: Sequence[Record]) -> None:
    """Append the record; where `replaced` has another of the same measurement, in its place."""
    if any(_identity(old) == _identity(record) for old in replaced):
        kept = [old for old in read(path) if _identity(old) != _identity(record)]
        write_whole("".join(json.dumps(old, ensure_ascii=False) + "\n" for old in kept), path)
    append(path, record)
