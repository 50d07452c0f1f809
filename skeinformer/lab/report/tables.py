"""Tables of records: a row for each, the best rival in bold; as HTML that the page's script can sort, as markdown."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Literal, NamedTuple

from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.families import family
from skeinformer.lab.report.format import between, is_rival, label, real


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
    contest: Callable[[Record], object] = lambda record: None,
    rival: Callable[[Record], bool] = is_rival,
    data: Callable[[Record], Mapping[str, str]] = lambda record: {},
    sortable: bool = False,
) -> str:
    """A row per record. In bold: the best of the rivals for which `contest` has the same value.

    A column in which no record shows anything is left out. The cells of a column "method" carry the name of the
    method's family, for its colour. `data` gives a row's data attributes. A `sortable` table is sorted by a click on a
    heading, where scripts run, and then its bold values are the best of the rows that the filters leave.
    """
    records = list(records)
    columns = [column for column in columns if any(column.show(record) for record in records)]
    head = "".join(_heading(column) for column in columns)
    rows = []
    for i, record in enumerate(records):
        rivals = [r for r in records if rival(r) and contest(r) == contest(record)] if rival(record) else []
        cells = (_cell(record, column, rivals) for column in columns)
        attributes = {**data(record), **({"rival": ""} if sortable and rival(record) else {})}
        group = not sortable and i > 0 and contest(record) != contest(records[i - 1])
        kind = " class='group'" if group else ""
        rows.append(f"<tr{kind}{attributes_html(attributes)}>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    kind = " class='sortable'" if sortable else ""
    return f"<table{kind}>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def table_markdown(
    records: Iterable[Record], columns: Sequence[Column], *, rival: Callable[[Record], bool] = is_rival
) -> str:
    """The same as markdown, of one contest: a first column of names, the others to the right."""
    records = list(records)
    rivals = [record for record in records if rival(record)]
    rows = [[markdown_text(column.heading) for column in columns], ["---", *("---:" for _ in columns[1:])]]
    for record in records:
        row = []
        for column in columns:
            text, detail = markdown_text(column.show(record)), markdown_text(column.detail(record))
            best = rival(record) and _is_best(_value(record, column), rivals, column)
            row.append(f"{f'**{text}**' if best else text}{f'<br>{detail}' if detail else ''}")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def markdown_text(text: str) -> str:
    """The text on one line, with nothing that ends a cell, opens an element or makes letters slanted or bold."""
    return re.sub(r"([|*\\\[\]])", r"\\\1", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")


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


def boxed(table: str, heading: str = "", data: Mapping[str, str] = {}, note: str = "") -> str:
    """The table in a box of its own that scrolls sideways where the screen is narrow, under a heading and a note."""
    title = f"<h3>{escape(heading)}</h3>\n" if heading else ""
    title += f"<p class='faint'>{escape(note)}</p>\n" if note else ""
    return (
        f'<div{attributes_html(data)}>\n{title}<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{escape(heading or "table")}">\n{table}\n</div>\n</div>'
    )


def _heading(column: Column) -> str:
    data = {**column.data, **({"best": column.best} if column.best else {})}
    kind = " class='word'" if column.field is None else ""
    return f"<th scope='col'{kind}{attributes_html(data)}>{escape(column.heading)}</th>"


def _cell(record: Record, column: Column, rivals: Sequence[Record]) -> str:
    text, detail = escape(column.show(record)), escape(column.detail(record))
    value = _value(record, column)
    data = attributes_html({**column.data, **({} if value is None else {"value": f"{value:.6g}"})})
    own = family(record) if column.heading == "method" else ""
    kinds = ["word"] if column.field is None else ["best"] if _is_best(value, rivals, column) else []
    kinds += [own] if own else []
    kind = f" class='{' '.join(kinds)}'" if kinds else ""
    return f"<td{kind}{data}>{text}{f'<small>{detail}</small>' if detail else ''}</td>"


def _value(record: Record, column: Column) -> float | None:
    return None if column.field is None else real(record, column.field)


def _is_best(value: float | None, rivals: Iterable[Record], column: Column) -> bool:
    if column.best is None:
        return False
    values = [real(rival, column.field or "") for rival in rivals]
    known = [x for x in values if x is not None]
    return bool(known) and value == (min(known) if column.best == "low" else max(known))
