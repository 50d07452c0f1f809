"""What a cell of the tables of the Long Range Arena says of its runs, and what the paper says there."""

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

from skeinformer.lab.records import Record
from skeinformer.lab.report.format import number, plus_minus, real, size
from skeinformer.lab.report.intervals import Interval, binomial_interval, mean_of_shares_interval, t_interval
from skeinformer.lab.report.lra_runs import MethodRuns, numbers_of, run_key
from skeinformer.lab.report.published import PUBLISHED, TASKS, Figures
from skeinformer.lab.report.tables import Column

MISSING, FAILED = "-", "failed"
PERCENT, THOUSANDS, MINUTES = 100, 1e-3, 1 / 60  # of shares, steps, seconds


class Table(NamedTuple):
    """A table of either form, with the sentence below its title, and what the filters know it by."""

    title: str
    rows: Sequence[Record]
    columns: Sequence[Column]
    recipe: str
    note: str = ""


class RunMeasure(NamedTuple):
    """A table: its field of the runs, the unit as a factor and as a word, and what stands small below a mean."""

    title: str
    field: str
    unit: str = ""
    factor: float = 1
    show: Callable[[float], str] = number
    detail: Callable[[Sequence[Record]], str] = lambda runs: ""
    best: Literal["low", "high", None] = None
    published: Callable[[Figures], float] | None = None
    show_published: Callable[[float], str] = lambda value: f"{value:g}"
    published_detail: Callable[[Figures], str] = lambda figures: ""

    def heading(self, of: str) -> str:
        """A column's, with the unit."""
        return f"{of}, {self.unit}" if self.unit else of


def two_decimals(value: float) -> str:
    """As the paper writes accuracies and total times."""
    return f"{value:.2f}"


def interval_text(interval: Interval) -> str:
    """A 95 % interval of a share, in percent; what lies outside 0 to 100 is left out."""
    low, high = (min(100.0, max(0.0, PERCENT * end)) for end in interval)
    return f"{low:.2f} to {high:.2f}"


def accuracy_detail(runs: Sequence[Record]) -> str:
    """Seeds, standard deviation and 95 % interval: over the seeds, or of the test set where there is one run."""
    found = numbers_of(runs, "test_accuracy")
    if len(found) > 1:
        return f"{len(found)} seeds: ± {PERCENT * stdev(found):.2f}; {interval_text(t_interval(found))}"
    examples = numbers_of(runs, "test_examples")
    return f"1 seed: {interval_text(binomial_interval(found[0], examples[0]))}" if examples else "1 seed"


def averages(row: MethodRuns, telling: Collection[str]) -> Record:
    """The mean over all five tasks, and that over the tasks of the row that tell methods apart, with their names."""
    tested = {task: [r for r in row.runs.get(task, ()) if real(r, "test_accuracy") is not None] for task in TASKS}
    found = {task: runs for task, runs in tested.items() if runs}
    whole = found if len(found) == len(TASKS) else {}
    chosen = {task: runs for task, runs in found.items() if task in telling}
    names = "all five" if len(chosen) == len(TASKS) else ", ".join(TASKS[task] for task in chosen)
    cells = _average("average", whole) | _average("telling", chosen)
    return cells | {"telling_detail": names}


def _average(name: str, tasks: Mapping[str, Sequence[Record]]) -> Record:
    """The mean over these tasks. Its interval is over the seeds where all have the same, or of the test sets."""
    if not tasks:
        return {f"{name}_text": MISSING}
    value = PERCENT * fmean(fmean(numbers_of(runs, "test_accuracy")) for runs in tasks.values())
    return {name: value, f"{name}_text": two_decimals(value), f"{name}_detail": _average_detail(list(tasks.values()))}


def _average_detail(tasks: Sequence[Sequence[Record]]) -> str:
    if all(len(runs) == 1 for runs in tasks):
        shares, examples = (
            [x for runs in tasks for x in numbers_of(runs, f"test_{end}")] for end in ("accuracy", "examples")
        )
        known = len(examples) == len(shares)
        return f"1 seed: {interval_text(mean_of_shares_interval(shares, examples))}" if known else "1 seed"
    by_seed = [{run_key(run, ("seed",)): real(run, "test_accuracy") for run in runs} for runs in tasks]
    if any(seeds.keys() != by_seed[0].keys() for seeds in by_seed):
        return "different seeds"
    averages = [fmean(seeds[seed] or 0.0 for seeds in by_seed) for seed in by_seed[0]]
    return f"{len(averages)} seeds: ± {PERCENT * stdev(averages):.2f}; {interval_text(t_interval(averages))}"


def _spread(runs: Sequence[Record], field: str, factor: float) -> str:
    """Seeds, the standard deviation over them, and the 95 % interval of the mean; no quantity is below zero."""
    found = [factor * value for value in numbers_of(runs, field)]
    if len(found) < 2:
        return ""
    low, high = t_interval(found)
    return f"{len(found)} seeds: {plus_minus(stdev(found))}; {number(max(0.0, low))} to {number(high)}"


def _steps_detail(runs: Sequence[Record]) -> str:
    """Where the best check was, and how many runs the recipe's last step ended."""
    best, ended = numbers_of(runs, "best_step"), sum(run.get("stopped") == "steps" for run in runs)
    return _joined(
        _spread(runs, "steps", THOUSANDS),
        f"best at {number(THOUSANDS * fmean(best))}" if best else "",
        f"{ended} of {len(runs)} at the limit" if ended else "",
    )


