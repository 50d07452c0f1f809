"""Sections of the Long Range Arena: the paper's Tables 1 to 4 beside its own figures, loss, settings, failures.

A recipe has tables of its own, each marked with its name. The page and the markdown file show the same tables.
"""

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.figures import Styles, grid_html
from skeinformer.lab.report.format import count, distinct, label, listed, size
from skeinformer.lab.report.lra_cells import (
    ACCURACY,
    LOSS,
    MISSING,
    PACE,
    STEPS,
    TABLES,
    TOTAL,
    Measure,
    cell,
    cell_column,
    table_row,
)
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
from skeinformer.lab.report.page import Section, made_by
from skeinformer.lab.report.published import PUBLISHED, TASKS
from skeinformer.lab.report.tables import (
    Column,
    attributes_html,
    boxed,
    markdown_text,
    table_html,
    table_markdown,
)

KINDS = ("lra_run", "lra_check", "lra_baseline", "lra_failure")
FIELDS = frozenset({"recipe", "task", "label"})
STUDIED = {"batch", "learning_rate"}  # the overrides of the hyper-parameter study
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
    "tasks, with an interval where all tasks have the same seeds, or one run each. Steps, in thousands: until the "
    "run stopped, and where its best check was. Times: of training without the checks, in minutes; processor: the "
    "time of all its threads, which other work on the machine changes less. Peak: the most memory of a run. Exact "
    "attention runs on a fused kernel in linear memory here, so micro-batches differ less than the paper's. In bold: "
    "the best accuracy of a column, without the trivial models. A dash: no run."
)
LOSS_NOTE = (
    "Loss on the validation set against training time, on logarithmic axes, a line for each seed; thin: the training "
    "loss since the last check. The paper shows this as a picture, without figures."
)
STUDY_NOTE = "The text of the paper has no figures of this study."


class Table(NamedTuple):
    """A table of either form, with the sentence below its title, and what the filters know it by."""

    title: str
    rows: Sequence[Record]
    columns: Sequence[Column]
    recipe: str
    note: str = ""


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
            html = f"<div class='holds'>{''.join(_html(table) for table in tables)}</div>"
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
    """The paper's tables, and what the recipe set for each task."""
    found = []
    for name, measure in TABLES:
        title = f"{name} (recipe {arena.recipe}): {measure.heading(measure.title)}"
        rows = [table_row(row, measure) for row in arena.rows]
        if measure is ACCURACY:
            rows += [{**table_row(row, measure), "baseline": True} for row in arena.baselines]
        note = f"Retrieval: {STAND_IN}." if arena.stand_in else ""
        if note and measure is ACCURACY:
            note = f"Retrieval, and with it the Average: {STAND_IN}."
        found.append(Table(title, rows, _columns(rows, measure, arena.stand_in), arena.recipe, note))
    return [*found, _settings_table(arena)] if arena.runs else found


def arena_notes(arena: Arena) -> list[str]:
    """What the recipe is, and which of the paper's rows have no run."""
    there = {row.method for row in arena.rows if not row.options}
    missing = [published.name for method, published in PUBLISHED.items() if method not in there]
    notes = [RECIPES.get(arena.recipe, "")]
    notes.append(f"Rows of the paper without a run: {', '.join(missing)}." if missing else "")
    return [note for note in notes if note]


def study_tables(records: Sequence[Record]) -> list[Table]:
    """Skeinformer on Text for every batch and learning rate of which there are runs, a table for each recipe."""
    pure, others = split_runs(records)
    studied = [run for run in others if _is_studied(run)]
    alike = grouped(studied, _setting_of_study)
    tables = []
    for recipe, data, rest in sorted(alike, key=lambda key: (recipes(studied).index(str(key[0])), *map(str, key[1:]))):
        mine = [run for run in pure if _is_skeinformer_on_text(run)] + studied
        mine = [run for run in mine if _setting_of_study(run) == (recipe, data, rest)]
        found = grouped(mine, lambda run: run_key(run, ("batch", "learning_rate")))
        rows = [
            {"label": label(mine[-1]), "batch": batch, "learning_rate": rate, **_summary(found.get((batch, rate), ()))}
            for batch in distinct(mine, "batch")
            for rate in distinct(mine, "learning_rate")
        ]
        columns = [
            Column("batch, examples", lambda row: count(row.get("batch")), field="batch"),
            Column("learning rate", lambda row: f"{row['learning_rate']:g}", field="learning_rate"),
            *_summary_columns(),
        ]
        changed = f" with {rest}" if rest else ""
        title = f"Recipe {recipe}{changed}, data {data}: every batch with every learning rate"
        tables.append(Table(title, rows, columns, str(recipe), STUDY_NOTE))
    return tables


