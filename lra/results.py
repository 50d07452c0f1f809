"""Runs as a table of pandas: which of them count, in which row, and the figures of the paper."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from lra.records import RUN_KEYS, Record
from skeinformer.checks import lookup

KINDS = ("lra_run", "lra_check", "lra_baseline", "lra_failure")
# the tasks in the paper's order, as a reader calls them
TASK_NAMES = {
    "text": "Text",
    "listops": "ListOps",
    "retrieval": "Retrieval",
    "pathfinder": "Pathfinder",
    "image": "Image",
}
BASELINES = {"bag_of_tokens": "Bag of tokens", "majority": "Majority"}  # models without attention, in their order
TEXTS = ("kind", "recipe", "task", "method", "options", "label", "overrides", "data", "started")
NUMBERS: tuple[str, ...] = (
    "step",
    "seed",
    "test_accuracy",
    "test_examples",
    "majority",
    "valid_loss",
    "loss",
    "steps",
    "seconds",
)
NUMBERS += ("best_step", "cpu_seconds", "compile_seconds", "seconds_per_thousand_steps", "peak_bytes", "micro_batch")
NUMBERS += ("accumulation", "batch", "learning_rate")


class Row(NamedTuple):
    """A method with its options: a row of the tables."""

    method: str
    options: str
    label: str


class RecipeResults(NamedTuple):
    """The runs of one recipe without overrides, each task's on the same data."""

    recipe: str
    runs: pd.DataFrame
    baselines: pd.DataFrame
    failures: pd.DataFrame
    checks: pd.DataFrame
    rows: list[Row]
    baseline_rows: list[Row]

    def of(self, row: Row, task: str) -> pd.DataFrame:
        """Return the runs of a row on a task."""
        frame = self.baselines if row in self.baseline_rows else self.runs
        return frame[(frame.method == row.method) & (frame.options == row.options) & (frame.task == task)]

    def row(self, method: str) -> Row:
        """Return the row of a method without options; one without runs where there is none."""
        rows = (row for row in (*self.rows, *self.baseline_rows) if (row.method, row.options) == (method, ""))
        return next(rows, Row(method, "", method))

    def curve(self, row: Row, task: str, seed: float) -> pd.DataFrame:
        """Return the checks of a run, by step."""
        checks = self.checks
        chosen = (checks.method == row.method) & (checks.options == row.options) & (checks.task == task)
        return checks[chosen & (checks.seed == seed)].dropna(subset=["step", "valid_loss"])


@cache
def published() -> pd.DataFrame:
    """Return the figures of Chen et al. (2022), Tables 1 to 4, by method and task; the task "average" is Table 1's.

    They ran on one Tesla V100 with 16 GB; accuracies are means over three runs, total times are of one.
    """
    return pd.read_csv(Path(__file__).with_name("published.csv")).set_index(["method", "task"])


@cache
def published_methods() -> list[str]:
    """Return the rows of the paper, in its order."""
    return list(dict.fromkeys(published().index.get_level_values("method")))


def to_frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return the records of the Long Range Arena; a ValueError if the task of one is unknown."""
    records = [record for record in records if record.get("kind") in KINDS]
    for task in {str(record.get("task")) for record in records}:
        lookup("task of the Long Range Arena", task, TASK_NAMES)
    frame = pd.DataFrame(records).reindex(columns=[*dict.fromkeys([*TEXTS, *NUMBERS, *_names(records)])])
    frame[list(TEXTS)] = frame[list(TEXTS)].astype(object).where(frame[list(TEXTS)].notna(), "")
    frame[list(NUMBERS)] = frame[list(NUMBERS)].apply(pd.to_numeric, errors="coerce")
    return frame


def split_runs(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Return the runs that belong to the tables of their recipe, and the others.

    Those without overrides belong to them, on the data that most such runs of a task had; of several, on the last.
    """
    runs = _latest(frame[frame.kind == "lra_run"])
    plain = runs[runs.overrides == ""]
    main = {key: _most_common(group) for key, group in plain.groupby(["recipe", "task"]).data}
    belongs = np.array(
        [not run.overrides and run.data == main[run.recipe, run.task] for run in runs.itertuples()], bool
    )
    return runs[belongs], runs[~belongs]


