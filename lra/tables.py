"""The paper's Tables 1 to 4 with our numbers, what of its claims holds, the study of batch and learning rate.

A recipe has tables of its own, each marked with its name. All are one text of Markdown.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import pandas as pd

from lra.cells import (
    SUMMARY,
    TABLES,
    TEST_ACCURACY,
    TOTAL,
    Cell,
    Measure,
    escape,
    interval_text,
    joined,
    percent,
    seeds_text,
    table,
)
from lra.claims import (
    ACCURACY,
    CLAIMS,
    EXACT,
    WITHOUT_ATTENTION,
    Difference,
    Quantity,
    TaskSensitivity,
    differences,
    over_tasks,
    pair,
    sensitive_tasks,
    sensitivities,
)
from lra.intervals import mean_share_interval
from lra.options import default_methods
from lra.records import Record
from lra.results import (
    TASK_NAMES,
    RecipeResults,
    Row,
    failed_runs,
    is_stand_in,
    published,
    published_methods,
    recipes,
    results_by_recipe,
    split_runs,
    to_frame,
)
from skeinformer.attention import METHODS
from skeinformer.cli.tables import size

MARK = "†"
STUDIED = {"batch", "learning_rate"}  # the overrides of the study
STAND_IN = "stand-in, not comparable with the published figures"
RECIPES = {
    "paper": "The paper's recipe. The published times are of a Tesla V100, ours of the machine named at the end.",
    "cpu": (
        "A recipe made for processors, with its settings below; it is not the paper's. Compare the methods within "
        "a table: the distance to the published figures is also that of the recipes."
    ),
}
LEGEND = (
    "docs/lra.md says how to read these tables. Published: the figures of Chen et al. (2022). In bold: the best of a "
    "column, without the trivial models. A dash: no run."
)
TASKS_NOTE = "Points by which exact attention is ahead of models that do not attend, ± the standard error."
PAIRED_NOTE = (
    "The mean over the seeds that a method has in common with Standard, exact attention, and its 95 % interval. One "
    "seed has no interval and settles nothing."
)
CLAIMS_NOTE = (
    "The paper's Standard has dropout on its weights. The ablations of sampling and of row normalization are without "
    "pilot reutilization too."
)


def markdown(records: Sequence[Record]) -> str:
    """Return all tables as the text of a Markdown file; a ValueError where there is none.

    Args:
        records: Records of training runs, of any recipes and seeds; other kinds are left out.

    Returns:
        The text.

    Raises:
        ValueError: No table shows these records, or the task of one is unknown.
    """
    frame = to_frame(records)
    parts = []
    for results in results_by_recipe(frame):
        parts += [f"## Recipe `{results.recipe}`", *_recipe_tables(results)]
    if study := study_tables(frame):
        parts += ["## Skeinformer on Text: batch and learning rate", *study]
    if others := other_tables(frame):
        parts += ["## Runs with other settings", *others]
    if not parts:
        raise ValueError("no table of the Long Range Arena shows these records; finish a run of it first")
    if len(failures := failed_runs(frame)):
        parts += ["## Failed runs", "\n".join(f"- {escape(_failure(run))}" for run in failures.itertuples())]
    head = ["<!-- written by python -m lra report -->", "# The Long Range Arena", escape(LEGEND)]
    return "\n\n".join([*head, *parts, "## How it was made", _made_by(frame)]) + "\n"


def _recipe_tables(results: RecipeResults) -> list[str]:
    """Return the notes and the tables of a recipe."""
    there = {row.method for row in results.rows if not row.options}
    wanted = dict.fromkeys((*published_methods(), *default_methods()))
    missing = [METHODS[method].label for method in wanted if method not in there]
    parts = [escape(note) for note in (RECIPES.get(results.recipe, ""),) if note]
    parts += [f"Rows without a run: {escape(', '.join(missing))}."] if missing else []
    tasks = sensitivities(results)
    parts += [_measure_table(name, measure, results, tasks) for name, measure in TABLES]
    if not len(results.runs):
        return parts
    shown = [_tasks_table(results, tasks), _paired_table(results, tasks), _claims_table(results, tasks)]
    return [*parts, *filter(None, shown), _settings_table(results)]


def _marked(task: str, tasks: Mapping[str, TaskSensitivity]) -> str:
    return f"{TASK_NAMES[task]} {MARK}" if _is_marked(task, tasks) else TASK_NAMES[task]


def _is_marked(task: str, tasks: Mapping[str, TaskSensitivity]) -> bool:
    return task in tasks and tasks[task].tells_apart is False


def _measure_table(name: str, measure: Measure, results: RecipeResults, tasks: Mapping[str, TaskSensitivity]) -> str:
    """Return one of the paper's tables: measured and published, task by task; of the accuracy also averages."""
    is_accuracy = measure is TEST_ACCURACY
    stand_in = any(is_stand_in(run.task, run.data) for run in results.runs.itertuples())
    marked = [task for task in TASK_NAMES if _is_marked(task, tasks)]
    rows, best = [], dict[str, str]()
    for row in [*results.rows, *(results.baseline_rows if is_accuracy else [])]:
        cells: dict[str, Any] = {"method": row.label}
        for task, task_name in TASK_NAMES.items():
            title = _marked(task, tasks) if is_accuracy else task_name
            heading = measure.heading(f"{title} (stand-in)" if stand_in and task == "retrieval" else title)
            failed = results.failures[(results.failures.method == row.method) & (results.failures.task == task)]
            empty = "failed" if (failed.options == row.options).any() else "-"
            cells[heading] = measure.cell(results.of(row, task), empty)
            cells[measure.heading(f"{task_name}, published")] = _published_cell(row, task, measure)
            # where a task tells no methods apart, no row is the best
            if measure.best and not (is_accuracy and task in marked):
                best[heading] = measure.best
        if is_accuracy:
            heading = measure.heading(f"Average {MARK}" if marked else "Average")
            best[heading] = measure.best
            cells[heading] = _average(results, row, list(TASK_NAMES))
            cells[measure.heading("Average, published")] = _published_cell(row, "average", measure)
            cells[measure.heading("average of the tasks that tell methods apart")] = _average(
                results, row, sensitive_tasks(tasks), named=True
            )
        rows.append(cells)
    note = f"Retrieval: {STAND_IN}." if stand_in else ""
    if is_accuracy:
        note = f"Retrieval, and with it the Average: {STAND_IN}. " if stand_in else ""
        note += (
            f"{MARK} does not tell methods apart: exact attention does not beat models without attention there (the"
            " table after Table 4 has the numbers). The Average takes such a task in; the last column does not."
        ) * bool(marked)
    title = f"{name} (recipe {results.recipe}): {measure.heading(measure.title)}"
    return table(title, rows, best, note, len(results.rows))


