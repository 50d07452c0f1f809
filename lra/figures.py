"""Figures of the Long Range Arena: loss against processor time, and the study of batch and learning rate."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev

import pandas as pd

from lra.intervals import share_error
from lra.records import RUN_KEYS, Record
from lra.results import TASK_NAMES, last_checks, recipes, to_frame
from lra.tables import distinct, studies
from skeinformer.cli.figures import Line, Panel, draw, save


def write_figures(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write lra-loss and lra-study, those that the records have, as .svg and .png; return their paths."""
    frame = to_frame(records)
    paths = []
    for name, panels in (("lra-loss", loss_panels(frame)), ("lra-study", study_panels(frame))):
        if panels:
            figure = draw(panels)
            paths += [save(figure, folder / f"{name}{ending}") for ending in (".svg", ".png")]
    if not paths:
        raise ValueError("no figure shows these records; give the checks of a training run")
    return paths


def loss_panels(frame: pd.DataFrame) -> list[Panel]:
    """Make a panel for each recipe and task: validation loss against processor seconds, a line for each run.

    Wall time is not drawn: other work on the machine changes it several times over.
    """
    checks = last_checks(frame[frame.overrides == ""])
    checks = checks[(checks.cpu_seconds > 0) & (checks.valid_loss > 0)]
    panels = []
    for recipe in recipes(checks):
        for task, name in TASK_NAMES.items():
            runs = checks[(checks.recipe == recipe) & (checks.task == task)].groupby(list(RUN_KEYS), sort=False)
            lines = [Line(run.label.iloc[0], run.cpu_seconds.tolist(), run.valid_loss.tolist()) for _, run in runs]
            if lines:
                title = f"recipe {recipe}: {name}"
                panels.append(Panel(title, "processor time of training, s", "validation loss", lines))
    return panels


def study_panels(frame: pd.DataFrame) -> list[Panel]:
    """Make panels of test accuracy and validation loss against the learning rate, a line for each batch size.

    Bars are one standard error: over the seeds, or of the test set where there is one run.
    """
    panels = []
    for (recipe, _, change), runs in studies(frame).items():
        title = f"recipe {recipe}{change and f' with {change}'}: Skeinformer on Text"
        rates = distinct(runs, "learning_rate")
        for field, factor, name in (("test_accuracy", 100, "test accuracy, %"), ("valid_loss", 1, "validation loss")):
            lines = []
            for batch in distinct(runs, "batch"):
                cells = list(runs[runs.batch == batch].dropna(subset=[field]).groupby("learning_rate"))
                means = [factor * fmean(cell[field]) for _, cell in cells]
                errors = [factor * standard_error(cell, field) for _, cell in cells]
                lines.append(Line(f"batch {batch:g}", [rate for rate, _ in cells], means, errors))
            panels.append(Panel(title, "learning rate", name, lines, rates))
    return panels


def standard_error(runs: pd.DataFrame, field: str) -> float:
    """Return the standard error of a mean over seeds; of one run that of its test set, where the field is a share."""
    values = [float(value) for value in runs[field].dropna()]
    if len(values) > 1:
        return stdev(values) / math.sqrt(len(values))
    examples = runs.test_examples.max()
    return share_error(values[0], examples) if field == "test_accuracy" and examples > 0 else 0.0
