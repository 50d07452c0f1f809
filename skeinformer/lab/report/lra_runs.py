"""Runs of the Long Range Arena from their records: which of them count, and in which row and cell of a table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from skeinformer.checks import lookup
from skeinformer.lab.records import RUN_KEYS, Record, Value
from skeinformer.lab.report.format import label, real
from skeinformer.lab.report.published import PUBLISHED, TASKS

BASELINES = {"bag_of_tokens": "Bag of tokens", "majority": "Majority"}  # trivial models, in the order of their rows


class MethodRuns(NamedTuple):
    """A method with its runs by task, and the tasks that it failed."""

    method: str
    options: str
    label: str
    runs: Mapping[str, Sequence[Record]]
    failed: frozenset[str] = frozenset()


class Arena(NamedTuple):
    """What belongs to the tables of one recipe: runs without overrides, each task's on the same data."""

    recipe: str
    runs: Sequence[Record]
    rows: Sequence[MethodRuns]
    baselines: Sequence[MethodRuns]
    checks: Mapping[tuple[Value, ...], Sequence[Record]] = {}  # by task, method, options and seed

    def curve(self, row: MethodRuns, task: str, seed: Value) -> list[tuple[float, float]]:
        """Step and validation loss of the checks of a run; empty where there are none."""
        checks = self.checks.get((task, row.method, row.options, seed), ())
        points = [(real(check, "step"), real(check, "valid_loss")) for check in checks]
        return [(step, loss) for step, loss in points if step and loss is not None]

    @property
    def stand_in(self) -> bool:
        """Is Retrieval a stand-in?"""
        return any(is_stand_in(run.get("task"), run.get("data")) for run in self.runs)


def is_stand_in(task: Value, data: Value) -> bool:
    """Is this Retrieval from other documents than AAN, those of the published figures?"""
    return task == "retrieval" and "aan" not in str(data or "").lower()


def run_key(record: Record, names: Iterable[str] = RUN_KEYS) -> tuple[Value, ...]:
    """The values of these fields; a missing one is an empty text."""
    return tuple("" if record.get(name) is None else record[name] for name in names)


def check_tasks(records: Iterable[Record]) -> None:
    """A ValueError if the task of a record is none of the arena's."""
    for task in {str(record.get("task")) for record in records}:
        lookup("task of the Long Range Arena", task, TASKS)


def of_kind(records: Iterable[Record], kind: str) -> list[Record]:
    """The records of one kind."""
    return [record for record in records if record.get("kind") == kind]


def latest_started(records: Iterable[Record], names: Sequence[str]) -> list[Record]:
    """Of the records with the same values of these fields the one that started last, else the last one."""
    found: dict[tuple[Value, ...], Record] = {}
    for record in records:
        key = run_key(record, names)
        started = [str(other.get("started") or "") for other in (record, found.get(key, {}))]
        if not all(started) or started[0] >= started[1]:
            found[key] = record
    return list(found.values())


def failed_runs(records: Sequence[Record]) -> list[Record]:
    """The last failure of each run that was not finished afterwards."""
    found: dict[tuple[Value, ...], Record] = {}
    for record in records:
        if record.get("kind") == "lra_failure":
            found[run_key(record)] = record
        elif record.get("kind") in ("lra_run", "lra_baseline"):
            found.pop(run_key(record), None)
    return list(found.values())


def arenas(records: Sequence[Record]) -> list[Arena]:
    """A recipe each, the paper's first; none where a recipe has only runs with overrides, or unfinished ones."""
    runs = split_runs(records)[0]
    checks = [check for check in of_kind(records, "lra_check") if not check.get("overrides")]
    failures = [r for r in failed_runs(records) if not r.get("overrides") and r.get("method") not in BASELINES]
    sources = {run_key(run, ("recipe", "task")): run.get("data") for run in runs}
    baselines = [
        record
        for record in latest_started(of_kind(records, "lra_baseline"), (*RUN_KEYS, "data"))
        if not record.get("overrides")
        and record.get("data") in (None, sources.get(run_key(record, ("recipe", "task")), record.get("data")))
    ]
    found = []
    for recipe in recipes([*runs, *failures, *baselines]):
        mine, failed, trivial = ([r for r in group if of_recipe(r, recipe)] for group in (runs, failures, baselines))
        looks = curves(check for check in checks if of_recipe(check, recipe))
        by_run = {run_key(look[-1], ("task", "method", "options", "seed")): look for look in looks}
        found.append(Arena(recipe, mine, _method_rows(mine, failed), _baseline_rows(mine, trivial), by_run))
    return found


