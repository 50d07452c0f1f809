"""Section of `python -m studies.embeddings`: how near sketched embeddings are to exact ones, in what time."""

from collections.abc import Iterable, Sequence
from statistics import fmean
from typing import NamedTuple

from skeinformer.lab.records import Record
from skeinformer.lab.report.figures import Panel, Series, Styles, grid_html
from skeinformer.lab.report.format import REFERENCE, count, distinct, label, number, real, seconds
from skeinformer.lab.report.page import Section
from skeinformer.lab.report.tables import Column, simple_table, spread_column

FIELDS = frozenset({"label", "n"})
TIME = "time of the model / with exact attention"

LEGEND = (
    "Cosine: between the embedding of a passage by exact and by sketched attention; mean and least over passages. "
    "Recall at k: which share of the k nearest other passages is the same where all are embedded by the sketch. "
    "Time / exact: of the whole model, forward, median and quartiles of rounds in which all methods take turns. The "
    "positions that the model was trained with begin again along a passage; nothing was retrained. In bold: "
    "the best, V-mean aside."
)
DRAWN = "Lines are means over seeds."


class EmbeddingSetting(NamedTuple):
    """What is the same within a panel."""

    model: str
    text: str
    n: str
    passages: str
    threads: str


def embedding_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """Distance and recall against time, and the table."""
    rows = latest_embeddings(records)
    several = [name for name in ("seed", "threads") if len(distinct(rows, name)) > 1]
    columns = (
        Column("method", label),
        Column("d", lambda r: str(r.get("budget") or ""), field="budget"),
        Column("n", lambda r: count(r.get("n")), field="n"),
        Column("passages", lambda r: count(r.get("passages")), field="passages"),
        *(Column(name, lambda r, name=name: count(r.get(name)), field=name) for name in several),  # type: ignore[misc]
        Column("cosine", lambda r: number(r.get("cosine")), _least, "cosine", "high"),
        Column("recall at 1", lambda r: number(r.get("recall_1")), field="recall_1", best="high"),
        Column("recall at 3", lambda r: number(r.get("recall_3")), field="recall_3", best="high"),
        Column("recall at 10", lambda r: number(r.get("recall_10")), field="recall_10", best="high"),
        spread_column("a passage", "seconds", seconds),
        spread_column("time / exact", "ratio", number, "low"),
        Column("model", lambda r: str(r.get("model") or "")),
    )
    panels = embedding_panels(rows)
    lines = any(len(line.x) > 1 for panel in panels for line in panel.series)
    drawn = f"<p class='faint'>{DRAWN}</p>\n{grid_html(panels, styles)}" if lines else ""
    html = f"{drawn}\n{simple_table(rows, columns, LEGEND)}"
    return [Section("Embeddings of long passages", html, FIELDS, records)]


def embedding_panels(records: Iterable[Record]) -> list[Panel]:
    """1 - cosine, and the recall at 1 and 10, each against the time, for every Setting."""
    found: dict[EmbeddingSetting, list[Record]] = {}
    rows = [r for r in latest_embeddings(records) if r.get("method") != REFERENCE]
    for record in rows:
        found.setdefault(EmbeddingSetting(*(str(record.get(name)) for name in EmbeddingSetting._fields)), []).append(
            record
        )
    panels = []
    for setting, group in found.items():
        about = [
            text
            for name, text in (
                ("model", setting.model),
                ("text", setting.text),
                ("n", f"n = {setting.n}"),
                ("passages", f"{setting.passages} passages"),
                ("threads", f"{setting.threads} thread{'' if setting.threads == '1' else 's'}"),
            )
            if name in ("n", "passages") or len(distinct(rows, name)) > 1
        ]
        for title, axis, field in (
            ("distance from the exact embedding", "1 - cosine, mean", "distance"),
            ("the nearest passage", "recall at 1", "recall_1"),
            ("the ten nearest passages", "recall at 10", "recall_10"),
        ):
            lines = _lines(group, field)
            if lines:
                panels.append(Panel(f"{title}: {', '.join(about)}", TIME, axis, lines, {"n": setting.n}))
    return panels


def latest_embeddings(records: Iterable[Record]) -> list[Record]:
    """Of records about the same the last, in the order of the first."""
    names = (*EmbeddingSetting._fields, "method", "options", "budget", "seed")
    return list({tuple(record.get(name) for name in names): record for record in records}.values())


def _lines(group: Iterable[Record], field: str) -> list[Series]:
    """A line for each method, along d, of means over seeds, where logarithmic axes can show it."""
    found: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for record in sorted(group, key=lambda r: real(r, "budget") or 0):
        cosine, time = real(record, "cosine"), real(record, "ratio")
        value = real(record, field) if field != "distance" else None if cosine is None else 1 - cosine
        if value is not None and time:
            found.setdefault(label(record), {}).setdefault(real(record, "budget") or 0, []).append((time, value))
    lines = []
    for name, sizes in found.items():
        points = [(fmean(x for x, _ in seeds), fmean(y for _, y in seeds)) for seeds in sizes.values()]
        if shown := [point for point in points if point[1] > 0]:
            lines.append(Series(name, [x for x, _ in shown], [y for _, y in shown], end=True))
    return lines


def _least(record: Record) -> str:
    least = number(record.get("cosine_min"))
    return f"at least {least}" if least else ""
