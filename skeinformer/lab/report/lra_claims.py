"""What the paper claims of Skeinformer, and whether these records bear it out: paired over seeds, never from one."""

from collections.abc import Mapping
from typing import NamedTuple

from skeinformer.attention import METHODS
from skeinformer.lab.records import Record
from skeinformer.lab.report.format import REFERENCE
from skeinformer.lab.report.lra_cells import MISSING, Table, cell_column, text_column
from skeinformer.lab.report.lra_paired import (
    ACCURACY_GAP,
    LEAST_SEEDS,
    PACE_RATIO,
    STEPS_RATIO,
    Quantity,
    SeedDifference,
    by_task,
    over_tasks,
    pair,
    pair_text,
    published_pair,
)
from skeinformer.lab.report.lra_runs import Arena, MethodRuns
from skeinformer.lab.report.lra_tasks import FLOORS, Telling, lead_text, marked, that_tell
from skeinformer.lab.report.published import PUBLISHED, TASKS
from skeinformer.lab.report.tables import Column

OURS = "skeinformer"
EXACT_ROWS = (REFERENCE, "softmax_dropout")
HOLDS, FAILS, TOO_FEW = "holds", "does not hold", "too few seeds"
LEVEL = 1.0  # points that count as level


class Claim(NamedTuple):
    """`first` compared with `second`: what must be above `bound`, or below it where less is better."""

    text: str
    second: str
    quantity: Quantity = ACCURACY_GAP
    bound: float = 0.0
    less: bool = False
    first: str = OURS
    all_tasks: bool = False  # also on tasks that do not tell methods apart

    @property
    def compared(self) -> str:
        sign = "/" if self.quantity.ratio else "-"
        return f"{METHODS[self.first].label} {sign} {METHODS[self.second].label}; {self.quantity.name}"


CLAIMS = (
    *(
        Claim(f"Skeinformer's accuracy is level: less than {LEVEL:g} point behind", exact, bound=-LEVEL)
        for exact in EXACT_ROWS
    ),
    Claim("Importance sampling helps", "skeinformer_uniform"),
    Claim("Row normalization helps", "skeinformer_no_norm"),
    Claim("Adaptive row normalization helps more than the simple one", "skeinformer_simple_norm"),
    Claim("Pilot reutilization helps", "skeinformer_no_reuse"),
    *(Claim("A step takes less time", exact, PACE_RATIO, less=True, all_tasks=True) for exact in EXACT_ROWS),
    *(Claim("It converges in fewer steps", exact, STEPS_RATIO, less=True) for exact in EXACT_ROWS),
)
CLAIMS_NOTE = (
    "Each claim on the mean over tasks, which are named: those that tell methods apart and on which both methods have "
    f"at least {LEAST_SEEDS} seeds in common, if there are such; time of a step on all tasks. A claim holds where the "
    "95 % interval of the mean over the common seeds, by Student's t, has only values that bear it out, "
    "and does not hold where it has none. Else there are too few seeds: fewer than "
    f"{LEAST_SEEDS} in common, or an interval with both. The paper's Standard has dropout on "
    "its weights. The ablations of sampling and of row normalization are without pilot reutilization too."
)
PAIRED_NOTE = (
    "The mean over the seeds that a method has in common with Standard, exact attention, and its 95 % interval by "
    "Student's t. One seed has no interval and settles nothing."
)
TASKS_NOTE = (
    "Points by which exact attention is ahead of models that do not attend, ± the standard error: over the common "
    "seeds or of the test set, the greater one. A task tells methods apart where both leads are above two of them."
)


class CheckedClaim(NamedTuple):
    """A claim with what the records say of it: by task, over tasks, and the verdict in words."""

    claim: Claim
    tasks: Mapping[str, SeedDifference | None]
    overall: SeedDifference | None
    verdict: str


def judge(claim: Claim, found: SeedDifference | None) -> str:
    """Does the claim hold? With the reason where it cannot be said."""
    if found is None or found.seeds < LEAST_SEEDS or found.interval is None:
        return f"{TOO_FEW} ({found.seeds if found else 0} in common, {LEAST_SEEDS} needed)"
    low, high = found.interval
    above, below = low > claim.bound, high < claim.bound
    if not (above or below):
        return f"{TOO_FEW} (the interval has both answers)"
    return HOLDS if below == claim.less else FAILS


