"""What the paper claims of Skeinformer, and which tasks tell methods apart: pairs over seeds, never one run alone.

Two methods are compared over the seeds that both have. A ratio is compared by its logarithm, so that half as long and
twice as long are equally far from even.
"""

import math
from collections.abc import Callable, Mapping
from statistics import fmean, stdev
from typing import NamedTuple, TypeAlias

import numpy as np
import pandas as pd

from lra.intervals import Interval, share_error, t_interval
from lra.results import BASELINES, TASK_NAMES, RecipeResults, Row, published
from skeinformer.attention import METHODS

EXACT = "softmax"  # exact attention
LEAST_SEEDS = 3  # fewer settle nothing; the paper has as many
ERRORS = 2  # standard errors by which exact attention must beat a model that does not attend
WITHOUT_ATTENTION = {"vmean": "V-mean", "bag_of_tokens": BASELINES["bag_of_tokens"]}
HOLDS, FAILS, TOO_FEW = "holds", "does not hold", "too few seeds"
LEVEL = 1.0  # points that count as level
BySeed: TypeAlias = pd.Series


class Difference(NamedTuple):
    """The mean difference of two methods over their common seeds and, of two or more, its interval."""

    mean: float
    seeds: int
    interval: Interval | None
    tasks: tuple[str, ...] = ()


class Quantity(NamedTuple):
    """What is compared: of each common seed a difference or, where it is a `ratio`, a logarithm of one."""

    name: str
    of: Callable[[RecipeResults, Row, Row, str], BySeed]
    published: Callable[[pd.DataFrame, pd.DataFrame], BySeed]  # of the tables of two methods, by task
    ratio: bool = False

    def show(self, value: float) -> str:
        """Write a mean: points with a sign, or the ratio itself."""
        return f"{math.exp(value):.2f}" if self.ratio else f"{value:+.2f}"


def pair(values: BySeed, tasks: tuple[str, ...] = ()) -> Difference | None:
    """Return the mean of differences, with the interval by Student's t; None where there are none."""
    numbers = [float(value) for value in values]
    if not numbers:
        return None
    return Difference(fmean(numbers), len(numbers), t_interval(numbers) if len(numbers) > 1 else None, tasks)


def over_tasks(tasks: Mapping[str, BySeed]) -> Difference | None:
    """Return the mean over tasks, seed by seed: of the tasks with enough common seeds, or of all if none has enough."""
    enough = {task: values for task, values in tasks.items() if len(values) >= LEAST_SEEDS}
    chosen = enough or {task: values for task, values in tasks.items() if len(values)}
    if not chosen:
        return None
    return pair(pd.concat(chosen, axis=1, join="inner").mean(axis=1), tuple(chosen))


def by_seed(runs: pd.DataFrame, field: str) -> BySeed:
    """Return the numbers of a field by seed."""
    return runs.dropna(subset=["seed", field]).drop_duplicates("seed", keep="last").set_index("seed")[field]


def _accuracy(results: RecipeResults, first: Row, second: Row, task: str) -> BySeed:
    ours, theirs = (by_seed(results.of(row, task), "test_accuracy") for row in (first, second))
    return (100 * (ours - theirs)).dropna()


def _pace(results: RecipeResults, first: Row, second: Row, task: str) -> BySeed:
    """Compare the processor time of a step, which other work on the machine changes less than wall time."""
    runs = [results.of(row, task) for row in (first, second)]
    ours, theirs = (by_seed(x, "cpu_seconds") / by_seed(x, "steps") for x in runs)
    ratios = (ours / theirs).dropna()
    return np.log(ratios[ratios > 0])


def _steps(results: RecipeResults, first: Row, second: Row, task: str) -> BySeed:
    """Compare the steps to the first check whose validation loss both runs of a seed reach."""
    ratios = {}
    for seed in by_seed(results.of(first, task), "steps").index:
        curves = [results.curve(row, task, seed) for row in (first, second)]
        if all(len(curve) for curve in curves):
            both = max(curve.valid_loss.min() for curve in curves)
            ours, theirs = (curve[curve.valid_loss <= both].step.iloc[0] for curve in curves)
            ratios[seed] = math.log(ours / theirs)
    return pd.Series(ratios, dtype=float)


ACCURACY = Quantity("test accuracy, points", _accuracy, lambda ours, theirs: ours.accuracy - theirs.accuracy)
PACE = Quantity(
    "processor time of a step, ratio",
    _pace,
    lambda ours, theirs: np.log(ours.minutes_per_thousand / theirs.minutes_per_thousand),
    ratio=True,
)
STEPS = Quantity(
    "steps to a validation loss that both reach, ratio",
    _steps,
    lambda ours, theirs: np.log(ours.exact_steps / theirs.exact_steps),
    ratio=True,
)


