"""Figures of the Long Range Arena: loss against processor time, and the study of batch and learning rate."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from lra.intervals import share_error
from lra.records import RUN_KEYS, Record
from lra.results import TASK_NAMES, last_checks, recipes, to_frame
from lra.tables import distinct, studies

# methods that stand out; the others are thin
HIGHLIGHTED = {"softmax": "black", "cluster": "#1f7ac4", "skeinformer": "#d55e00", "vmean": "#cc79a7"}
MARKERS = "osv^DPX"
PNG_DOTS = 160  # per inch


def write_figures(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write lra-loss and lra-study, those that the records have, as .svg and .png; return their paths."""
    frame = to_frame(records)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    # text stays text, and the same records give the same file
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "lra", "font.size": 9}):
        for name, figure in (("lra-loss", loss_figure(frame)), ("lra-study", study_figure(frame))):
            if figure is not None:
                paths += [folder / f"{name}.svg", folder / f"{name}.png"]
                figure.savefig(paths[-2], metadata={"Date": None})
                figure.savefig(paths[-1], dpi=PNG_DOTS)
    if not paths:
        raise ValueError("no figure shows these records; give the checks of a training run")
    return paths


def loss_figure(frame: pd.DataFrame) -> Figure | None:
    """Draw validation loss, and thin the training loss, against processor seconds; a panel for each recipe and task.

    Wall time is not drawn: other work on the machine changes it several times over.
    """
    checks = last_checks(frame[frame.overrides == ""])
    checks = checks[(checks.cpu_seconds > 0) & (checks.valid_loss > 0) & (checks.loss > 0)]
    there = set(zip(checks.recipe, checks.task, strict=True))
    panels = [(recipe, task) for recipe in recipes(checks) for task in TASK_NAMES if (recipe, task) in there]
    if not panels:
        return None
    labels = {(run.method, run.options): run.label or run.method for run in checks.itertuples()}
    figure, all_axes = _panels(len(panels))
    for (recipe, task), axes in zip(panels, all_axes, strict=True):
        runs = checks[(checks.recipe == recipe) & (checks.task == task)]
        for (_, _, method, options, _, _), run in runs.groupby(list(RUN_KEYS)):
            place = list(labels).index((method, options))
            color = "" if options else HIGHLIGHTED.get(method, "")
            style: dict[str, Any] = {
                "color": color or f"C{1 + place % 9}",
                "markersize": 4,
                "linewidth": 2.2 if color else 0.9,
            }
            label = labels[method, options]
            axes.plot(run.cpu_seconds, run.valid_loss, marker=MARKERS[place % 7], label=label, **style)
            axes.plot(run.cpu_seconds, run.loss, **{**style, "linewidth": 0.5, "alpha": 0.5})
        _name_axes(axes, f"recipe {recipe}: {TASK_NAMES[task]}", "processor time of training, s", "loss")
    handles = {label: line for axes in all_axes for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside right center", frameon=False)
    return figure


def study_figure(frame: pd.DataFrame) -> Figure | None:
    """Draw test accuracy and validation loss against the learning rate, a line for each batch size.

    Bars are one standard error: over the seeds, or of the test set where there is one run.
    """
    found = studies(frame)
    if not found:
        return None
    figure, all_axes = _panels(2 * len(found))
    for number, ((recipe, _, change), runs) in enumerate(found.items()):
        for axes, field, factor, name in (
            (all_axes[2 * number], "test_accuracy", 100, "test accuracy, %"),
            (all_axes[2 * number + 1], "valid_loss", 1, "validation loss"),
        ):
            for marker, batch in zip(MARKERS, distinct(runs, "batch"), strict=False):
                cells = list(runs[runs.batch == batch].dropna(subset=[field]).groupby("learning_rate"))
                means = [factor * fmean(cell[field]) for _, cell in cells]
                errors = [factor * standard_error(cell, field) for _, cell in cells]
                rates = [rate for rate, _ in cells]
                axes.errorbar(rates, means, errors, marker=marker, capsize=3, label=f"batch {batch:g}")
            title = f"recipe {recipe}{change and f' with {change}'}: Skeinformer on Text"
            _name_axes(axes, title, "learning rate", name)
            axes.set_xticks(distinct(runs, "learning_rate"))
            axes.legend(frameon=False)
    return figure


def standard_error(runs: pd.DataFrame, field: str) -> float:
    """Return the standard error of a mean over seeds; of one run that of its test set, where the field is a share."""
    values = [float(value) for value in runs[field].dropna()]
    if len(values) > 1:
        return stdev(values) / math.sqrt(len(values))
    examples = runs.test_examples.max()
    return share_error(values[0], examples) if field == "test_accuracy" and examples > 0 else 0.0


def _panels(count: int) -> tuple[Figure, list[Axes]]:
    columns = min(2, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(4.6 * columns + 2, 3.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    axes = list(grid)
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def _name_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set(xscale="log", yscale="log", title=title, xlabel=x_label, ylabel=y_label)
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        if high < 10 * low:  # a short axis has plain steps
            axis.set_major_locator(matplotlib.ticker.MaxNLocator(nbins=6, steps=[1, 2, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, position: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.2)