def _published_cell(row: Row, task: str, measure: Measure) -> str | Cell:
    """Return what the paper has in the row and the task: nothing for a method with options, or one it does not have."""
    if row.options or (row.method, task) not in published().index:
        return ""
    figures = published().loc[(row.method, task)]
    detail = f"{figures.exact_steps:.2f} k steps" if measure is TOTAL else ""
    return Cell(measure.show_published(figures[measure.published]), detail)


def _average(results: RecipeResults, row: Row, tasks: Sequence[str], named: bool = False) -> Cell:
    """Return the mean over these tasks: over all of them, or if they are `named` over those that have runs.

    Its interval is over the seeds where all tasks have the same, or of the test sets.
    """
    runs = [frame for task in tasks if len(frame := results.of(row, task).dropna(subset=["test_accuracy"]))]
    if not runs or not (named or len(runs) == len(tasks)):
        return Cell()
    mean = 100 * fmean(fmean(frame.test_accuracy) for frame in runs)
    if named:
        names = [TASK_NAMES[task] for task in tasks if len(results.of(row, task))]
        return Cell(percent(mean), "all five" if len(names) == len(TASK_NAMES) else ", ".join(names))
    if all(len(frame) == 1 for frame in runs):
        one = pd.concat(runs)
        known = one.test_examples.notna().all()
        detail = f": {interval_text(mean_share_interval(one.test_accuracy, one.test_examples))}" if known else ""
        return Cell(percent(mean), f"1 seed{detail}", mean)
    by_seed = [frame.set_index("seed").test_accuracy for frame in runs]
    if any(set(shares.index) != set(by_seed[0].index) for shares in by_seed):
        return Cell(percent(mean), "different seeds", mean)
    return Cell(percent(mean), seeds_text(list(pd.concat(by_seed, axis=1).mean(axis=1))), mean)


