"""Sections of the Long Range Arena: the paper's Tables 1 to 4 beside its own figures, loss, settings, failures.

A recipe has tables of its own, each marked with its name. The page and the markdown file show the same tables.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape

from skeinformer.attention import METHODS
from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.figures import Styles, grid_html
from skeinformer.lab.report.format import count, distinct, label, listed, size
from skeinformer.lab.report.lra_cells import ACCURACY, TABLES, RunMeasure, Table, cell_column, table_row, text_column
from skeinformer.lab.report.lra_claims import claims_table, paired_table, tasks_table
from skeinformer.lab.report.lra_figures import loss_panels
from skeinformer.lab.report.lra_runs import (
    Arena,
    arenas,
    check_tasks,
    failed_runs,
    grouped,
    is_stand_in,
    of_recipe,
    recipes,
    run_key,
    split_runs,
)
from skeinformer.lab.report.lra_study import (
    is_studied,
    study_html,
    study_panels,
    study_tables,
    summary,
    summary_columns,
)
from skeinformer.lab.report.lra_tasks import MARK, Telling, is_marked, marked, telling, that_tell
from skeinformer.lab.report.page import Section, made_by
from skeinformer.lab.report.published import PUBLISHED, TASKS
from skeinformer.lab.report.tables import Column, attributes_html, boxed, markdown_text, table_html, table_markdown

KINDS = ("lra_run", "lra_check", "lra_baseline", "lra_failure")
FIELDS = frozenset({"recipe", "task", "label"})
STUDY = "Skeinformer on Text: batch and learning rate"
OTHERS = "Runs with other settings"
FAILURES = "Failed runs"
STAND_IN = "stand-in, not comparable with the published figures"
# what the name of a recipe says of the figures under it
RECIPES = {
    "paper": "The paper's recipe. The published times are of a Tesla V100, ours of the machine named at the end.",
    "cpu": (
        "A recipe made for processors, with its settings below; it is not the paper's. Compare the methods within "
        "a table: the distance to the published figures is also that of the recipes."
    ),
}
LEGEND = (
    "Published: the figures of Chen et al. (2022), of the same row and task. Accuracy: of the best weights by "
    "validation, on the test set; mean over the seeds, ± standard deviation, and the 95 % interval: of the mean by "
    "Student's t over the seeds, or of one run by Wilson's score over the test examples. Average: over all five "
    "tasks, with an interval where all tasks have the same seeds, or one run each. The other tables have the deviation "
    "and the interval over the seeds too. Steps, in thousands: until the run stopped, and where its best check was. "
    "Times: of training without the checks, in minutes; processor: the time of all threads and processes, which other "
    "work on the machine changes less; compilation: beside both. Peak: the most memory of a run, its processes added "
    "up. Exact attention runs on a fused kernel in linear memory here, so micro-batches differ less than the paper's. "
    "In bold: the best accuracy of a column, without the trivial models. A dash: no run."
)
LOSS_NOTE = (
    "Loss on the validation set against training time, on logarithmic axes, a line for each seed; thin: the training "
    "loss since the last check. The paper shows this as a picture, without figures."
)


def lra_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """The tables of each recipe, loss against time, the hyper-parameter study, other runs, failures."""
    check_tasks(records)
    runs = [record for record in records if record.get("kind") != "lra_baseline"]
    sections = []
    for arena in arenas(records):
        notes = "".join(f"<p>{escape(note)}</p>\n" for note in arena_notes(arena))
        body = "\n".join(_html(table) for table in arena_tables(arena))
        html = f"<div class='holds'><div{attributes_html({'recipe': arena.recipe})}>\n{notes}{body}\n</div></div>"
        legend = f"<p class='faint'>{escape(LEGEND)}</p>"
        sections.append(Section(f"Long Range Arena, recipe {arena.recipe}", f"{html}\n{legend}", FIELDS, runs))
    if panels := loss_panels(records):
        html = f"<p class='faint'>{escape(LOSS_NOTE)}</p>\n{grid_html(panels, styles)}"
        sections.append(Section("Loss against training time", html, FIELDS, runs))
    for title, tables in ((STUDY, study_tables(records)), (OTHERS, other_tables(records))):
        if tables:
            drawn = study_html(study_panels(records)) if title == STUDY else ""
            html = f"{drawn}<div class='holds'>{''.join(_html(table) for table in tables)}</div>"
            sections.append(Section(title, html, FIELDS, runs))
    if failures := failed_runs(records):
        items = "".join(f"<li{attributes_html(_names(r))}>{escape(failure_text(r))}</li>" for r in failures)
        sections.append(Section(FAILURES, f"<ul class='holds'>{items}</ul>", FIELDS, runs))
    return sections


def lra_markdown(records: Sequence[Record]) -> str:
    """The tables as the text of a markdown file; a ValueError where there is none."""
    records = [record for record in records if record.get("kind") in KINDS]
    check_tasks(records)
    found = arenas(records)
    studied, others, failures = study_tables(records), other_tables(records), failed_runs(records)
    if not (found or studied or others):
        raise ValueError("no table of the Long Range Arena shows these records; finish a run of it first")
    parts = [
        "<!-- written by skein report --markdown: to change it, change the records and write it again -->",
        "# The Long Range Arena",
        markdown_text(LEGEND),
    ]
    for arena in found:
        parts.append(f"## Recipe `{arena.recipe}`")
        parts += [markdown_text(note) for note in arena_notes(arena)]
        parts += [_markdown(table) for table in arena_tables(arena)]
    for title, tables in ((STUDY, studied), (OTHERS, others)):
        if tables:
            parts += [f"## {title}", *(_markdown(table) for table in tables)]
    if failures:
        parts += [f"## {FAILURES}", "\n".join(f"- {markdown_text(failure_text(record))}" for record in failures)]
    made = "\n".join(f"- {name}: {markdown_text(text)}" for name, text in made_by(records).items())
    return "\n\n".join([*parts, "## How it was made", made]) + "\n"


def arena_tables(arena: Arena) -> list[Table]:
    """The paper's tables, what of it holds, and what the recipe set for each task."""
    known = telling(arena)
    found = []
    for name, measure in TABLES:
        title = f"{name} (recipe {arena.recipe}): {measure.heading(measure.title)}"
        rows = [table_row(row, measure, that_tell(known)) for row in arena.rows]
        if measure is ACCURACY:
            rows += [{**table_row(row, measure, that_tell(known)), "baseline": True} for row in arena.baselines]
        columns = _columns(rows, measure, arena.stand_in, known)
        found.append(Table(title, rows, columns, arena.recipe, table_note(arena, measure, known)))
    if not arena.runs:
        return found
    shown = (tasks_table(arena, known), paired_table(arena, known), claims_table(arena, known))
    return [*found, *(table for table in shown if table is not None), _settings_table(arena)]


