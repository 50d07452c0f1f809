"""Cells and tables of Markdown: what a cell says of its runs, and which cell of a column is the best."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any, NamedTuple

import pandas as pd

from lra.intervals import Interval, share_interval, t_interval
from skeinformer.cli.tables import number, size

MINUTES = 1 / 60


class Cell(NamedTuple):
    """A text, what stands below it, and the number that decides which cell of a column is the best."""

    text: str = "-"
    detail: str = ""
    value: float | None = None


class Measure(NamedTuple):
    """A table of runs: its field, the unit as a word and as a factor, and what stands below a mean."""

    title: str
    field: str
    unit: str = ""
    factor: float = 1
    show: Callable[[float], str] = lambda value: f"{value:g}"
    detail: Callable[[pd.DataFrame], str] = lambda runs: ""
    best: str = ""  # "max" or "min" where a cell of a column is the best
    published: str = ""  # the column of the paper's figures
    show_published: Callable[[float], str] = lambda value: f"{value:g}"

    def heading(self, of: str) -> str:
        return f"{of}, {self.unit}" if self.unit else of

    def cell(self, runs: pd.DataFrame, empty: str = "-") -> Cell:
        """Return the mean over the runs."""
        values = _numbers(runs, self.field)
        if not values:
            return Cell(empty)
        mean = self.factor * fmean(values)
        return Cell(self.show(mean), self.detail(runs), mean)


def _numbers(runs: pd.DataFrame, field: str) -> list[float]:
    return [float(value) for value in runs[field].dropna()]


def percent(value: float) -> str:
    return f"{value:.2f}"


def interval_text(interval: Interval) -> str:
    low, high = (min(100.0, max(0.0, 100 * end)) for end in interval)
    return f"{low:.2f} to {high:.2f}"


def seeds_text(shares: Sequence[float]) -> str:
    return f"{len(shares)} seeds: ± {100 * stdev(shares):.2f}; {interval_text(t_interval(shares))}"


def _accuracy_detail(runs: pd.DataFrame) -> str:
    shares, examples = _numbers(runs, "test_accuracy"), _numbers(runs, "test_examples")
    if len(shares) > 1:
        return seeds_text(shares)
    return f"1 seed: {interval_text(share_interval(shares[0], int(examples[0])))}" if examples else "1 seed"


def _spread(runs: pd.DataFrame, field: str, factor: float = 1) -> str:
    """Write seeds, standard deviation and interval of the mean; no quantity is below zero."""
    values = [factor * value for value in _numbers(runs, field)]
    if len(values) < 2:
        return ""
    digits, (low, high) = f"{stdev(values):#.2g}", t_interval(values)
    deviation = digits if 0 < stdev(values) < 9.5 else f"{float(digits):.0f}"
    return f"{len(values)} seeds: ± {deviation}; {number(max(0.0, low))} to {number(high)}"


def _mean(runs: pd.DataFrame, field: str, factor: float, words: str) -> str:
    values = _numbers(runs, field)
    return words.format(number(factor * fmean(values))) if any(values) else ""


def _steps_detail(runs: pd.DataFrame) -> str:
    ended = int((runs.stopped == "steps").sum()) if "stopped" in runs else 0
    at_limit = f"{ended} of {len(runs)} at the limit" if ended else ""
    return joined(_spread(runs, "steps", 1e-3), _mean(runs, "best_step", 1e-3, "best at {}"), at_limit)


def _total_detail(runs: pd.DataFrame) -> str:
    return joined(
        _spread(runs, "seconds", MINUTES),
        _mean(runs, "steps", 1e-3, "{} k steps"),
        _mean(runs, "cpu_seconds", MINUTES, "processor {}"),
        _mean(runs, "compile_seconds", MINUTES, "compilation {}"),
    )


def _pace_detail(runs: pd.DataFrame) -> str:
    pace = runs.assign(pace=1000 * runs.cpu_seconds / runs.steps)
    return joined(_spread(runs, "seconds_per_thousand_steps", MINUTES), _mean(pace, "pace", MINUTES, "processor {}"))


def joined(*parts: str) -> str:
    return "; ".join(filter(None, parts))


TEST_ACCURACY = Measure(
    "test accuracy", "test_accuracy", "%", 100, percent, _accuracy_detail, "max", "accuracy", percent
)
STEPS = Measure("training steps", "steps", "thousands", 1e-3, number, _steps_detail, "", "steps")
PACE = Measure(
    *("training time per thousand steps", "seconds_per_thousand_steps", "minutes", MINUTES, number, _pace_detail),
    published="minutes_per_thousand",
)
ACCUMULATION = Measure("accumulation in a step", "accumulation", "micro-batches", published="accumulation")
TOTAL = Measure(
    *("total training time", "seconds", "minutes", MINUTES, number, _total_detail),
    published="minutes",
    show_published=percent,
)
MICRO_BATCH = Measure(
    *("micro-batch", "micro_batch", "examples"),
    detail=lambda runs: f"peak {size(max(peaks))}" if (peaks := _numbers(runs, "peak_bytes")) else "",
    published="micro_batch",
)
LOSS = Measure("validation loss", "valid_loss", "", 1, number, lambda runs: _spread(runs, "valid_loss"), best="min")
# by the paper's numbers
TABLES = (
    ("Table 1", TEST_ACCURACY),
    ("Table 2", STEPS),
    ("Table 2", PACE),
    ("Table 2", ACCUMULATION),
    ("Table 3", TOTAL),
    ("Table 4", MICRO_BATCH),
)
SUMMARY = (TEST_ACCURACY, LOSS, STEPS, PACE, TOTAL)


def table(
    title: str, rows: Iterable[Mapping[str, Any]], best: Mapping[str, str], note: str = "", rivals: int = -1
) -> str:
    """Return a Markdown table under a title.

    Args:
        title: Stands above it.
        rows: A text or a Cell for each heading.
        best: "max" or "min" for headings of which the best cell is bold.
        note: Stands between title and table.
        rivals: So many rows from the first one can be the best; the others are trivial models. Default: all.
    """
    frame = pd.DataFrame(list(rows)).fillna("")
    texts = frame.map(_text)
    for heading, side in best.items():
        values = pd.Series([getattr(cell, "value", None) for cell in frame[heading]], dtype=float)
        top = values[:rivals] if rivals >= 0 else values
        winners = top.index[top == getattr(top, side)()]
        texts.loc[winners, heading] = [_text(cell, bold=True) for cell in frame.loc[winners, heading]]
    lines = [[escape(heading) for heading in frame.columns], ["---", *("---:" for _ in frame.columns[1:])]]
    lines += texts.to_numpy().tolist()
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join(filter(None, (f"### {escape(title)}", escape(note), body)))


def escape(text: str) -> str:
    """Return the text on one line, with nothing that ends a cell, opens an element or makes letters slanted or bold."""
    return re.sub(r"([|*\\\[\]])", r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")


def _text(cell: Any, bold: bool = False) -> str:
    text, detail = (cell.text, cell.detail) if isinstance(cell, Cell) else (str(cell), "")
    text = f"**{escape(text)}**" if bold else escape(text)
    return f"{text}<br>{escape(detail)}" if detail else text
