"""Pictures of the Long Range Arena: loss against processor time of training, a panel for each recipe and task."""

from collections.abc import Iterable, Sequence

from skeinformer.lab.records import Record
from skeinformer.lab.report.figures import Panel, Series
from skeinformer.lab.report.format import label, real
from skeinformer.lab.report.lra_runs import curves, of_kind, of_recipe, recipes
from skeinformer.lab.report.published import TASKS


def loss_panels(records: Iterable[Record]) -> list[Panel]:
    """Validation loss of each run, and its training loss thin, against seconds of training; runs without overrides.

    Of processors: other work on the machine changes wall time several times over.
    """
    checks = [check for check in of_kind(records, "lra_check") if not check.get("overrides")]
    panels = []
    for recipe in recipes(checks):
        for task, name in TASKS.items():
            mine = [check for check in checks if of_recipe(check, recipe) and check.get("task") == task]
            if series := _series(mine):
                data = {"recipe": recipe, "task": task}
                panels.append(Panel(f"recipe {recipe}: {name}", "processor time of training, s", "loss", series, data))
    return panels


def _series(checks: Iterable[Record]) -> list[Series]:
    """The lines of a panel; of several seeds the first has the name."""
    lines: list[Series] = []
    named: set[str] = set()
    for run in curves(checks):
        name = label(run[-1])
        if points := _points(run, "valid_loss"):
            lines.append(_line(name, points)._replace(named=name not in named))
            named.add(name)
        if points := _points(run, "loss"):
            lines.append(_line(name, points)._replace(thin=True))
    return lines


def _line(name: str, points: Sequence[tuple[float, float]]) -> Series:
    return Series(name, [x for x, _ in points], [y for _, y in points])


def _points(run: Sequence[Record], field: str) -> list[tuple[float, float]]:
    """Seconds of processors and loss, where a logarithmic axis can show both."""
    points = [(real(check, "cpu_seconds") or 0.0, real(check, field) or 0.0) for check in run]
    return [(seconds, loss) for seconds, loss in points if seconds > 0 and loss > 0]
