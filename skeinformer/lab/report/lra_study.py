"""The study of batch size and learning rate: Skeinformer on Text, as tables and as a picture."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from statistics import fmean, stdev

from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.figures import COLORS, MARKERS, Panel, Series, Style, panels_svg
from skeinformer.lab.report.format import count, distinct, label
from skeinformer.lab.report.intervals import share_error
from skeinformer.lab.report.lra_cells import ACCURACY, LOSS, PACE, PERCENT, STEPS, TOTAL, Table, cell, cell_column
from skeinformer.lab.report.lra_runs import grouped, numbers_of, recipes, run_key, split_runs
from skeinformer.lab.report.tables import Column, attributes_html

STUDIED = {"batch", "learning_rate"}  # the overrides of the study
STUDY_NOTE = "The text of the paper has no figures of this study."
FIGURE_NOTE = (
    "A line for each batch. Bars are one standard error: over the seeds, or of the test set where there is one run."
)


def studies(records: Sequence[Record]) -> dict[tuple[str, Value, str], list[Record]]:
    """The runs of each study by recipe, data and what else its runs change; with the recipe's own runs."""
    pure, others = split_runs(records)
    studied = [run for run in others if is_studied(run)]
    order = recipes(studied)
    found = {}
    for recipe, data, rest in sorted(
        {_setting(run) for run in studied}, key=lambda key: (order.index(key[0]), str(key))
    ):
        mine = [run for run in pure if _is_skeinformer_on_text(run)] + studied
        found[recipe, data, rest] = [run for run in mine if _setting(run) == (recipe, data, rest)]
    return found


def study_tables(records: Sequence[Record]) -> list[Table]:
    """Every batch with every learning rate of which there are runs, a table for each study."""
    tables = []
    for (recipe, data, rest), runs in studies(records).items():
        cells = _cells(runs)
        rows = [
            {"label": label(runs[-1]), "batch": batch, "learning_rate": rate, **summary(cells.get((batch, rate), ()))}
            for batch in distinct(runs, "batch")
            for rate in distinct(runs, "learning_rate")
        ]
        columns = [
            Column("batch, examples", lambda row: count(row.get("batch")), field="batch"),
            Column("learning rate", lambda row: f"{row['learning_rate']:g}", field="learning_rate"),
            *summary_columns(),
        ]
        title = f"Recipe {recipe}{_changed(rest)}, data {data}: every batch with every learning rate"
        tables.append(Table(title, rows, columns, recipe, STUDY_NOTE))
    return tables


def study_panels(records: Sequence[Record]) -> list[Panel]:
    """Test accuracy and validation loss against the learning rate, a line for each batch: two panels for a study."""
    panels = []
    for (recipe, _, rest), runs in studies(records).items():
        rates = [float(rate or 0) for rate in distinct(runs, "learning_rate")]
        for field, factor, y_label in (
            ("test_accuracy", PERCENT, "test accuracy, %"),
            ("valid_loss", 1, "validation loss"),
        ):
            if series := _series(runs, field, factor):
                title = f"recipe {recipe}{_changed(rest)}: Skeinformer on Text"
                data = {"recipe": recipe, "task": "text", "label": label(runs[-1])}
                panels.append(Panel(title, "learning rate", y_label, series, data, rates))
    return panels


def study_styles(panels: Iterable[Panel]) -> dict[str, Style]:
    """A style for each batch, thick: its name stands beside its line."""
    names = dict.fromkeys(series.label for panel in panels for series in panel.series)
    return {name: Style(COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)], thick=True) for i, name in enumerate(names)}


def study_html(panels: Sequence[Panel]) -> str:
    """The panels side by side. Their lines are no methods, so the filters show and hide a panel as a whole."""
    styles, figures = study_styles(panels), []
    for panel in panels:
        svg = re.sub(r' data-label="[^"]*"', "", panels_svg([panel], styles))
        caption = f"<figcaption>{escape(panel.title)}</figcaption>"
        figures.append(f"<figure{attributes_html(panel.data)}>\n{caption}\n{svg}\n</figure>")
    return f"<p class='faint'>{escape(FIGURE_NOTE)}</p>\n<div class='grid holds'>\n{''.join(figures)}\n</div>"


def is_studied(run: Record) -> bool:
    """Does the run change the batch or the learning rate of its recipe?"""
    return _is_skeinformer_on_text(run) and any(name in STUDIED for name, _ in _overrides(run))


def summary(runs: Sequence[Record]) -> Record:
    """Accuracy, loss, steps and times of the same settings under several seeds."""
    row: Record = {}
    for measure in (ACCURACY, LOSS, STEPS, PACE, TOTAL):
        row |= cell(runs, measure, measure.field)
    return row


def summary_columns() -> list[Column]:
    """The columns of `summary`."""
    return [cell_column(m.field, m.heading(m.title), m.best) for m in (ACCURACY, LOSS, STEPS, PACE, TOTAL)]


def _series(runs: Sequence[Record], field: str, factor: float) -> list[Series]:
    cells = _cells(runs)
    lines = []
    for batch in distinct(runs, "batch"):
        points = [
            (float(rate or 0), factor * fmean(found), factor * _error(cells[batch, rate], field))
            for rate in distinct(runs, "learning_rate")
            if (found := numbers_of(cells.get((batch, rate), ()), field))
        ]
        if points:
            x, y, errors = zip(*points, strict=True)
            lines.append(Series(f"batch {batch}", x, y, errors))
    return lines


def _error(runs: Sequence[Record], field: str) -> float:
    """The standard error of a mean over seeds; of one run that of its test set, where the field is a share."""
    found = numbers_of(runs, field)
    if len(found) > 1:
        return stdev(found) / math.sqrt(len(found))
    examples = numbers_of(runs, "test_examples")
    return share_error(found[0], examples[0]) if examples and field == "test_accuracy" else 0.0


def _cells(runs: Iterable[Record]) -> Mapping[tuple[Value, ...], Sequence[Record]]:
    return grouped(runs, lambda run: run_key(run, ("batch", "learning_rate")))


def _is_skeinformer_on_text(run: Record) -> bool:
    return run_key(run, ("task", "method", "options")) == ("text", "skeinformer", "")


def _setting(run: Record) -> tuple[str, Value, str]:
    """What the runs of a study share: recipe, data, and what else they change."""
    rest = ", ".join(f"{name}={value}" for name, value in _overrides(run) if name not in STUDIED)
    return str(run.get("recipe")), run.get("data"), rest


def _changed(rest: str) -> str:
    return f" with {rest}" if rest else ""


def _overrides(run: Record) -> list[tuple[str, str]]:
    parts = [part.partition("=") for part in str(run.get("overrides") or "").split(",")]
    return [(name.strip(), value.strip()) for name, _, value in parts if name.strip()]