def results_by_recipe(frame: pd.DataFrame) -> list[RecipeResults]:
    """Return the results of each recipe, the paper's first; none where all of its runs have overrides."""
    runs = split_runs(frame)[0]
    plain = frame[frame.overrides == ""]
    failures = failed_runs(plain[~plain.method.isin(BASELINES)])
    baselines = _latest(plain[plain.kind == "lra_baseline"])
    main = dict(runs.groupby(["recipe", "task"]).data.last())
    same = [run.data in ("", main.get((run.recipe, run.task), run.data)) for run in baselines.itertuples()]
    baselines = baselines[np.array(same, bool)]
    checks = last_checks(plain)
    return [
        _of_recipe(recipe, *(part[part.recipe == recipe] for part in (runs, baselines, failures, checks)))
        for recipe in recipes(pd.concat([runs, failures, baselines]))
    ]


def recipes(frame: pd.DataFrame) -> list[str]:
    """Return the recipes, the paper's first."""
    return sorted(set(frame.recipe), key=lambda recipe: (recipe != "paper", recipe))


def failed_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the last failure of each run that was not finished afterwards."""
    last = frame[frame.kind != "lra_check"].drop_duplicates(list(RUN_KEYS), keep="last")
    return last[last.kind == "lra_failure"]


def last_checks(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the checks; what a repeated or resumed run checks again replaces the earlier checks from this step on."""
    checks = frame[frame.kind == "lra_check"]
    # a check stays if all later ones of its run have greater steps
    later = checks[::-1].groupby(list(RUN_KEYS), dropna=False).step.transform(lambda steps: steps.cummin().shift())
    return checks[~(later.reindex(checks.index) <= checks.step)]


def is_stand_in(task: str, data: str) -> bool:
    """Return whether this is Retrieval from other documents than AAN, those of the published figures."""
    return task == "retrieval" and "aan" not in data.lower()


def _of_recipe(
    recipe: str, runs: pd.DataFrame, baselines: pd.DataFrame, failures: pd.DataFrame, checks: pd.DataFrame
) -> RecipeResults:
    order = published_methods()
    both = pd.concat([runs, failures]).drop_duplicates(["method", "options"], keep="last")
    rows = [Row(run.method, run.options, run.label or run.method) for run in both.itertuples()]
    rows.sort(key=lambda row: (order.index(row.method) if row.method in order else len(order), row.options))
    if "majority" not in set(baselines.method):  # the majority is what the runs say of their test set
        shares = runs.dropna(subset=["majority"]).drop_duplicates("task", keep="last")
        made = {
            "method": "majority",
            "options": "",
            "label": "",
            "seed": float("nan"),
            "test_accuracy": shares.majority,
        }
        baselines = pd.concat([baselines, shares.assign(**made)])
    there = list(dict.fromkeys(baselines.method))
    names = [*(name for name in BASELINES if name in there), *(name for name in there if name not in BASELINES)]
    baseline_rows = [Row(name, "", BASELINES.get(name, name)) for name in names]
    return RecipeResults(recipe, runs, baselines, failures, checks, rows, baseline_rows)


def _latest(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the run that started last of those with the same settings and data."""
    by_start = runs.sort_values("started", kind="stable")
    return by_start.drop_duplicates([*RUN_KEYS, "data"], keep="last").sort_index()


def _most_common(data: pd.Series) -> str:
    counts = data.value_counts()
    last_seen = {name: place for place, name in enumerate(data)}
    return str(max(counts.index, key=lambda name: (counts[name], last_seen[name])))


def _names(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(name for record in records for name in record))
