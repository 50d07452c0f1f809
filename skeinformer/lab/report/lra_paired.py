"""Two methods compared over the seeds that both have: differences of accuracy, ratios of time and of steps.

A ratio is compared by its logarithm, so that half as long and twice as long are equally far from even. Every number of
two methods, on the page and in the documents, comes from `pair` and `over_tasks`.
"""

import math
from collections.abc import Callable, Collection, Mapping
from statistics import fmean
from typing import NamedTuple

from skeinformer.lab.records import Value
from skeinformer.lab.report.intervals import Interval, t_interval
from skeinformer.lab.report.lra_cells import MISSING, PERCENT
from skeinformer.lab.report.lra_runs import Arena, MethodRuns, by_seed
from skeinformer.lab.report.published import TASKS, Figures, Published

LEAST_SEEDS = 3  # fewer settle nothing; the paper has as many
BySeed = Mapping[Value, float]


class SeedDifference(NamedTuple):
    """What two methods differ by: the mean over their common seeds and, where there are two or more, its interval."""

    mean: float
    seeds: int
    interval: Interval | None
    tasks: tuple[str, ...] = ()


class Quantity(NamedTuple):
    """What is compared: of each common seed a difference or, where it is a `ratio`, a logarithm of one."""

    name: str
    of: Callable[[Arena, MethodRuns, MethodRuns, str], BySeed]
    published: Callable[[Figures, Figures], float]
    ratio: bool = False

    def show(self, value: float) -> str:
        """In points with a sign, or as the ratio itself."""
        return f"{math.exp(value):.2f}" if self.ratio else f"{value:+.2f}"


def pair(values: BySeed, tasks: tuple[str, ...] = ()) -> SeedDifference | None:
    """The mean of these differences, with the 95 % interval by Student's t; None where there are none."""
    found = list(values.values())
    if not found:
        return None
    return SeedDifference(fmean(found), len(found), t_interval(found) if len(found) > 1 else None, tasks)


def over_tasks(tasks: Mapping[str, BySeed]) -> SeedDifference | None:
    """The mean over tasks, seed by seed: of the tasks with enough common seeds, or of all where there are none such."""
    enough = {task: values for task, values in tasks.items() if len(values) >= LEAST_SEEDS}
    chosen = enough or {task: values for task, values in tasks.items() if values}
    if not chosen:
        return None
    seeds = set.intersection(*(set(values) for values in chosen.values()))
    return pair({seed: fmean(values[seed] for values in chosen.values()) for seed in seeds}, tuple(chosen))


def pair_text(quantity: Quantity, found: SeedDifference | None) -> tuple[str, str]:
    """What a cell says of a pair: the mean, and small below it the seeds and the interval."""
    if found is None:
        return MISSING, ""
    seeds = f"{found.seeds} seeds" if found.seeds > 1 else "1 seed"
    if found.interval is not None:
        low, high = (quantity.show(end) for end in found.interval)
        seeds = f"{seeds}: {low} to {high}"
    return quantity.show(found.mean), seeds


def published_pair(quantity: Quantity, first: Published, second: Published) -> float:
    """The same of the paper's figures: the mean over its five tasks."""
    return fmean(quantity.published(first.tasks[task], second.tasks[task]) for task in TASKS)


def by_task(
    arena: Arena, quantity: Quantity, first: MethodRuns, second: MethodRuns, tasks: Collection[str] = tuple(TASKS)
) -> dict[str, BySeed]:
    """What the methods differ by on each of these tasks, by seed."""
    return {task: quantity.of(arena, first, second, task) for task in TASKS if task in tasks}


def _accuracy(arena: Arena, first: MethodRuns, second: MethodRuns, task: str) -> BySeed:
    """Points of test accuracy."""
    ours, theirs = (by_seed(row.runs.get(task, ()), "test_accuracy") for row in (first, second))
    return {seed: PERCENT * (ours[seed] - theirs[seed]) for seed in ours if seed in theirs}


def _pace(arena: Arena, first: MethodRuns, second: MethodRuns, task: str) -> BySeed:
    """Processor time of a step: other work on the machine changes it less than wall time."""

    def paces(row: MethodRuns) -> dict[Value, float]:
        runs = row.runs.get(task, ())
        seconds, steps = by_seed(runs, "cpu_seconds"), by_seed(runs, "steps")
        return {seed: seconds[seed] / steps[seed] for seed in seconds if seconds[seed] > 0 and steps.get(seed)}

    return _log_ratios(paces(first), paces(second))


def _steps(arena: Arena, first: MethodRuns, second: MethodRuns, task: str) -> BySeed:
    """Steps to the first check whose validation loss is one that both runs of a seed reach."""
    ours: dict[Value, float] = {}
    theirs: dict[Value, float] = {}
    for seed in by_seed(first.runs.get(task, ()), "steps"):
        curves = [arena.curve(row, task, seed) for row in (first, second)]
        if all(curves):
            both = max(min(loss for _, loss in curve) for curve in curves)
            ours[seed], theirs[seed] = (next(step for step, loss in curve if loss <= both) for curve in curves)
    return _log_ratios(ours, theirs)


def _log_ratios(ours: BySeed, theirs: BySeed) -> BySeed:
    return {seed: math.log(ours[seed] / theirs[seed]) for seed in ours if seed in theirs}


ACCURACY_GAP = Quantity("test accuracy, points", _accuracy, lambda ours, theirs: ours.accuracy - theirs.accuracy)
PACE_RATIO = Quantity(
    "processor time of a step, ratio",
    _pace,
    lambda ours, theirs: math.log(ours.minutes_per_thousand / theirs.minutes_per_thousand),
    ratio=True,
)
STEPS_RATIO = Quantity(
    "steps to a validation loss that both reach, ratio",
    _steps,
    lambda ours, theirs: math.log(ours.exact_steps / theirs.exact_steps),
    ratio=True,
)
