"""`skein approx`: measure how well each method approximates attention, append every record, show what came out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from statistics import median
from typing import Literal, NamedTuple

import torch
from rich.console import Console

from skeinformer.attention import METHODS
from skeinformer.lab.console import split_tables, wrapped
from skeinformer.lab.contender import offer, parse_all
from skeinformer.lab.device import Device, check_device
from skeinformer.lab.files import write_whole
from skeinformer.lab.measure.approx import KEYS, Case, Experiment, cases, compact, error_records, load_source, summarize
from skeinformer.lab.measure.approx_time import TIME_KEYS, time_records
from skeinformer.lab.measure.pretrained import WEIGHTS, column_and_value
from skeinformer.lab.progress import progress, say
from skeinformer.lab.records import Record, Value, append_all, key_of, read_known
from skeinformer.lab.report.format import ROUNDING, number, percent
from skeinformer.lab.threads import use_threads
from skeinformer.sketch import SKETCHES

MADE = (
    "started",
    "cpu",
    "cores",
    "gpu",
    "torch",
    "python",
    "skeinformer",
    "commit",
    "command",
)  # how a record was made
ANY = "any d"  # the heading of methods without a budget


def default_methods() -> tuple[str, ...]:
    """All methods; `sketched` stands once for each sketch, in place of its default, the Gaussian one."""
    return (
        *(name for name in METHODS if name != "sketched"),
        "skeinformer:num_pilots=32",
        *(f"sketched:sketch={name}" for name in SKETCHES),
    )


@dataclass(frozen=True)
class Approx:
    """Measure errors of output and gradients, time, memory and FLOPs of every method on pretrained Q, K, V.

    What the records file already holds is not measured again: a run can be stopped, continued and extended.
    """

    lengths: tuple[int, ...] = (1024, 4096)
    """Sequence lengths, in tokens."""
    budgets: tuple[int, ...] = (8, 16, 32, 64, 128, 256)
    """Budgets d."""
    methods: tuple[str, ...] = field(default_factory=default_methods)
    """Names of methods, with options as in skeinformer:num_pilots=32. Default: all, and every sketch."""
    contenders: str | None = None
    """A module with a table METHODS of its own, as studies.rivals: --methods may then name these too."""
    trials: int = 8
    """Trials, each on the next piece of text and with new draws. 64 trials of 12 heads are 768 heads."""
    weights: tuple[str, ...] = WEIGHTS
    """Projections to queries, keys and values: pretrained, initialized (drawn anew in each trial)."""
    layers: tuple[int, ...] = (0,)
    """Layers of the model. The paper has layer 0."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    text_filter: tuple[str, ...] = ()
    """Rows of a .parquet text, as in split=test variant=raw. Default: all."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    gradient_trials: int = 8
    """Trials in which the gradients are measured too; these take several times as long."""
    time_rounds: int = 5
    """Rounds in which each method is timed; 0 for no times."""
    only: Literal["errors", "time"] | None = None
    """Run one part. Default: errors, then time."""
    device: Device = "cpu"
    """Device to measure on: cpu, or cuda for the GPU that torch takes first. The model itself stays on the CPU."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    seed: int = 0
    """Seed of all draws."""
    records: Path = Path("approx/records.jsonl")
    """File that records are appended to, one JSON line each."""
    summary: Path | None = None
    """Also write a small file with the means over trials and the times."""


def command(options: Approx) -> None:
    """Measure, and say what to do next."""
    path = run_approx(options)
    print(f"For a page of this: skein report --records {path}", flush=True)


def run_approx(options: Approx, console: Console | None = None) -> Path:
    """Measure what is missing in the records file, print a table, and return the path of the file."""
    console = console or Console(highlight=False)
    experiment = as_experiment(options)
    use_threads(options.threads)
    records = read_known(options.records)
    parts = {"errors": error_records} if options.only != "time" else {}
    if options.only != "errors" and options.time_rounds:
        parts["times"] = time_records
    if not parts:
        raise ValueError("only the time is asked for, in 0 rounds; give more time_rounds")
    with progress(console) as begin:
        begin("")("loading the pretrained model and the text", 0.0)
        source = load_source(experiment, options.trials if "errors" in parts else 1)
        for i, (part, measured) in enumerate(parts.items(), start=1):
            step = begin(f"{i} of {len(parts)}: {part}" if len(parts) > 1 else part)
            append_all(options.records, records, measured(experiment, source, tuple(records), step))
            step("done", 1.0)
    show(experiment, records, console)
    if options.summary is not None:
        write_summary(records, options.summary)
    return options.summary or options.records


def as_experiment(options: Approx) -> Experiment:
    """The options of the command as an experiment, or a ValueError that names the wrong one."""
    if not options.methods:
        raise ValueError("methods is empty; give at least one")
    check_device(options.device)
    if options.contenders is not None:
        offer(options.contenders)
    return Experiment(
        contenders=tuple(parse_all(options.methods)),
        lengths=options.lengths,
        budgets=options.budgets,
        trials=options.trials,
        weights=options.weights,
        layers=options.layers,
        seed=options.seed,
        model=options.model,
        text=options.text,
        where=tuple(column_and_value(item) for item in options.text_filter),
        gradient_trials=options.gradient_trials,
        time_rounds=options.time_rounds,
        device=options.device,
    )