def _tasks_table(results: RecipeResults, tasks: Mapping[str, TaskSensitivity]) -> str:
    rows = []
    for task, sensitivity in tasks.items():
        row = {"task": _marked(task, tasks)}
        row[f"{METHODS[EXACT].label}, %"] = "-" if sensitivity.exact is None else percent(sensitivity.exact)
        for name, lead in sensitivity.leads.items():
            heading = f"ahead of {WITHOUT_ATTENTION[name]}, points"
            row[heading] = f"{lead.points:+.2f} ± {lead.error:.2f}" if lead else "-"
        rows.append({**row, "tells methods apart?": sensitivity.verdict})
    return table(f"Which tasks tell methods apart (recipe {results.recipe})", rows, {}, TASKS_NOTE)


def _paired_table(results: RecipeResults, tasks: Mapping[str, TaskSensitivity]) -> str:
    """Return every method compared with exact attention, in points; an empty text if that has no run."""
    exact, rows = results.row(EXACT), []
    for row in (*results.rows, *results.baseline_rows):
        each = differences(results, ACCURACY, row, exact)
        if row != exact and any(len(values) for values in each.values()):
            cells = {_marked(task, tasks): difference_cell(ACCURACY, pair(each[task])) for task in TASK_NAMES}
            overall = over_tasks({task: each[task] for task in sensitive_tasks(tasks)})
            rows.append({"method": row.label, **cells, "mean over tasks, points": difference_cell(ACCURACY, overall)})
    title = f"Accuracy beside that of Standard (recipe {results.recipe}), points, seed by seed"
    return table(title, rows, {}, PAIRED_NOTE) if rows else ""


def _claims_table(results: RecipeResults, tasks: Mapping[str, TaskSensitivity]) -> str:
    rows = []
    for claim in CLAIMS:
        each = differences(results, claim.quantity, results.row("skeinformer"), results.row(claim.second))
        counted = TASK_NAMES if claim.all_tasks else sensitive_tasks(tasks)
        overall = over_tasks({task: each[task] for task in counted})
        cells = {_marked(task, tasks): difference_cell(claim.quantity, pair(each[task])) for task in TASK_NAMES}
        row = {"claim": claim.text, "compared": claim.compared, **cells}
        row["mean over tasks"] = difference_cell(claim.quantity, overall)
        row["published, mean over five tasks"] = claim.quantity.show(claim.in_paper())
        rows.append({**row, "holds?": claim.verdict(overall)})
    return table(f"What of the paper holds (recipe {results.recipe})", rows, {}, CLAIMS_NOTE)


def difference_cell(quantity: Quantity, difference: Difference | None) -> Cell:
    """Return the mean with its seeds and interval; a mean over tasks names them."""
    if difference is None:
        return Cell()
    seeds = f"{difference.seeds} seeds" if difference.seeds > 1 else "1 seed"
    if difference.interval is not None:
        seeds += ": {} to {}".format(*map(quantity.show, difference.interval))
    tasks = ", ".join(TASK_NAMES[task] for task in difference.tasks)
    return Cell(quantity.show(difference.mean), joined(seeds, tasks), difference.mean)


def _settings_table(results: RecipeResults) -> str:
    """Return the data and the settings of each task; several values where the runs differ."""
    shown: dict[str, tuple[str, Callable[[Any], str]]] = {
        "n": ("n", _count),
        "budget": ("d", _count),
        "batch": ("batch, examples", _count),
        "learning_rate": ("learning rate", lambda value: f"{value:g}"),
        "max_steps": ("most steps", _count),
        "memory_budget": ("memory for a micro-batch", size),
        "parameters": ("parameters", _count),
        "test_examples": ("test examples", _count),
        "seed": ("seeds", _count),
    }
    rows = []
    for task, name in TASK_NAMES.items():
        runs = results.runs[results.runs.task == task]
        if len(runs):
            row = {"task": name, "data": _listed([_source(task, data) for data in distinct(runs, "data")])}
            for field, (heading, show) in shown.items():
                row[heading] = _listed([show(value) for value in distinct(runs, field)]) or "-"
            rows.append(row)
    return table(f"Settings and data (recipe {results.recipe})", rows, {})


