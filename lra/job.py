"""What a run is: its job, its folder, and what its records call it."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import nn

from lra.data.listops import ListOpsSettings
from lra.data.prepare import GENERATOR
from lra.data.snakes import PathfinderSettings
from lra.data.store import META, Meta, Store, open_store
from lra.memory import parse_bytes
from lra.model import BagOfTokens, Classifier, ModelConfig, PairClassifier
from lra.options import Overrides, Train
from lra.parallel import check_sequence_parallel
from lra.recipes import TRUNCATABLE_TASKS, Recipe, generator_options, get_recipe, overrides_text
from lra.records import RESULT_KINDS, Record
from skeinformer.checks import check_count
from skeinformer.cli.records import read
from skeinformer.cli.specs import MethodSpec, parse

SETTINGS, RECORDS, MODEL = "run.json", "records.jsonl", "model"


class WithoutAttention(MethodSpec):
    """A model without attention: it has no row in METHODS, no options and no budget."""

    label = "Bag of tokens"
    takes_budget = False


BAG_OF_TOKENS = WithoutAttention("bag_of_tokens")


@dataclass(frozen=True)
class Job:
    """What to train, on what, and where to."""

    recipe: Recipe
    method: MethodSpec
    data: Path
    out: Path
    seed: int = 0
    resume: bool = False
    memory_budget: int | None = None
    micro_batch: int | None = None
    precision: str = "float32"
    compile: bool = False
    sequence_parallel: int = 1

    @property
    def sized(self) -> MethodSpec:
        """The method with the recipe's budget, where that changes anything."""
        return self.method.at((self.recipe.budget,))[0]


def parse_method(text: str) -> MethodSpec:
    """Read a method of METHODS with its options, or the model without attention."""
    name, _, options = text.strip().partition(":")
    if name != BAG_OF_TOKENS.method:
        return parse(text)
    if options:
        raise ValueError(f"{name} has no options; got {text!r}")
    return BAG_OF_TOKENS


def job_of(options: Train) -> Job:
    """Return the job that the options describe; a ValueError names an option that is wrong."""
    check_count("seed", options.seed, 0)
    if options.micro_batch is not None:
        check_count("micro_batch", options.micro_batch)
        if options.memory_budget is not None:
            raise ValueError("give --micro-batch or --memory-budget, not both")
    method = parse_method(options.method)
    check_sequence_parallel(method.method, options.sequence_parallel)
    name = method.name.translate(str.maketrans(":=,", "---"))
    return Job(
        recipe=recipe_of(options, options.recipe, options.task),
        method=method,
        data=store_folder(options.data, options.task),
        out=options.out or Path("runs") / f"{options.task}-{name}-{options.seed}",
        seed=options.seed,
        resume=options.resume,
        memory_budget=None if options.memory_budget is None else parse_bytes(options.memory_budget),
        micro_batch=options.micro_batch,
        precision=options.precision,
        compile=options.compile,
        sequence_parallel=options.sequence_parallel,
    )


def recipe_of(options: Overrides, name: str, task: str) -> Recipe:
    """Return the recipe with the numbers that the options replace."""
    return get_recipe(name, task, **{field.name: getattr(options, field.name) for field in fields(Overrides)})


def store_folder(data: Path, task: str) -> Path:
    """Return `data` itself if it is a store, else the folder in it with the name of the task."""
    return data if (data / META).is_file() else data / task


def result_of(job: Job) -> Record | None:
    """Return the result in the job's folder, if there is one; a ValueError where the folder has another run."""
    path = job.out / SETTINGS
    if not path.is_file():
        return None
    try:
        before = {"sequence_parallel": 1, **json.loads(path.read_bytes())}  # which older runs do not have
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}); remove {job.out} to start this run from step 0, or give another --out"
        ) from None
    settings = settings_of(job, open_task(job))
    for name in sorted(settings):
        if before.get(name) != settings[name]:
            raise ValueError(
                f"{job.out} holds a run with {name}={before.get(name)!r}, not {settings[name]!r}; give another --out"
            )
    results = [record for record in read(job.out / RECORDS, missing_ok=True) if record.get("kind") in RESULT_KINDS]
    return results[-1] if results else None