def other_tables(records: Sequence[Record]) -> list[Table]:
    """The runs that stand in no other table, a table for each recipe."""
    others = [run for run in split_runs(records)[1] if not _is_studied(run)]
    names = ("method", "options", "task", "overrides", "data")
    tables = []
    for recipe in recipes(others):
        mine = [run for run in others if of_recipe(run, recipe)]
        rows = []
        for group in grouped(mine, lambda run: run_key(run, names)).values():
            what: Record = {name: group[-1].get(name) for name in ("label", "task", "overrides", "data")}
            rows.append({**what, **_summary(group)})
        columns = [
            Column("method", label),
            _task_column(),
            _text_column("overrides", "settings other than the recipe's"),
            Column("data", lambda row: _source(row.get("task"), row.get("data"))),
            *(column._replace(best=None) for column in _summary_columns()),
        ]
        tables.append(Table(f"Recipe {recipe}, with other settings or data", rows, columns, recipe))
    return tables


def failure_text(record: Record) -> str:
    """Which run it was, and its error."""
    names = [f"recipe {record.get('recipe')}", TASKS[str(record["task"])], label(record), f"seed {record.get('seed')}"]
    if record.get("overrides"):
        names.append(str(record["overrides"]))
    return f"{', '.join(names)}: {record.get('error')}"


def _columns(rows: Sequence[Record], measure: Measure, stand_in: bool) -> list[Column]:
    """Measured beside published, task by task; of the accuracy also the averages."""
    columns = [Column("method", label)]
    for task, name in TASKS.items():
        marked = f"{name} (stand-in)" if stand_in and task == "retrieval" else name
        columns += _pair(task, marked, name, measure, {"task": task})
    if measure is ACCURACY:
        columns += _pair("average", "Average", "Average", measure, {})
        if any("average" not in row for row in rows):
            columns.append(cell_column("present", measure.heading("average of the tasks present")))
    return columns


def _pair(field: str, name: str, published: str, measure: Measure, data: dict[str, str]) -> list[Column]:
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
    columns = [_task_column(), *(_text_column(field, heading) for field, (heading, _) in shown.items())]
    columns.insert(1, _text_column("data", "data"))
    return Table(f"Settings and data (recipe {arena.recipe})", rows, columns, arena.recipe)


def _source(task: Value, data: Value) -> str:
    """The name of the data, and whether it is a stand-in."""
    name = str(data or "unknown")
    return f"{name} ({STAND_IN})" if is_stand_in(task, data) else name


def _task_column() -> Column:
    return Column("task", lambda row: TASKS[str(row["task"])])


def _text_column(field: str, heading: str) -> Column:
    return Column(heading, lambda row: str(row.get(field) or MISSING))


def _summary(runs: Sequence[Record]) -> Record:
    """Accuracy, loss, steps and times of the same settings under several seeds."""
    row: Record = {}
    for measure in (ACCURACY, LOSS, STEPS, PACE, TOTAL):
        row |= cell(runs, measure, measure.field)
    return row


def _summary_columns() -> list[Column]:
    return [cell_column(m.field, m.heading(m.title), m.best) for m in (ACCURACY, LOSS, STEPS, PACE, TOTAL)]


def _is_skeinformer_on_text(run: Record) -> bool:
    return run_key(run, ("task", "method", "options")) == ("text", "skeinformer", "")


def _is_studied(run: Record) -> bool:
    """Does the run change the batch or the learning rate of its recipe?"""
    return _is_skeinformer_on_text(run) and any(name in STUDIED for name, _ in _overrides(run))


def _setting_of_study(run: Record) -> tuple[Value, ...]:
    """What the runs of a study share: recipe, data, and what else they change."""
    rest = ", ".join(f"{name}={value}" for name, value in _overrides(run) if name not in STUDIED)
    return run.get("recipe"), run.get("data"), rest


def _overrides(run: Record) -> list[tuple[str, str]]:
    parts = [part.partition("=") for part in str(run.get("overrides") or "").split(",")]
    return [(name.strip(), value.strip()) for name, _, value in parts if name.strip()]


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