def table_note(arena: Arena, measure: RunMeasure, known: Mapping[str, Telling]) -> str:
    """What a reader must know of some of the columns."""
    if measure is not ACCURACY:
        return f"Retrieval: {STAND_IN}." if arena.stand_in else ""
    notes = [f"Retrieval, and with it the Average: {STAND_IN}."] if arena.stand_in else []
    if any(is_marked(task, known) for task in TASKS):
        notes.append(
            f"{MARK} does not tell methods apart: exact attention does not beat models without attention there (the"
            " table after Table 4 has the numbers). The Average takes such a task in; the last column does not."
        )
    return " ".join(notes)


def arena_notes(arena: Arena) -> list[str]:
    """What the recipe is, and which of the rows have no run: the paper's, and the cluster sketch."""
    there = {row.method for row in arena.rows if not row.options}
    missing = [METHODS[method].label for method in (*PUBLISHED, "cluster") if method not in there]
    notes = [RECIPES.get(arena.recipe, "")]
    notes.append(f"Rows without a run: {', '.join(missing)}." if missing else "")
    return [note for note in notes if note]


def other_tables(records: Sequence[Record]) -> list[Table]:
    """The runs that stand in no other table, a table for each recipe."""
    others = [run for run in split_runs(records)[1] if not is_studied(run)]
    names = ("method", "options", "task", "overrides", "data")
    tables = []
    for recipe in recipes(others):
        mine = [run for run in others if of_recipe(run, recipe)]
        rows = []
        for group in grouped(mine, lambda run: run_key(run, names)).values():
            what: Record = {name: group[-1].get(name) for name in ("label", "method", "task", "overrides", "data")}
            rows.append({**what, **summary(group)})
        columns = [
            Column("method", label),
            _task_column(),
            text_column("overrides", "settings other than the recipe's"),
            Column("data", lambda row: _source(row.get("task"), row.get("data"))),
            *(column._replace(best=None) for column in summary_columns()),
        ]
        tables.append(Table(f"Recipe {recipe}, with other settings or data", rows, columns, recipe))
    return tables