def open_task(job: Job) -> Store:
    """Open the store, which must be of the recipe's task and no longer than it reads, unless it may be cut."""
    store = open_store(job.data)
    recipe, meta = job.recipe, store.meta
    if meta.task != recipe.task:
        raise ValueError(f"{job.data} holds the task {meta.task}, not {recipe.task}")
    longest = max(int(store.split(name).lengths.max()) for name in meta.splits)
    if recipe.task not in TRUNCATABLE_TASKS and longest > recipe.max_len:
        raise ValueError(
            f"{job.data} has sequences of {longest} tokens, but this recipe reads {recipe.max_len}:"
            f" prepare shorter ones, or give --max-len {longest}"
        )
    if meta.source == GENERATOR and (difference := generator_difference(recipe, meta)):
        name, value, expected = difference
        also = f", or give --max-len {value}" if name == "max_len" else ""
        raise ValueError(
            f"{job.data} was generated with {name}={value!r}, the recipe {recipe.name} has {expected!r}:"
            f" prepare another store, or let python -m lra run do it in another --data folder{also}"
        )
    return store


def generator_difference(recipe: Recipe, meta: Meta) -> tuple[str, object, object] | None:
    """Return the first setting in which a generated store differs from the recipe's: name, value, the recipe's value.

    Expressions may be as long as the recipe's own, or as long as what is read.
    """
    default = asdict(ListOpsSettings() if recipe.task == "listops" else PathfinderSettings())
    stored = {**meta.options, "max_len": meta.max_len}
    wanted = generator_options(recipe)
    for name, value in {**default, **{name: wanted[name] for name in default if name in wanted}}.items():
        allowed = {value, recipe.max_len, recipe.data.get(name, default[name])} if name == "max_len" else {value}
        if name in stored and stored[name] not in allowed:
            return name, stored[name], value
    return None


def data_checksum(store: Store) -> str:
    """Return what records call the training data by."""
    return store.meta.checksums["train.tokens.npy"][:16]


def run_fields(job: Job) -> Record:
    """Return the fields that tell a run from others, in each of its records."""
    return {
        "recipe": job.recipe.name,
        "task": job.recipe.task,
        "method": job.method.method,
        "options": job.method.options_text,
        "label": job.method.label,
        "seed": job.seed,
        "overrides": overrides_text(job.recipe),
    }


def settings_of(job: Job, store: Store) -> dict[str, Any]:
    """Return all that decides a run's numbers: a resumed run must agree in it."""
    return {
        **{field.name: getattr(job.recipe, field.name) for field in fields(Recipe)},
        "method": job.method.name,
        "seed": job.seed,
        "checksums": store.meta.checksums,
        "memory_budget": job.memory_budget,
        "micro_batch": job.micro_batch,
        "precision": job.precision,
        "compile": job.compile,
        "sequence_parallel": job.sequence_parallel,
    }


def make_model(job: Job, meta: Meta) -> nn.Module:
    """Make a new model for the store that `meta` describes."""
    recipe, method = job.recipe, job.sized
    if method == BAG_OF_TOKENS:
        return BagOfTokens(meta.vocab_size, meta.num_classes, meta.sequences)
    budget, options = method.settings()
    config = ModelConfig(
        vocab_size=meta.vocab_size,
        num_classes=meta.num_classes,
        max_len=recipe.max_len,
        method=method.method,
        budget=budget,
        options=options,
        num_layers=recipe.num_layers,
        dim=recipe.dim,
        num_heads=recipe.num_heads,
        feedforward_dim=recipe.feedforward_dim,
        classifier_dim=recipe.classifier_dim,
        dropout=recipe.dropout,
        seed=job.seed,
    )
    return PairClassifier(config) if meta.sequences == 2 else Classifier(config)
