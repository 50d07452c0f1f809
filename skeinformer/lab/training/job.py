"""What a run is: its job, where it stands, and what its records call it."""

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from skeinformer.attention import METHODS
from skeinformer.attention.table import no_group
from skeinformer.checks import check_count, lookup
from skeinformer.lab.contender import Contender, parse
from skeinformer.lab.fields import from_json
from skeinformer.lab.files import LONGEST_JSON, parse_json, read_at_most
from skeinformer.lab.lra.listops import ListOpsSettings
from skeinformer.lab.lra.snakes import PathfinderSettings
from skeinformer.lab.lra.store import META, Meta, Store, open_store
from skeinformer.lab.records import Record, check, read
from skeinformer.lab.training.memory import parse_bytes
from skeinformer.lab.training.options import Overrides, Train
from skeinformer.lab.training.recipes import CUT, Recipe, as_record, generator_options, overrides_text, recipe

BAG_OF_TOKENS = "bag_of_tokens"
RUN, RECORDS, MODEL = "run.json", "records.jsonl", "model"
ENDS = ("lra_run", "lra_baseline")  # the records of a result
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
    sequence_parallel: int = 1
    """Processes among which each sequence is divided."""


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
    compile_seconds: float = 0.0
    check_seconds: float = 0.0
    examples: int = 0
    micro_batch: int = 0
    started: str = ""
    records: list[Record] = field(default_factory=list)


def read_progress(checkpoint: Path, data: object, chosen: Recipe) -> Progress:
    """The progress in a checkpoint. A ValueError names the file and the field that cannot be of this run."""
    place = checkpoint / "state.json"
    anew = f"; remove the folder {checkpoint} to start this run anew"
    try:
        found = from_json(Progress, data, place, complete=True)
        for record in found.records:
            check(record)
        limits = {"step": (1, chosen.steps), "best_step": (0, found.step), "micro_batch": (1, chosen.batch)}
        for name, (least, most) in limits.items():
            if not least <= getattr(found, name) <= most:
                raise ValueError(f"{place}, field {name!r} is {getattr(found, name)}, expected {least} to {most}")
        if checkpoint.name != f"checkpoint-{found.step}":
            raise ValueError(f"{place}, field 'step' is {found.step}, which is not that of its folder")
    except ValueError as error:
        named = str(error) if str(place) in str(error) else f"{place}, field 'records': {error}"
        raise ValueError(f"{named}{anew}") from None
    return found


def method_of(spec: str) -> Contender:
    """A method and its options from `name:option=value`; `bag_of_tokens` is one without attention.

    The model is built from METHODS: a contender that another module offers to `skein approx` is not known here.
    """
    name = spec.strip().partition(":")[0]
    lookup("attention", name, {**METHODS, BAG_OF_TOKENS: None})
    if name != BAG_OF_TOKENS:
        return parse(spec)
    if spec.strip() != name:
        raise ValueError(f"{BAG_OF_TOKENS} has no options; got {spec!r}")
    return Contender(name)


def job_of(options: Train) -> Job:
    """The job that the options describe, checked."""
    if options.micro_batch is not None:
        check_count("micro_batch", options.micro_batch)
        if options.memory_budget is not None:
            raise ValueError("give --micro-batch or --memory-budget, not both")
    method = method_of(options.method)
    check_degree(method.method, options.sequence_parallel)
    chosen = recipe_of(options, options.recipe, options.task)
    name = method.spec.replace(":", "-").replace("=", "-").replace(",", "-")
    return Job(
        recipe=chosen,
        method=method,
        data=store_of(options.data, options.task),
        out=options.out or Path("runs") / f"{options.task}-{name}-{options.seed}",
        seed=options.seed,
        resume=options.resume,
        memory_budget=None if options.memory_budget is None else parse_bytes(options.memory_budget),
        micro_batch=options.micro_batch,
        precision=options.precision,
        compile=options.compile,
        sequence_parallel=options.sequence_parallel,
    )


def check_degree(method: str, degree: int) -> None:
    """Raise where a method cannot have its sequences divided among so many processes."""
    check_count("sequence_parallel", degree)
    if degree > 1 and (method not in METHODS or not METHODS[method].sequence_parallel):
        raise ValueError(f"--sequence-parallel {degree}: {no_group(method)}")


def recipe_of(options: Overrides, name: str, task: str) -> Recipe:
    """The recipe with what the options replace."""
    return recipe(name, task, **{field.name: getattr(options, field.name) for field in fields(Overrides)})


def store_of(data: Path, task: str) -> Path:
    """`data` itself if it is a store, else the folder in it that is called like the task."""
    return data if (data / META).is_file() else data / task


def result_of(job: Job) -> Record | None:
    """The result in the job's folder, if it holds one; a ValueError where it holds another run."""
    path, records = job.out / RUN, job.out / RECORDS
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            content = read_at_most(file, LONGEST_JSON, path)
        before = {"sequence_parallel": 1, **parse_json(content, path)}  # which older runs do not tell
    except ValueError as error:
        raise ValueError(
            f"{error}; remove the folder {job.out} to start this run anew, or give another --out"
        ) from None
    now = settings(job, open_task(job))
    if differing := sorted(name for name in now if before.get(name) != now[name]):
        name = differing[0]
        raise ValueError(
            f"{job.out} holds a run with {name}={before.get(name)!r}, not {now[name]!r}; give another --out"
        )
    found = [r for r in read(records) if r.get("kind") in ENDS] if records.is_file() else []
    return found[-1] if found else None


def open_task(job: Job) -> Store:
    """The store, which must be of the recipe's task and no longer than it reads, unless it may be cut."""
    store = open_store(job.data)
    chosen, meta = job.recipe, store.meta
    if meta.task != chosen.task:
        raise ValueError(f"{job.data} holds the task {meta.task}, not {chosen.task}")
    longest = max(int(store.split(name).lengths.max()) for name in meta.splits)
    if chosen.task not in CUT and longest > chosen.max_len:
        raise ValueError(
            f"{job.data} has sequences of {longest} tokens, but this recipe reads {chosen.max_len}:"
            f" prepare shorter ones, or give --max-len {longest}"
        )
    if meta.source == GENERATOR and (differing := generated_otherwise(chosen, meta)):
        name, found, expected = differing
        also = f", or give --max-len {found}" if name == "max_len" else ""
        raise ValueError(
            f"{job.data} was generated with {name}={found!r}, the recipe {chosen.name} has {expected!r}:"
            f" prepare another store, or let skein lra do it in another --data folder{also}"
        )
    return store


def generated_otherwise(chosen: Recipe, meta: Meta) -> tuple[str, object, object] | None:
    """The first setting in which a generated store differs from the recipe's: its name, value, and the recipe's.

    Expressions may be as long as the recipe's own, or as long as what is read: `--max-len` of `skein data` and of
    `skein train` agree.
    """
    default = asdict(ListOpsSettings() if chosen.task == "listops" else PathfinderSettings())
    found = {**meta.options, "max_len": meta.max_len}
    made = generator_options(chosen)
    for name, value in {**default, **{name: made[name] for name in default if name in made}}.items():
        allowed = {value, chosen.max_len, chosen.data.get(name, default[name])} if name == "max_len" else {value}
        if name in found and found[name] not in allowed:
            return name, found[name], value
    return None


def tokens_checksum(store: Store) -> str:
    """What records call the training data by."""
    return store.meta.checksums.get("train.tokens.npy", "")[:16]


def run_fields(job: Job) -> Record:
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
        "sequence_parallel": job.sequence_parallel,
    }
