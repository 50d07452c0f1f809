"""`skein bench`: time, memory, multiply-adds and error of methods, compared with torch's exact attention (SDPA).

At each length all methods take turns with SDPA in one process. A method's speed is SDPA's time over its own in the same
round: what slows a round down cancels. Calls too short to be timed are repeated within a round.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console

from skeinformer.attention import METHODS
from skeinformer.checks import check_count, check_number
from skeinformer.cli import pretrained as models
from skeinformer.cli.bench_runs import error_fields, flops_of, timed_records, too_slow
from skeinformer.cli.measure import QKV, Sizes, check_device, matmul_speed, random_inputs, threads
from skeinformer.cli.page import write_bench
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, append, key_of, machine, now, read
from skeinformer.cli.specs import MethodSpec, parse_all
from skeinformer.cli.tables import Table, count, label, named, number, real, seconds, size, spread, spread_se, table_of

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
TEXT_LENGTHS, TEXT_BUDGETS = (1024, 4096), (16, 64, 256)  # with pretrained inputs
# what distinguishes one measurement from another, whatever its result
INPUTS = ("inputs", "model", "text", "layer", "trials", "n", "batch", "heads", "head_dim", "dtype", "threads", "device")
IDENTITY = ("kind", "method", "options", "budget", *INPUTS, "mode", "busy")
SAME = [name for name in IDENTITY if name not in ("kind", "n", "batch")]
SDPA: Record = {"method": "sdpa", "options": "", "label": "SDPA", "budget": None}


@dataclass(frozen=True)
class Bench:
    """Measure time, memory, multiply-adds and error of methods, compared with torch's exact attention (SDPA).

    What the records file has is not measured again: a run can be stopped, continued and extended.
    """

    lengths: tuple[int, ...] = ()
    """Sequence lengths. Default: 256 to 16384 by doubling, 1024 and 4096 with pretrained inputs."""
    methods: tuple[str, ...] = ()
    """Methods, with options as in skeinformer:num_pilots=32, or my_module:MyMethod. Default: all."""
    budgets: tuple[int, ...] = ()
    """Sketch sizes d. Default: 256; 16, 64 and 256 with pretrained inputs."""
    inputs: Literal["random", "pretrained"] = "random"
    """Random queries, keys and values; or those of a pretrained model on a text, which have an error too."""
    modes: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    """Passes to time. forward: a call without gradients; both: a call and its gradients."""
    rounds: int = 7
    """Rounds in which each method is timed; 0 for errors alone."""
    max_seconds: float = 10.0
    """Leave out a method at lengths where one call is expected to take longer."""
    busy: bool = False
    """Time 30 calls of each beside another process that keeps two threads busy; medians and worst times."""
    batch: int = 4
    """Sequences in a batch of random inputs."""
    long_batch: int = 1
    """The batch from --long-from tokens on."""
    long_from: int = 16384
    """The length from which --long-batch counts."""
    heads: int = 2
    """Attention heads of random inputs."""
    head_dim: int = 32
    """The head width p of random inputs."""
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    """Precision of random inputs."""
    layers: tuple[int, ...] = (0,)
    """Layers of the pretrained model."""
    trials: int = 4
    """Pieces of the text over which errors are averaged, each with new draws."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device to measure on."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    seed: int = 0
    """Seed of the inputs and of the draws whose error is measured."""
    records: Path = Path("bench/records.jsonl")
    """File that records are appended to, one JSON line each."""
    html: Path | None = None
    """Also write a page of the results."""
    figure: Path | None = None
    """Also draw the paper's Figure 1, error against d (or time against n), as .svg or .png."""

    def check(self) -> None:
        """Raise a ValueError that names the first wrong option."""
        counts = {"length": self.lengths, "budget": self.budgets}
        counts |= {x: (getattr(self, x),) for x in ("batch", "long_batch", "long_from", "heads", "head_dim", "trials")}
        for name, values in counts.items():
            for value in values:
                check_count(name, value)
        check_count("rounds", self.rounds, 0)
        check_number("max_seconds", self.max_seconds)
        for name in ("modes", "layers"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty; give at least one")
        check_device(self.device)
        check_text(self.text)
        if self.inputs == "random" and not self.rounds:
            raise ValueError("random inputs have no error to measure; give --rounds, or --inputs pretrained")

    def specs(self) -> list[MethodSpec]:
        """Return every method at every budget."""
        budgets = self.budgets or ((256,) if self.inputs == "random" else TEXT_BUDGETS)
        methods = parse_all(self.methods or default_methods())
        return [spec for method in methods for spec in method.at(budgets)]

    def run(self, console: Console | None = None) -> Path:
        """Measure what is missing in the records file, print tables, and return the path of the file."""
        console = console or Console(highlight=False)
        self.check()
        specs = self.specs()
        records = read(self.records, missing_ok=True)
        rows: dict[object, Record] = {key_of(r, IDENTITY): r for r in records}
        with threads(self.threads), show_steps(console) as steps:
            for record in measured(self, specs, records, steps):
                append(self.records, record)
                rows[key_of(record, IDENTITY)] = record
                steps.print(
                    f"  {label(record)}: {seconds(record.get('seconds'))} {number(record.get('error'))}".rstrip()
                )
            wanted = [key_of({"kind": "bench", **row}, IDENTITY) for row in settings_of(self, specs)]
        found = [rows[key] for key in wanted if key in rows]
        tables = result_tables(found)
        for table in tables:
            table.print(console)
        if self.html or self.figure:
            write_bench(found, tables, html=self.html, figure=self.figure)
        return self.records


def default_methods() -> list[str]:
    """All methods but those that compute the same as another on these inputs, and Skeinformer with 32 pilots."""
    names = [name for name, entry in METHODS.items() if entry.same_as is None]
    at = names.index("skeinformer") + 1
    return [*names[:at], "skeinformer:num_pilots=32", *names[at:]]


def sizes_of(options: Bench, n: int) -> Sizes:
    """Return the shape of random inputs of length n."""
    batch = options.long_batch if n >= options.long_from else options.batch
    return Sizes(n, batch, options.heads, options.head_dim, options.dtype, options.device)


def places(options: Bench) -> Iterator[Record]:
    """Yield what distinguishes the inputs, shortest first."""
    pretrained = options.inputs == "pretrained"
    for n in sorted(set(options.lengths or (TEXT_LENGTHS if pretrained else LENGTHS))):
        for layer in options.layers if pretrained else (None,):
            place: Record = sizes_of(options, n).fields
            if pretrained:
                config = models.load_model(options.model).model.config
                heads = int(config.num_attention_heads)
                place |= {"inputs": "pretrained", "layer": layer, "trials": options.trials, "batch": 1}
                place |= {"model": model_name(options.model), "text": text_name(options.text), "dtype": "float32"}
                place |= {"heads": heads, "head_dim": int(config.hidden_size) // heads}
            yield {**place, "threads": torch.get_num_threads(), **({"busy": True} if options.busy else {})}


def settings_of(options: Bench, specs: Sequence[MethodSpec]) -> Iterator[Record]:
    """Yield what identifies each record that the options ask for."""
    modes = options.modes if options.rounds else ("forward",)
    for place in places(options):
        for mode in modes:
            for fields in ([SDPA] if options.rounds else []) + [spec.fields for spec in specs]:
                yield {**fields, **place, "mode": mode}


def measured(options: Bench, specs: Sequence[MethodSpec], records: Sequence[Record], steps: Steps) -> Iterator[Record]:
    """Yield the records of kind "bench" that the options ask for and that do not exist."""
    done = Ledger(IDENTITY, records)
    modes = options.modes if options.rounds else ("forward",)
    history = [record for record in records if record.get("kind") == "bench"]
    speed = cache(partial(matmul_speed, options.dtype, options.device))
    common: Record = {"kind": "bench", "rounds": options.rounds, "seed": options.seed, "started": now(), **machine()}
    for place in places(options):
        missing = {
            mode: [s for s in specs if {**common, **s.fields, **place, "mode": mode} not in done] for mode in modes
        }
        if not any(missing.values()):
            continue
        pieces = inputs_of(options, place, max(int(place.get("trials") or 1), 1))
        errors = {}
        if place.get("inputs"):
            first = list(dict.fromkeys(spec for specs in missing.values() for spec in specs))
            errors = error_fields(first, pieces, options.seed, steps, f"n = {count(place['n'])}")
        for mode in modes:
            title = f"n = {count(place['n'])}, {mode}" + (f", layer {place['layer']}" if place.get("inputs") else "")
            steps(title)
            chosen = {}
            for spec in missing[mode]:
                row = {**spec.fields, **place, "mode": mode, **errors.get(spec, {})}
                row["flops"] = flops_of(spec, row)
                shorter = [r for r in history if key_of(r, SAME) == key_of(row, SAME)] if options.rounds else []
                slow = too_slow(row, shorter, speed, options.max_seconds) if options.rounds else ""
                if reason := row.get("reason") or slow:
                    steps.print(f"Left out: {spec} at {title}: {reason}")
                else:
                    chosen[spec] = row
            sdpa = {**SDPA, **place, "mode": mode}
            sdpa["flops"] = flops_of(MethodSpec("softmax"), sdpa)
            timed = timed_records(chosen, sdpa, pieces[0], options.rounds, steps, title)
            for record in timed if options.rounds else chosen.values():
                history.append({**common, **record})
                yield {**common, **record}


def inputs_of(options: Bench, place: Record, trials: int) -> list[QKV]:
    """Make the queries, keys and values of a place, one triple for each trial."""
    n = int(place["n"] or 0)
    if not place.get("inputs"):
        return [random_inputs(sizes_of(options, n), options.seed, requires_grad=False)]
    pieces = (
        models.pretrained_qkv(n, offset=i * n, layer=int(place["layer"] or 0), text=options.text, model=options.model)
        for i in range(trials)
    )
    return [(q.to(options.device), k.to(options.device), v.to(options.device)) for q, k, v in pieces]


def model_name(model: str | None) -> str:
    """Return what records call the model: no folder of this machine."""
    return "MiniLM" if model is None else Path(model).name


def text_name(text: Path | None) -> str:
    """Return what records call the text."""
    return "Python language reference" if text is None else text.name


def check_text(text: Path | None) -> None:
    """Raise where there is no such file, before anything is loaded."""
    if text is not None and not text.is_file():
        raise FileNotFoundError(f"there is no text {text}")


def result_tables(records: Sequence[Record]) -> list[Table]:
    """Make a table for each mode and layer: method, n, error and time come first."""
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in sorted(records, key=lambda r: int(r["n"] or 0)):
        groups.setdefault(key_of(record, ("mode", "inputs", "layer")), []).append(record)
    columns = {
        "method": named,
        "n": lambda r: count(r.get("n")),
        "error": lambda r: spread_se(r, "error"),
        "time": lambda r: seconds(r.get("seconds")),
        "worst": lambda r: seconds(r.get("seconds_worst")),
        "SDPA / time": lambda r: spread(r, "ratio"),
        "own estimate": lambda r: number(r.get("estimate")),
        "own bound": lambda r: number(r.get("bound")),
        "memory": lambda r: size(r.get("peak_bytes")),
        "multiply-adds": lambda r: number((real(r, "flops") or 0) / 2e6, " M"),
    }
    names = {"forward": "forward", "both": "forward and backward"}
    titles = {key: names[str(key[0])] + (f", pretrained, layer {key[2]}" if key[1] else "") for key in groups}
    return [table_of(titles[key], columns, rows) for key, rows in groups.items()]