def _total_detail(runs: Sequence[Record]) -> str:
    steps, processor, compilation = (numbers_of(runs, name) for name in ("steps", "cpu_seconds", "compile_seconds"))
    return _joined(
        _spread(runs, "seconds", MINUTES),
        f"{number(THOUSANDS * fmean(steps))} k steps" if steps else "",
        f"processor {number(MINUTES * fmean(processor))}" if processor else "",
        f"compilation {number(MINUTES * fmean(compilation))}" if any(compilation) else "",
    )


def _pace_detail(runs: Sequence[Record]) -> str:
    processor = [
        1000 * seconds / steps
        for run in runs
        if isinstance(seconds := run.get("cpu_seconds"), int | float) and isinstance(steps := run.get("steps"), int)
    ]
    return _joined(
        _spread(runs, "seconds_per_thousand_steps", MINUTES),
        f"processor {number(MINUTES * fmean(processor))}" if processor else "",
    )


def _peak_detail(runs: Sequence[Record]) -> str:
    peaks = numbers_of(runs, "peak_bytes")
    return f"peak {size(max(peaks))}" if peaks else ""


def _joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


ACCURACY = RunMeasure(
    "test accuracy",
    "test_accuracy",
    "%",
    PERCENT,
    two_decimals,
    accuracy_detail,
    "high",
    lambda figures: figures.accuracy,
    two_decimals,
)
STEPS = RunMeasure(
    "training steps",
    "steps",
    "thousands",
    THOUSANDS,
    number,
    _steps_detail,
    published=lambda figures: figures.steps,
)
PACE = RunMeasure(
    "training time per thousand steps",
    "seconds_per_thousand_steps",
    "minutes",
    MINUTES,
    number,
    _pace_detail,
    published=lambda figures: figures.minutes_per_thousand,
)
ACCUMULATION = RunMeasure(
    "accumulation in a step",
    "accumulation",
    "micro-batches",
    show=lambda value: f"{value:g}",
    published=lambda figures: figures.accumulation,
)
TOTAL = RunMeasure(
    "total training time",
    "seconds",
    "minutes",
    MINUTES,
    number,
    _total_detail,
    None,  # none is the best: other work on the machine decides too
    lambda figures: figures.minutes,
    two_decimals,
    lambda figures: f"{figures.exact_steps:.2f} k steps",
)
MICRO_BATCH = RunMeasure(
    "micro-batch",
    "micro_batch",
    "examples",
    1,
    lambda value: f"{value:g}",
    _peak_detail,
    published=lambda figures: figures.micro_batch,
)
LOSS = RunMeasure("validation loss", "valid_loss", detail=lambda runs: _spread(runs, "valid_loss", 1), best="low")
# the tables of a recipe, by the paper's numbers
TABLES = (
    ("Table 1", ACCURACY),
    ("Table 2", STEPS),
    ("Table 2", PACE),
    ("Table 2", ACCUMULATION),
    ("Table 3", TOTAL),
    ("Table 4", MICRO_BATCH),
)


def cell(runs: Sequence[Record], measure: RunMeasure, name: str, empty: str = MISSING) -> Record:
    """The mean over the runs as the fields that `cell_column` shows; `empty` where there is nothing to show."""
    found = numbers_of(runs, measure.field)
    if not found:
        return {f"{name}_text": empty}
    value = measure.factor * fmean(found)
    return {name: value, f"{name}_text": measure.show(value), f"{name}_detail": measure.detail(runs)}


def published_cell(row: MethodRuns, task: str, measure: RunMeasure) -> Record:
    """What the paper has in the row and the task: nothing for a method with options, or one that it does not know."""
    if measure.published is None or row.options or row.method not in PUBLISHED:
        return {}
    figures = PUBLISHED[row.method].tasks[task]
    value = measure.published(figures)
    return {
        f"{task}_published": value,
        f"{task}_published_text": measure.show_published(value),
        f"{task}_published_detail": measure.published_detail(figures),
    }


def cell_column(
    name: str, heading: str, best: Literal["low", "high", None] = None, data: dict[str, str] | None = None
) -> Column:
    """A column of the fields that `cell` makes."""
    return Column(
        heading,
        lambda row: str(row.get(f"{name}_text") or ""),
        lambda row: str(row.get(f"{name}_detail") or ""),
        name,
        best,
        data or {},
    )


def text_column(name: str, heading: str) -> Column:
    """A column of a field that is text."""
    return Column(heading, lambda row: str(row.get(name) or MISSING))


def table_row(row: MethodRuns, measure: RunMeasure, telling: Collection[str] = ()) -> Record:
    """A method's row: for each task what was measured and what is published."""
    record: Record = {"label": row.label, "method": row.method}
    for task in TASKS:
        empty = FAILED if task in row.failed else MISSING
        record |= cell(row.runs.get(task, ()), measure, task, empty) | published_cell(row, task, measure)
    if measure is ACCURACY:
        record |= averages(row, telling)
        if row.method in PUBLISHED and not row.options:
            overall = PUBLISHED[row.method].average
            record |= {"average_published": overall, "average_published_text": two_decimals(overall)}
    return record
