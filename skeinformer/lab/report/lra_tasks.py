"""Which tasks tell methods apart: exact attention must beat the trivial models on them by two standard errors.

Where it does not, a table of methods is one of noise, or of how well tokens are counted. Such a task is marked, and no
average takes it in without saying so.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple

from skeinformer.lab.records import Record
from skeinformer.lab.report.format import REFERENCE
from skeinformer.lab.report.intervals import share_error
from skeinformer.lab.report.lra_cells import PERCENT, two_decimals
from skeinformer.lab.report.lra_runs import BASELINES, Arena, MethodRuns, by_seed
from skeinformer.lab.report.published import TASKS

MARK = "†"
ERRORS = 2  # standard errors
FLOORS = {"vmean": "V-mean", "bag_of_tokens": BASELINES["bag_of_tokens"]}  # models that do not attend


class Lead(NamedTuple):
    """By how many points exact attention is ahead of a model, and the standard error of that."""

    points: float
    error: float

    @property
    def is_clear(self) -> bool:
        return self.points > ERRORS * self.error


class Telling(NamedTuple):
    """What a task shows of exact attention: its accuracy, and its lead over each floor, None where a run is missing."""

    task: str
    exact: float | None
    leads: Mapping[str, Lead | None]

    @property
    def holds(self) -> bool | None:
        """Does the task tell methods apart? None: a run is missing, and the others do not answer it."""
        if any(lead is not None and not lead.is_clear for lead in self.leads.values()):
            return False
        return True if all(self.leads.values()) else None

    @property
    def verdict(self) -> str:
        """The same in words."""
        level = [FLOORS[name] for name, lead in self.leads.items() if lead is not None and not lead.is_clear]
        missing = [FLOORS[name] for name, lead in self.leads.items() if lead is None]
        if level:
            return f"no: exact attention does not beat {' and '.join(level)} by {ERRORS} standard errors"
        if self.exact is None:
            return "not known: no run of exact attention"
        return f"not known: no run of {' and '.join(missing)} with its seeds" if missing else "yes"


def telling(arena: Arena) -> dict[str, Telling]:
    """Of each task that has runs."""
    exact = _runs_of(arena.rows, REFERENCE)
    floors = {name: _runs_of((*arena.rows, *arena.baselines), name) for name in FLOORS}
    found = {}
    for task in TASKS:
        runs = exact.get(task, ())
        if runs or any(run.get("task") == task for run in arena.runs):
            accuracies = by_seed(runs, "test_accuracy")
            mean = PERCENT * fmean(accuracies.values()) if accuracies else None
            leads = {name: lead(runs, others.get(task, ())) for name, others in floors.items()}
            found[task] = Telling(task, mean, leads)
    return found


def lead(exact: Sequence[Record], floor: Sequence[Record]) -> Lead | None:
    """Over the common seeds. The standard error is that over the seeds or that of the test set, the greater one.

    Two seeds that agree by chance would else make any lead clear. The test set is the same for both, which makes its
    part smaller than what independent sets would give: the error is on the safe side.
    """
    ours, theirs = (by_seed(runs, "test_accuracy") for runs in (exact, floor))
    seeds = [seed for seed in ours if seed in theirs]
    examples = [count for runs in (exact, floor) for count in by_seed(runs, "test_examples").values()]
    if not seeds or not examples:
        return None
    gaps = [ours[seed] - theirs[seed] for seed in seeds]
    means = (fmean(accuracies[seed] for seed in seeds) for accuracies in (ours, theirs))
    of_test = math.hypot(*(share_error(mean, min(examples)) for mean in means))
    of_seeds = stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else 0.0
    return Lead(PERCENT * fmean(gaps), PERCENT * max(of_test, of_seeds))


def marked(task: str, known: Mapping[str, Telling]) -> str:
    """The name of a task, with a mark where it does not tell methods apart."""
    return f"{TASKS[task]} {MARK}" if is_marked(task, known) else TASKS[task]


def is_marked(task: str, known: Mapping[str, Telling]) -> bool:
    return task in known and known[task].holds is False


def that_tell(known: Mapping[str, Telling]) -> list[str]:
    """The tasks of which it is shown."""
    return [task for task, found in known.items() if found.holds]


def lead_text(found: Lead | None) -> str:
    """ "+9.15 ± 1.46", in points."""
    return "-" if found is None else f"{found.points:+.2f} ± {two_decimals(found.error)}"


def _runs_of(rows: Sequence[MethodRuns], method: str) -> Mapping[str, Sequence[Record]]:
    return next((row.runs for row in rows if row.method == method and not row.options), {})
