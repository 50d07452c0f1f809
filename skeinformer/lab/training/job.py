"""What a run is: its job, where it stands, and what its records call it."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from skeinformer.compare.contender import Contender
from skeinformer.lab.lra.listops import ListOpsSettings
from skeinformer.lab.lra.snakes import PathfinderSettings
from skeinformer.lab.lra.store import Meta, Store, open_store
from skeinformer.lab.records import Record, read
from skeinformer.lab.training.recipes import CUT, Recipe, as_record, overrides_text

RUN, RECORDS, MODEL = "run.json", "records.jsonl", "model"
GENERATOR = "generator"  # the source of a store that `skein data` generated


@dataclass(frozen=True)
class Job:
    """What to train, on what, and where to."""

    recipe: Recipe
    method: Contender
    data: Path
    out: Path
    seed: int = 0
    resume: bool = False
    memory_budget: int | None = None
    micro_batch: int | None = None
    precision: str = "float32"
    compile: bool = False


@dataclass
class Progress:
    """Where a run stands; with the weights and the optimizer, all that a checkpoint holds."""

    step: int = 0
    best_step: int = 0
    best_accuracy: float = -1.0
    best_loss: float = math.inf
    checks_since_best: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    check_seconds: float = 0.0
    examples: int = 0
    micro_batch: int = 0
    started: str = ""
    records: list[Record] = field(default_factory=list)


class Watch:
    """What is told of a run while it goes on; this one does nothing."""

    def begin(self, title: str, steps: int, done: int) -> None: ...
    def step(self, step: int) -> None: ...
    def stage(self, text: str) -> None: ...
    def check(self, record: Record) -> None: ...


def result_of(job: Job) -> Record | None:
    """The result in the job's folder, if it holds one; a ValueError where it holds another run."""
    path, records = job.out / RUN, job.out / RECORDS
    if not path.is_file():
        return None
    try:
        before = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read; give another --out") from error
    now = settings(job, open_task(job))
    if differing := sorted(name for name in now if before.get(name) != now[name]):
        name = differing[0]
        raise ValueError(
            f"{job.out} holds a run with {name}={before.get(name)!r}, not {now[name]!r}; give another --out"
        )
    found = [r for r in read(records) if r["kind"] in ("lra_run", "lra_baseline")] if records.is_file() else []
    return found[-1] if found else None


def open_task(job: Job) -> Store:
    """The store, which must be of the recipe's task and no longer than it reads, unless it may be cut."""
    store = open_store(job.data)
    recipe, meta = job.recipe, store.meta
    if meta.task != recipe.task:
        raise ValueError(f"{job.data} holds the task {meta.task}, not {recipe.task}")
    longest = max(int(store.split(name).lengths.max()) for name in meta.splits)
    if recipe.task not in CUT and longest > recipe.max_len:
        raise ValueError(
            f"{job.data} has sequences of {longest} tokens, but this recipe reads {recipe.max_len}:"
            f" prepare shorter ones, or give --max-len {longest}"
        )
    if meta.source == GENERATOR and (differing := generated_otherwise(recipe, meta)):
        raise ValueError(
            f"{job.data} was generated with {differing[0]}={differing[1]!r}, the recipe {recipe.name} has"
            f" {differing[2]!r}: prepare another store, or let skein lra do it in another --data folder"
        )
    return store


def generated_otherwise(recipe: Recipe, meta: Meta) -> tuple[str, object, object] | None:
    """The first setting in which a generated store differs from the recipe's: its name, value, and the recipe's."""
    default = asdict(ListOpsSettings() if recipe.task == "listops" else PathfinderSettings())
    found = {**meta.options, "max_len": meta.max_len}
    for name, value in {**default, **{name: recipe.data[name] for name in default if name in recipe.data}}.items():
        if name in found and found[name] != value:
            return name, found[name], value
    return None


def identity(job: Job) -> Record:
    """What tells a run from others, in each of its records."""
    return {
        "recipe": job.recipe.name,
        "task": job.recipe.task,
        "method": job.method.method,
        "options": job.method.options_text,
        "label": job.method.label,
        "seed": job.seed,
        "overrides": overrides_text(job.recipe),
    }


def settings(job: Job, store: Store) -> dict[str, Any]:
    """All that decides a run's numbers: a resumed run must agree in it."""
    return {
        **as_record(job.recipe),
        "method": job.method.spec,
        "seed": job.seed,
        "checksums": store.meta.checksums,
        "memory_budget": job.memory_budget,
        "micro_batch": job.micro_batch,
        "precision": job.precision,
        "compile": job.compile,
    }
