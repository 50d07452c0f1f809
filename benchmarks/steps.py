"""A training step of the Long Range Arena's Text model with each attention, and with exact attention.

python -m benchmarks.steps --methods vmean skeinformer skeinformer:num_pilots=32 --rounds 15
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from torch.nn import functional as F

from benchmarks.common import EXACT, check_options, start
from lra.model import Classifier, ModelConfig
from skeinformer.cli.bench import default_methods
from skeinformer.cli.measure import Action, peak_memory, threads, time_fields, timed_rounds
from skeinformer.cli.progress import Steps, show_steps
from skeinformer.cli.records import Ledger, Record, append, machine, now, read
from skeinformer.cli.specs import MethodSpec, parse_all
from skeinformer.cli.tables import count, label, seconds, size, spread, table_of

VOCABULARY, CLASSES = 256, 2  # bytes; labels
IDENTITY = ("kind", "method", "options", "n", "batch", "budget", "dtype", "threads")


@dataclass(frozen=True)
class TrainingSteps:
    """Time forward, loss, backward and AdamW on random bytes, all of them real, with each attention."""

    lengths: tuple[int, ...] = (4096,)
    """Sequence lengths, in tokens."""
    methods: tuple[str, ...] = ()
    """Methods, with options as in skeinformer:num_pilots=32. Default: all."""
    batch: int = 4
    """Sequences in a batch."""
    budgets: tuple[int, ...] = (256,)
    """Sketch sizes d."""
    rounds: int = 7
    """Rounds in which each method is timed."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""
    seed: int = 0
    """Seed of the weights and the bytes."""
    records: Path = Path("steps/records.jsonl")
    """File that records are appended to, one JSON line each."""

    def run(self, console: Console | None = None) -> None:
        """Measure what is missing in the records file, and print a table."""
        counts = {"lengths": 1, "batch": 1, "budgets": 1, "rounds": 1, "seed": 0}
        check_options(self, counts, ("lengths", "budgets"))
        console = console or Console(highlight=False)
        records = read(self.records, missing_ok=True)
        specs = [spec for method in parse_all(self.methods or default_methods()) for spec in method.at(self.budgets)]
        with threads(self.threads), show_steps(console) as steps:
            for n in self.lengths:
                for record in step_records(self, specs, n, tuple(records), steps):
                    append(self.records, record)
                    records.append(record)
        columns: dict[str, Callable[[Record], str]] = {
            "method": label,
            "n": lambda r: count(r.get("n")),
            "time": lambda r: seconds(r.get("seconds")),
            "exact / its time": lambda r: spread(r, "ratio"),
            "memory": lambda r: size(r.get("peak_bytes")),
        }
        table_of("", columns, [r for r in records if r.get("kind") == "bench_step"]).print(console)


def step_records(
    options: TrainingSteps, specs: Sequence[MethodSpec], n: int, present: Sequence[Record], steps: Steps
) -> Iterator[Record]:
    """Yield records of kind "bench_step": `ratio` is the time with exact attention over that with the method."""
    done = Ledger(IDENTITY, present)
    common: Record = {"kind": "bench_step", "n": n, "batch": options.batch, "dtype": "float32"}
    common["threads"] = torch.get_num_threads()
    missing = [spec for spec in dict.fromkeys((EXACT, *specs)) if {**common, **spec.fields} not in done]
    if not missing:
        return
    field = dict.fromkeys((EXACT, *missing))
    runs, peaks = dict[str, Action](), dict[str, int]()
    for spec in field:
        steps(f"n = {n:,}: memory of {spec}")
        runs[str(spec)] = training_step(spec, n, options.batch, options.seed)
        peaks[str(spec)] = peak_memory(runs[str(spec)])
    steps(f"n = {n:,}: times in {options.rounds} rounds")
    times = timed_rounds(runs, options.rounds)
    for spec in missing:
        yield {
            **common,
            **spec.fields,
            **time_fields(times[str(spec)], times[str(EXACT)], times[str(spec)]),
            "peak_bytes": peaks[str(spec)],
            "rounds": options.rounds,
            "seed": options.seed,
            "started": now(),
            **machine(),
        }


def training_step(spec: MethodSpec, n: int, batch: int, seed: int = 0) -> Action:
    """A step of the paper's model for Text, as a function without arguments; it changes the weights every time."""
    size, options = spec.settings()
    config = ModelConfig(
        vocab_size=VOCABULARY, num_classes=CLASSES, max_len=n, method=spec.method, budget=size, options=options
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Classifier(config).train()
        tokens, labels = torch.randint(VOCABULARY, (batch, n)), torch.randint(CLASSES, (batch,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    mask = torch.ones(batch, n, dtype=torch.bool)

    def run() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(tokens, mask), labels))
        optimizer.step()

    return run


if __name__ == "__main__":
    sys.exit(start(TrainingSteps))