def check_claims(arena: Arena, known: Mapping[str, Telling]) -> list[CheckedClaim]:
    """Every claim, on the runs of one recipe."""
    rows = {row.method: row for row in arena.rows if not row.options}
    found = []
    for claim in CLAIMS:
        first, second = (rows.get(name) or MethodRuns(name, "", name, {}) for name in (claim.first, claim.second))
        each = by_task(arena, claim.quantity, first, second)
        counted = {task: each[task] for task in (TASKS if claim.all_tasks else that_tell(known))}
        overall = over_tasks(counted)
        found.append(CheckedClaim(claim, {task: pair(each[task]) for task in TASKS}, overall, judge(claim, overall)))
    return found


def claims_table(arena: Arena, known: Mapping[str, Telling]) -> Table:
    """A row for each claim: the paired numbers by task and over tasks, the paper's, and the verdict."""
    rows: list[Record] = []
    for claim, tasks, overall, verdict in check_claims(arena, known):
        row: Record = {"claim": claim.text, "compared": claim.compared, "verdict": verdict}
        for task, found in tasks.items():
            row |= _cells(task, claim.quantity, found)
        row |= _cells("overall", claim.quantity, overall)
        published = published_pair(claim.quantity, PUBLISHED[claim.first], PUBLISHED[claim.second])
        row |= {"published_text": claim.quantity.show(published)}
        rows.append(row)
    columns = [text_column("claim", "claim"), text_column("compared", "compared"), *_task_columns(known)]
    columns += [
        cell_column("overall", "mean over tasks"),
        cell_column("published", "published, mean over five tasks"),
        text_column("verdict", "holds?"),
    ]
    return Table(f"What of the paper holds (recipe {arena.recipe})", rows, columns, arena.recipe, CLAIMS_NOTE)


def paired_table(arena: Arena, known: Mapping[str, Telling]) -> Table | None:
    """Every method beside exact attention, in points of accuracy; None where there is no run of that."""
    exact = next((row for row in arena.rows if row.method == REFERENCE and not row.options), None)
    if exact is None:
        return None
    rows: list[Record] = []
    others = [(row, False) for row in arena.rows if row is not exact] + [(row, True) for row in arena.baselines]
    for other, is_trivial in others:
        each = by_task(arena, ACCURACY_GAP, other, exact)
        if not any(each.values()):
            continue
        row: Record = {"label": other.label, "method": other.method, "baseline": is_trivial}
        for task, values in each.items():
            row |= _cells(task, ACCURACY_GAP, pair(values))
        rows.append(row | _cells("overall", ACCURACY_GAP, over_tasks({task: each[task] for task in that_tell(known)})))
    columns = [text_column("label", "method"), *_task_columns(known), cell_column("overall", "mean over tasks, points")]
    title = f"Accuracy beside that of Standard (recipe {arena.recipe}), points, seed by seed"
    return Table(title, rows, columns, arena.recipe, PAIRED_NOTE) if rows else None


def tasks_table(arena: Arena, known: Mapping[str, Telling]) -> Table:
    """Which tasks tell methods apart, with the numbers."""
    rows: list[Record] = []
    for task, found in known.items():
        row: Record = {"task": task, "name": marked(task, known), "verdict": found.verdict, "exact": found.exact}
        row["exact_text"] = MISSING if found.exact is None else f"{found.exact:.2f}"
        rows.append(row | {name: lead_text(lead) for name, lead in found.leads.items()})
    columns = [
        text_column("name", "task"),
        cell_column("exact", f"{METHODS[REFERENCE].label}, %"),
        *(text_column(name, f"ahead of {label}, points") for name, label in FLOORS.items()),
        text_column("verdict", "tells methods apart?"),
    ]
    return Table(f"Which tasks tell methods apart (recipe {arena.recipe})", rows, columns, arena.recipe, TASKS_NOTE)


def _cells(name: str, quantity: Quantity, found: SeedDifference | None) -> Record:
    """The fields that `cell_column` shows; a mean over tasks names them."""
    text, detail = pair_text(quantity, found)
    names = ", ".join(TASKS[task] for task in found.tasks) if found else ""
    return {
        name: found.mean if found else None,
        f"{name}_text": text,
        f"{name}_detail": f"{detail}; {names}" if names else detail,
    }


def _task_columns(known: Mapping[str, Telling]) -> list[Column]:
    return [cell_column(task, marked(task, known), data={"task": task}) for task in TASKS]