def studies(frame: pd.DataFrame) -> dict[tuple[str, str, str], pd.DataFrame]:
    """Return the runs of each study by recipe, data and what else its runs change; with the recipe's own runs."""
    pure, others = split_runs(frame)
    runs = pd.concat([pure, others])
    runs = runs[(runs.task == "text") & (runs.method == "skeinformer") & (runs.options == "")]
    changes = runs.overrides.map(_other_changes)
    keys = list(zip(runs.recipe, runs.data, changes, strict=True))
    studied = {key for key, overrides in zip(keys, runs.overrides, strict=True) if _is_studied(overrides)}
    order = recipes(runs)
    return {
        key: runs[np.array([own == key for own in keys], bool)]
        for key in sorted(studied, key=lambda key: (order.index(key[0]), str(key)))
    }


def study_tables(frame: pd.DataFrame) -> list[str]:
    """Return a table for each study: every batch with every learning rate of which there are runs."""
    tables = []
    for (recipe, data, change), runs in studies(frame).items():
        rows = [
            {"batch, examples": _count(batch), "learning rate": f"{rate:g}", **_summary(runs[_at(runs, batch, rate)])}
            for batch in distinct(runs, "batch")
            for rate in distinct(runs, "learning_rate")
        ]
        title = f"Recipe {recipe}{change and f' with {change}'}, data {data}: every batch with every learning rate"
        best = {measure.heading(measure.title): measure.best for measure in SUMMARY if measure.best}
        tables.append(table(title, rows, best, "The text of the paper has no figures of this study."))
    return tables


def other_tables(frame: pd.DataFrame) -> list[str]:
    """Return the runs that are in no other table, a table for each recipe."""
    others = split_runs(frame)[1]
    skeinformer_on_text = (others.task == "text") & (others.method == "skeinformer") & (others.options == "")
    others = others[~(skeinformer_on_text & others.overrides.map(_is_studied).astype(bool))]
    tables = []
    for recipe in recipes(others):
        rows = []
        names = ["method", "options", "task", "overrides", "data"]
        for _, runs in others[others.recipe == recipe].groupby(names, sort=False):
            run = runs.iloc[-1]
            row = {"method": run.label or run.method, "task": TASK_NAMES[run.task]}
            row["settings other than the recipe's"] = run.overrides or "-"
            rows.append({**row, "data": _source(run.task, run.data), **_summary(runs)})
        tables.append(table(f"Recipe {recipe}, with other settings or data", rows, {}))
    return tables


def _summary(runs: pd.DataFrame) -> dict[str, Cell]:
    return {m.heading(m.title): m.cell(runs, "") for m in SUMMARY}


def _at(runs: pd.DataFrame, batch: float, rate: float) -> "pd.Series[bool]":
    return (runs.batch == batch) & (runs.learning_rate == rate)


def _is_studied(overrides: str) -> bool:
    return any(part.partition("=")[0] in STUDIED for part in overrides.split(", "))


def _other_changes(overrides: str) -> str:
    return ", ".join(part for part in overrides.split(", ") if part.partition("=")[0] not in STUDIED)


def distinct(frame: pd.DataFrame, field: str) -> list[Any]:
    """Return the values of a field, each once: numbers by size, others in the order of the records."""
    if field not in frame:
        return []
    values = [value for value in frame[field].dropna().unique().tolist() if value != ""]
    return sorted(values) if all(isinstance(value, int | float) for value in values) else values


def _count(value: Any) -> str:
    return f"{int(value):,}" if isinstance(value, float | int) else str(value)


def _listed(values: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(values[:most])
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def _source(task: str, data: str) -> str:
    name = data or "unknown"
    return f"{name} ({STAND_IN})" if is_stand_in(task, data) else name


def _failure(run: Any) -> str:
    names = [f"recipe {run.recipe}", TASK_NAMES[run.task], run.label or run.method, f"seed {run.seed:g}"]
    return f"{', '.join(names + ([run.overrides] if run.overrides else []))}: {run.error}"


def _made_by(frame: pd.DataFrame) -> str:
    """Return settings, machine, versions and commits; several values where the records differ."""
    lines = []
    for name in (
        *("recipe", "task", "data", "device", "precision", "processes", "n", "budget", "batch", "seed", "started"),
        *("cpu", "cores", "threads", "gpu", "torch", "python", "skeinformer", "commit", "command"),
    ):
        values = [_count(value) for value in distinct(frame, name)]
        if name == "started" and len(values) > 2:
            values = [f"{min(values)} to {max(values)}"]
        lines += [f"- {name}: {escape(_listed(values))}"] if values else []
    return "\n".join(lines)