def recipes(records: Iterable[Record]) -> list[str]:
    """The recipes of these records, the paper's first."""
    return sorted({str(record.get("recipe")) for record in records}, key=lambda recipe: (recipe != "paper", recipe))


def of_recipe(record: Record, recipe: str) -> bool:
    """Does the record belong to the recipe?"""
    return str(record.get("recipe")) == recipe


def split_runs(records: Iterable[Record]) -> tuple[list[Record], list[Record]]:
    """The runs that belong to the tables of their recipe, and the others.

    Those without overrides belong to them, on the data that most such runs of a task had; of several, on the last.
    """
    runs = latest_started(of_kind(records, "lra_run"), (*RUN_KEYS, "data"))
    counts: dict[tuple[Value, ...], dict[Value, int]] = {}
    for run in runs:
        if not run.get("overrides"):
            sources = counts.setdefault(run_key(run, ("recipe", "task")), {})
            sources[run.get("data")] = sources.pop(run.get("data"), 0) + 1  # at the end: the last one seen
    main = {key: max(reversed(sources), key=sources.__getitem__) for key, sources in counts.items()}
    pure: list[Record] = []
    others: list[Record] = []
    for run in runs:
        belongs = not run.get("overrides") and run.get("data") == main[run_key(run, ("recipe", "task"))]
        (pure if belongs else others).append(run)
    return pure, others


def grouped(
    records: Iterable[Record], key: Callable[[Record], tuple[Value, ...]]
) -> dict[tuple[Value, ...], list[Record]]:
    """The records by their key, in order."""
    found: dict[tuple[Value, ...], list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def curves(checks: Iterable[Record]) -> list[list[Record]]:
    """The checks of each run by step. What a repeated or resumed run checks again replaces the earlier checks."""
    found = []
    for group in grouped(checks, run_key).values():
        kept: list[Record] = []
        for check in group:
            step = real(check, "step") or 0.0
            kept = [*(earlier for earlier in kept if (real(earlier, "step") or 0.0) < step), check]
        found.append(kept)
    return found


def by_seed(runs: Iterable[Record], field: str) -> dict[Value, float]:
    """The field's number of each seed, of the runs that have one."""
    return {run.get("seed"): value for run in runs if (value := real(run, field)) is not None}


def numbers_of(runs: Iterable[Record], field: str) -> list[float]:
    """The field's numbers, of the runs that have one."""
    return [value for run in runs if (value := real(run, field)) is not None]


def _method_rows(runs: Sequence[Record], failures: Sequence[Record]) -> list[MethodRuns]:
    """A row for each method and options, in the paper's order; those that it has not come last."""
    rows = []
    for (method, options), group in grouped([*runs, *failures], lambda r: run_key(r, ("method", "options"))).items():
        failed = {str(r.get("task")) for r in group if r.get("kind") == "lra_failure"}
        rows.append(MethodRuns(str(method), str(options), label(group[-1]), _by_task(group), frozenset(failed)))
    order = list(PUBLISHED)
    return sorted(rows, key=lambda row: (order.index(row.method) if row.method in order else len(order), row.options))


def _baseline_rows(runs: Sequence[Record], baselines: Sequence[Record]) -> list[MethodRuns]:
    """The trivial models. The majority of a task without such a record is what the runs say of their test set."""
    known = {run.get("task") for run in baselines if run.get("method") == "majority"}
    shares: dict[Value, Record] = {
        run.get("task"): {**run, "kind": "lra_baseline", "test_accuracy": run["majority"], "seed": None}
        for run in runs
        if run.get("majority") is not None and run.get("task") not in known
    }
    found = {
        str(method): group
        for (method,), group in grouped(
            [*baselines, *({**share, "method": "majority"} for share in shares.values())],
            lambda r: run_key(r, ("method",)),
        ).items()
    }
    order = [*BASELINES, *(method for method in found if method not in BASELINES)]
    return [
        MethodRuns(method, "", BASELINES.get(method) or label(found[method][0]), _by_task(found[method]))
        for method in order
        if method in found
    ]


def _by_task(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of what was measured, by task."""
    measured = [record for record in records if record.get("kind") != "lra_failure"]
    return {str(task): group for (task,), group in grouped(measured, lambda r: run_key(r, ("task",))).items()}
