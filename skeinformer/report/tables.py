"""Tables of records: a row for each, the best approximation in bold, values that the page's script can sort by."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Literal, NamedTuple

from skeinformer.records import Record, Value
from skeinformer.report.format import NOT_RIVALS, between, label, real


class Column(NamedTuple):
    """A column: how a record shows in it, what stands small below, its number, and which number is best.

    `field` names the number that the column is sorted by. `data` goes to the cells as data attributes, for the filters.
    """

    heading: str
    show: Callable[[Record], str]
    detail: Callable[[Record], str] = lambda record: ""
    field: str | None = None
    best: Literal["low", "high", None] = None
    data: Mapping[str, str] = {}


def table_html(
    records: Iterable[Record],
    columns: Sequence[Column],
    *,
    contest: Callable[[Record], object],
    data: Callable[[Record], Mapping[str, str]] = lambda record: {},
    sortable: bool = False,
) -> str:
    """A row per record. In bold: the best of the approximations for which `contest` has the same value.

    `data` gives a row's data attributes. A `sortable` table is sorted by a click on a heading, where scripts run, and
    then its bold values are the best of the rows that the filters leave.
    """
    records = list(records)
    head = "".join(_heading(column) for column in columns)
    rows = []
    for record in records:
        approximate = record.get("method") not in NOT_RIVALS
        rivals = [r for r in records if r.get("method") not in NOT_RIVALS and contest(r) == contest(record)]
        cells = (_cell(record, column, rivals if approximate else []) for column in columns)
        attributes = {**data(record), **({"approximate": ""} if sortable and approximate else {})}
        rows.append(f"<tr{attributes_html(attributes)}>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    kind = " class='sortable'" if sortable else ""
    return f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def simple_table(records: Sequence[Record], columns: Sequence[Column], note: str) -> str:
    """A sortable table below a note, its rows for the filter of methods; the best is that among records of equal n."""
    table = table_html(
        records, columns, contest=lambda r: r.get("n"), data=lambda r: {"label": label(r)}, sortable=True
    )
    return f"<p class='faint'>{escape(note)}</p>\n<div class='holds'>{boxed(table)}</div>"


def spread_column(
    heading: str, field: str, write: Callable[[Value], str], best: Literal["low", "high"] | None = None
) -> Column:
    """A median of rounds with its quartiles."""
    return Column(
        heading,
        lambda r: write(r.get(field)),
        lambda r: between(write(r.get(f"{field}_q25")), write(r.get(f"{field}_q75"))),
        field=field,
        best=best,
    )


def attributes_html(data: Mapping[str, str]) -> str:
    """The attributes data-name='value' of an element."""
    return "".join(f' data-{name}="{escape(value)}"' for name, value in data.items())


def boxed(table: str, heading: str = "", data: Mapping[str, str] = {}) -> str:
    """The table in a box of its own that scrolls sideways where the screen is narrow, under a heading."""
    title = f"<h3>{escape(heading)}</h3>\n" if heading else ""
    return f'<div{attributes_html(data)}>\n{title}<div class="scroll" tabindex="0">\n{table}\n</div>\n</div>'


def _heading(column: Column) -> str:
    data = {**column.data, **({"best": column.best} if column.best else {})}
    return f"<th scope='col'{attributes_html(data)}>{escape(column.heading)}</th>"


def _cell(record: Record, column: Column, rivals: Sequence[Record]) -> str:
    text, detail = escape(column.show(record)), escape(column.detail(record))
    value = None if column.field is None else real(record, column.field)
    data = attributes_html({**column.data, **({} if value is None else {"value": f"{value:.6g}"})})
    best = " class='best'" if column.best and _is_best(value, rivals, column) else ""
    return f"<td{best}{data}>{text}{f'<small>{detail}</small>' if detail else ''}</td>"


def _is_best(value: float | None, rivals: Iterable[Record], column: Column) -> bool:
    values = [real(rival, column.field or "") for rival in rivals]
    known = [x for x in values if x is not None]
    return bool(known) and value == (min(known) if column.best == "low" else max(known))
