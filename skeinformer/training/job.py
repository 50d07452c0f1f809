"""What a run is: its job, where it stands, and what its records call it."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skeinformer.lab.contenders import Contender
from skeinformer.lra.store import Store, open_store
from skeinformer.records import Record
from skeinformer.training.recipes import CUT, Recipe, as_record, overrides_text


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
    return store


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


def settings(job: Job, store: Store, processes: int) -> dict[str, Any]:
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
        "processes": processes,
    }