def failure_text(record: Record) -> str:
    """Which run it was, and its error."""
    names = [f"recipe {record.get('recipe')}", TASKS[str(record["task"])], label(record), f"seed {record.get('seed')}"]
    if record.get("overrides"):
        names.append(str(record["overrides"]))
    return f"{', '.join(names)}: {record.get('error')}"


def _columns(rows: Sequence[Record], measure: RunMeasure, stand_in: bool, known: Mapping[str, Telling]) -> list[Column]:
    """Measured beside published, task by task; of the accuracy also the averages, and marks in the headings."""
    columns = [Column("method", label)]
    is_accuracy = measure is ACCURACY
    for task, name in TASKS.items():
        heading = marked(task, known) if is_accuracy else name
        heading = f"{heading} (stand-in)" if stand_in and task == "retrieval" else heading
        pair = _pair(task, heading, name, measure, {"task": task})
        if is_accuracy and is_marked(task, known):
            pair[0] = pair[0]._replace(best=None)  # none is the best there
        columns += pair
    if is_accuracy:
        taken_in = any(is_marked(task, known) for task in TASKS)
        columns += _pair("average", f"Average {MARK}" if taken_in else "Average", "Average", measure, {})
        if len(that_tell(known)) < len(TASKS) or any("average" not in row for row in rows):
            columns.append(cell_column("telling", measure.heading("average of the tasks that tell methods apart")))
    return columns


def _pair(field: str, name: str, published: str, measure: RunMeasure, data: dict[str, str]) -> list[Column]:
    """What was measured, and what is published."""
    return [
        cell_column(field, measure.heading(name), measure.best, data),
        cell_column(f"{field}_published", measure.heading(f"{published}, published"), data={**data, "published": ""}),
    ]


def _settings_table(arena: Arena) -> Table:
    """The data and the settings of each task; several values where the runs differ."""
    shown: dict[str, tuple[str, Callable[[Value], str]]] = {
        "n": ("n", count),
        "budget": ("d", count),
        "batch": ("batch, examples", count),
        "learning_rate": ("learning rate", lambda value: f"{value:g}"),
        "max_steps": ("most steps", count),
        "memory_budget": ("memory for a micro-batch", size),
        "parameters": ("parameters", count),
        "test_examples": ("test examples", count),
        "seed": ("seeds", str),
    }
    rows: list[Record] = []
    for task in TASKS:
        runs = [run for run in arena.runs if run.get("task") == task]
        if runs:
            row: Record = {"task": task, "data": listed([_source(task, data) for data in distinct(runs, "data")])}
            for field, (_, show) in shown.items():
                row[field] = listed([show(value) for value in distinct(runs, field)])
            rows.append(row)
    columns = [_task_column(), *(text_column(field, heading) for field, (heading, _) in shown.items())]
    columns.insert(1, text_column("data", "data"))
    return Table(f"Settings and data (recipe {arena.recipe})", rows, columns, arena.recipe)


def _source(task: Value, data: Value) -> str:
    """The name of the data, and whether it is a stand-in."""
    name = str(data or "unknown")
    return f"{name} ({STAND_IN})" if is_stand_in(task, data) else name


def _task_column() -> Column:
    return Column("task", lambda row: TASKS[str(row["task"])])


def _is_rival(row: Record) -> bool:
    return not row.get("baseline")


def _names(row: Record) -> Mapping[str, str]:
    """For the filters; they do not know the trivial models."""
    names = ("recipe", "task", "label") if _is_rival(row) else ("recipe", "task")
    return {name: str(row[name]) for name in names if row.get(name) is not None}


def _html(table: Table) -> str:
    html = table_html(table.rows, table.columns, rival=_is_rival, data=_names, sortable=True)
    return boxed(html, table.title, {"recipe": table.recipe}, table.note)


def _markdown(table: Table) -> str:
    note = f"{markdown_text(table.note)}\n\n" if table.note else ""
    text = table_markdown(table.rows, table.columns, rival=_is_rival)
    return f"### {markdown_text(table.title)}\n\n{note}{text}"