def write_summary(records: Sequence[Record], path: Path) -> None:
    """Write the means over trials and the times, one JSON line each, whole or not at all.

    The file is small enough to publish: six digits, nothing for None, and how it was made only where that changes.
    """
    made: Record = {}
    lines: dict[str, None] = {}  # in order, each once
    for record in map(_short, compact(records)):
        fields = {name: value for name, value in record.items() if name not in MADE or made.get(name) != value}
        made |= {name: value for name, value in record.items() if name in MADE}
        lines[json.dumps(fields, allow_nan=False, ensure_ascii=False) + "\n"] = None
    write_whole("".join(lines), path)


def _short(record: Record) -> Record:
    values = {name: value for name, value in record.items() if value is not None}
    return {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}


class Block(NamedTuple):
    """A table of the results: its title, and a text for each method and d."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def show(experiment: Experiment, records: Sequence[Record], console: Console) -> None:
    """Print the tables, and what was left out and why."""
    blocks = result_blocks(experiment, records)
    for block in blocks:
        for table in split_tables(block.headings, block.rows, width=console.width):
            console.print()
            say(console, wrapped(block.title, console))  # a title of the table would be wrapped to its width
            console.print(table)
    if blocks:
        console.print(wrapped(spread_note(experiment, records), console), soft_wrap=True)
    about = {(n, contender.label) for n, contender in product(experiment.lengths, experiment.contenders)}
    skipped = [r for r in records if r.get("kind") == "approx_skipped" and (r.get("n"), r.get("label")) in about]
    for label, part, reason in dict.fromkeys((r["label"], r["part"], r["reason"]) for r in skipped):
        say(console, wrapped(f"Not measured, {part} of {label}: {reason}", console))


def result_blocks(experiment: Experiment, records: Sequence[Record]) -> list[Block]:
    """The errors of every input, then the times of every length: a row for each method, a column for each d."""
    errors, times = _errors(experiment, records), _times(experiment, records)
    found = []
    for n, weights, layer in product(experiment.lengths, experiment.weights, experiment.layers):
        about: Record = {"n": n, "weights": weights, "layer": layer}
        known = {case: errors[key] for case in cases(experiment) if (key := _key(experiment, case, about)) in errors}
        trials = sorted({int(record["trials"] or 0) for record in known.values()})
        unit = "trial" if trials == [1] else "trials"
        title = f"Relative spectral error: n = {n:,}, {weights} weights, layer {layer}, {_listed(trials)} {unit}"
        found.append(_block(title, {case: number(record.get("spectral_relative")) for case, record in known.items()}))
    for n in experiment.lengths:
        known = {case: times[n, case] for case in cases(experiment) if (n, case) in times}
        ratios = {case: number(record.get("forward_ratio")) for case, record in known.items()}
        found.append(_block(f"Forward time / SDPA's: n = {n:,}", ratios))
    return [block for block in found if block.rows]


def spread_note(experiment: Experiment, records: Sequence[Record]) -> str:
    """What the errors are, and how far they may be off."""
    note = "Relative spectral error |BV - R|_2 / |BV|_2: mean over trials, each of all heads."
    shares = [
        float(error) / float(value)
        for record in _errors(experiment, records).values()
        if isinstance(value := record.get("spectral_relative"), int | float) and value > ROUNDING
        if isinstance(error := record.get("spectral_relative_se"), int | float)
    ]
    if not shares:
        return note
    half, most = percent(median(shares)), percent(max(shares))
    return f"{note} Their standard errors are {half} of the mean in the middle, and at most {most}."


def _block(title: str, texts: Mapping[Case, str]) -> Block:
    """A row for each contender; what has no budget is in a column of its own."""
    texts = {case: text for case, text in texts.items() if text}
    sizes = sorted({case.budget for case in texts if case.budget is not None})
    columns: list[int | None] = [*([None] if any(case.budget is None for case in texts) else []), *sizes]
    headings = ("method", *(ANY if size is None else f"d = {size}" for size in columns))
    contenders = dict.fromkeys(case.contender for case in texts)
    rows = [(one.label, *(texts.get(Case(one, size), "") for size in columns)) for one in contenders]
    return Block(title, headings, rows)


def _key(experiment: Experiment, case: Case, about: Record) -> tuple[Value, ...]:
    return key_of({**experiment.common, **case.fields, **about}, KEYS)


def _errors(experiment: Experiment, records: Sequence[Record]) -> dict[tuple[Value, ...], Record]:
    """The means over trials of what the experiment asks for."""
    inputs = product(experiment.lengths, experiment.weights, experiment.layers)
    wanted = {
        _key(experiment, case, {"n": n, "weights": weights, "layer": layer})
        for n, weights, layer in inputs
        for case in cases(experiment)
    }
    return {key: record for record in summarize(records) if (key := key_of(record, KEYS)) in wanted}


def _times(experiment: Experiment, records: Sequence[Record]) -> dict[tuple[int, Case], Record]:
    """By length and case. The times of the first layer and weights serve all: they depend on sizes alone."""
    known = {key_of(record, TIME_KEYS): record for record in records if record.get("kind") == "approx_time"}
    found: dict[tuple[int, Case], Record] = {}
    for n, case in product(experiment.lengths, cases(experiment)):
        fixed: Record = {"n": n, "layer": experiment.layers[0], "batch": 1, "threads": torch.get_num_threads()}
        for weights in experiment.weights:
            key = key_of({**experiment.common, **case.fields, **fixed, "weights": weights}, TIME_KEYS)
            if key in known:
                found.setdefault((n, case), known[key])
    return found


def _listed(counts: Sequence[int]) -> str:
    return f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0] if counts else 0)