class Claim(NamedTuple):
    """Skeinformer compared with `second`: what must be above `bound`, or below it where less is better."""

    text: str
    second: str
    quantity: Quantity = ACCURACY
    bound: float = 0.0
    less: bool = False
    all_tasks: bool = False  # also on tasks that do not tell methods apart

    @property
    def compared(self) -> str:
        sign = "/" if self.quantity.ratio else "-"
        return f"{METHODS['skeinformer'].label} {sign} {METHODS[self.second].label}; {self.quantity.name}"

    def in_paper(self) -> float:
        """Return the same of the published figures: the mean over the five tasks."""
        ours, theirs = (published().loc[method].drop("average") for method in ("skeinformer", self.second))
        return float(self.quantity.published(ours, theirs).mean())

    def verdict(self, difference: Difference | None) -> str:
        """Say whether the claim holds, with the reason where it cannot be said."""
        if difference is None or difference.seeds < LEAST_SEEDS or difference.interval is None:
            return f"{TOO_FEW} ({difference.seeds if difference else 0} in common, {LEAST_SEEDS} needed)"
        low, high = difference.interval
        above, below = low > self.bound, high < self.bound
        if not (above or below):
            return f"{TOO_FEW} (the interval has both answers)"
        return HOLDS if below == self.less else FAILS


EXACT_ROWS = (EXACT, "softmax_dropout")
CLAIMS = (
    *(
        Claim(f"Skeinformer's accuracy is level: less than {LEVEL:g} point behind", exact, bound=-LEVEL)
        for exact in EXACT_ROWS
    ),
    Claim("Importance sampling helps", "skeinformer_uniform"),
    Claim("Row normalization helps", "skeinformer_no_norm"),
    Claim("Adaptive row normalization helps more than the simple one", "skeinformer_simple_norm"),
    Claim("Pilot reutilization helps", "skeinformer_no_reuse"),
    *(Claim("A step takes less time", exact, PACE, less=True, all_tasks=True) for exact in EXACT_ROWS),
    *(Claim("It converges in fewer steps", exact, STEPS, less=True) for exact in EXACT_ROWS),
)


class Lead(NamedTuple):
    """By how many points exact attention is ahead of a model, and the standard error of that."""

    points: float
    error: float

    @property
    def is_clear(self) -> bool:
        return self.points > ERRORS * self.error


class TaskSensitivity(NamedTuple):
    """The accuracy of exact attention on a task, and its lead over each model that does not attend, None if not run."""

    exact: float | None
    leads: Mapping[str, Lead | None]

    @property
    def tells_apart(self) -> bool | None:
        """Whether the task tells methods apart; None if a run is missing and the others do not answer it."""
        if any(lead is not None and not lead.is_clear for lead in self.leads.values()):
            return False
        return True if all(self.leads.values()) else None

    @property
    def verdict(self) -> str:
        level = [WITHOUT_ATTENTION[name] for name, lead in self.leads.items() if lead and not lead.is_clear]
        missing = [WITHOUT_ATTENTION[name] for name, lead in self.leads.items() if lead is None]
        if level:
            return f"no: exact attention does not beat {' and '.join(level)} by {ERRORS} standard errors"
        if self.exact is None:
            return "not known: no run of exact attention"
        return f"not known: no run of {' and '.join(missing)} with its seeds" if missing else "yes"


def sensitivities(results: RecipeResults) -> dict[str, TaskSensitivity]:
    """Return the sensitivity of each task that has runs."""
    tasks = {}
    for task in TASK_NAMES:
        if task in set(results.runs.task):
            runs = results.of(results.row(EXACT), task)
            accuracy = by_seed(runs, "test_accuracy")
            leads = {name: lead_of(runs, results.of(results.row(name), task)) for name in WITHOUT_ATTENTION}
            tasks[task] = TaskSensitivity(100 * fmean(accuracy) if len(accuracy) else None, leads)
    return tasks


def lead_of(exact: pd.DataFrame, other: pd.DataFrame) -> Lead | None:
    """Return the lead over the common seeds. Its error is that over the seeds or of the test set, the greater one.

    Two seeds that agree by chance would else make any lead clear. The test set is the same for both, which makes its
    part smaller than what independent sets would give: the error is on the safe side.
    """
    both = pd.concat([by_seed(runs, "test_accuracy") for runs in (exact, other)], axis=1, join="inner")
    examples = pd.concat([exact, other]).test_examples.min()
    if both.empty or np.isnan(examples):
        return None
    gaps = both.iloc[:, 0] - both.iloc[:, 1]
    of_test = math.hypot(*(share_error(mean, examples) for mean in both.mean()))
    of_seeds = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return Lead(100 * fmean(gaps), 100 * max(of_test, of_seeds))


def sensitive_tasks(tasks: Mapping[str, TaskSensitivity]) -> list[str]:
    """Return the tasks that are shown to tell methods apart."""
    return [task for task, sensitivity in tasks.items() if sensitivity.tells_apart]


def differences(results: RecipeResults, quantity: Quantity, first: Row, second: Row) -> dict[str, BySeed]:
    """Return what two rows differ by on each task, by seed."""
    return {task: quantity.of(results, first, second, task) for task in TASK_NAMES}
