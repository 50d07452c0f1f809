"""Records of the Long Range Arena as a trainer writes them, made up: no two tasks, methods or seeds score the same."""

from functools import cache

from skeinformer.lab.contender import parse
from skeinformer.lab.records import Record
from skeinformer.lab.report.published import TASKS
from tests.lab.report.synthetic import MACHINE

BATCHES = {"text": 128, "listops": 256, "retrieval": 64, "pathfinder": 512, "image": 256}
DATA = {
    "text": "imdb.parquet",
    "listops": "generator",
    "retrieval": "new_aan_pairs.tsv",
    "pathfinder": "generator",
    "image": "gray.npy.xz",
}
METHODS = ("softmax", "vmean", "skeinformer", "skeinformer:num_pilots=32")


parsed = cache(parse)


def place(spec: str) -> float:
    """What makes a method differ from the others; V-mean is behind all of them."""
    if spec == "vmean":
        return -9
    return METHODS.index(spec) if spec in METHODS else len(spec) / 7


def names(kind: str, spec: str, task: str, seed: int, recipe: str, overrides: str = "") -> Record:
    contender = parsed(spec)
    return {
        "kind": kind,
        "recipe": recipe,
        "task": task,
        "method": contender.method,
        "options": contender.options_text,
        "label": contender.label,
        "seed": seed,
        "overrides": overrides,
    }


def run_record(
    spec: str, task: str, seed: int = 0, *, recipe: str = "cpu", overrides: str = "", **fields: object
) -> Record:
    """A finished run. `fields` replace what is made up."""
    steps = 2000 + 500 * seed
    made_up: Record = {
        "data": DATA[task],
        "n": 1024,
        "budget": 256,
        "batch": BATCHES[task],
        "micro_batch": BATCHES[task] // 2,
        "accumulation": 2,
        "memory_budget": 2**30,
        "learning_rate": 1e-4,
        "max_steps": 10_000,
        "steps": steps,
        "best_step": 1500,
        "stopped": "patience",
        "seconds": 0.06 * steps,
        "cpu_seconds": 0.12 * steps,
        "seconds_total": 0.07 * steps,
        "seconds_per_thousand_steps": 60.0,
        "valid_accuracy": 0.6,
        "valid_loss": 0.65,
        "test_accuracy": 0.5 + 0.05 * list(TASKS).index(task) + 0.007 * place(spec) + 0.01 * seed,
        "test_loss": 0.66,
        "test_examples": 2000,
        "majority": 0.5,
        "parameters": 300_000,
        "peak_bytes": 2**29,
        "examples_seen": steps * BATCHES[task],
        "processes": 1,
        "device": "cpu",
        "precision": "float32",
        "error_layer_0": 0.2,
        **MACHINE,
    }
    changes = {name: value for name, value in fields.items() if isinstance(value, str | int | float | None)}
    return {**names("lra_run", spec, task, seed, recipe, overrides), **made_up, **changes}


def check_records(spec: str, task: str, seed: int = 0, *, recipe: str = "cpu", checks: int = 5) -> list[Record]:
    """The checks of a run: losses that fall."""
    slow = 1 + (METHODS.index(spec) if spec in METHODS else len(spec) / 7)
    return [
        {
            **names("lra_check", spec, task, seed, recipe),
            "step": 500 * i,
            "loss": 0.7 / (1 + 0.1 * i),
            "valid_loss": 0.7 / (1 + 0.05 * i) + 0.01 * slow,
            "valid_accuracy": 0.5 + 0.01 * i,
            "seconds": 90.0 * i * slow,
            "cpu_seconds": 30.0 * i * slow,
        }
        for i in range(1, checks + 1)
    ]


def baseline_record(method: str, task: str, accuracy: float, *, recipe: str = "cpu") -> Record:
    return {
        "kind": "lra_baseline",
        "recipe": recipe,
        "task": task,
        "method": method,
        "label": method.replace("_", " "),
        "seed": 0,
        "test_accuracy": accuracy,
        "test_examples": 2000,
    }


def failure_record(spec: str, task: str, seed: int = 0, *, recipe: str = "cpu", error: str = "out of memory") -> Record:
    return {**names("lra_failure", spec, task, seed, recipe), "error": error}


def lra_records(
    specs: tuple[str, ...] = METHODS,
    *,
    tasks: tuple[str, ...] = tuple(TASKS),
    seeds: tuple[int, ...] = (0, 1, 2),
    recipe: str = "cpu",
) -> list[Record]:
    """Runs, checks and baselines of a recipe."""
    rows: list[Record] = []
    for task in tasks:
        rows.append(baseline_record("bag_of_tokens", task, 0.45, recipe=recipe))
        rows.append(baseline_record("majority", task, 0.4, recipe=recipe))
        for spec in specs:
            for seed in seeds:
                rows += check_records(spec, task, seed, recipe=recipe)
                rows.append(run_record(spec, task, seed, recipe=recipe))
    return rows


def study_records(recipe: str = "cpu") -> list[Record]:
    """Skeinformer on Text with other batches and learning rates than the recipe's 128 and 1e-4."""
    return [
        run_record(
            "skeinformer",
            "text",
            recipe=recipe,
            overrides=f"batch={batch}, learning_rate={rate}",
            batch=batch,
            learning_rate=rate,
            test_accuracy=0.6 + 0.001 * batch - 10 * rate,
        )
        for batch in (64, 128)
        for rate in (1e-3, 1e-4, 1e-5)
        if (batch, rate) != (128, 1e-4)
    ]
