"""Sections of `skein bench`: time and memory against n, speed beside SDPA and other packages, a training step."""

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Literal, NamedTuple

from skeinformer.lab.measure.crossing import crossover, faster_from, growth_exponent
from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.figures import Panel, Series, Styles, grid_html
from skeinformer.lab.report.format import (
    count,
    distinct,
    label,
    microseconds,
    number,
    operations,
    percent,
    real,
    seconds,
    size,
)
from skeinformer.lab.report.page import Section, select_html
from skeinformer.lab.report.tables import Column, boxed, simple_table, spread_column, table_html

SDPA = "sdpa"
MODES = {"forward": "forward", "both": "forward and backward"}
FIELDS = frozenset({"mode", "n", "budget", "label"})


class BenchSetting(NamedTuple):
    """What is the same within a panel. The batch is not: it may depend on n."""

    mode: str
    heads: str
    head_dim: str
    dtype: str
    threads: str
    device: str


class Show(NamedTuple):
    """A field of the records that the table can show: its name, how it is written, which is best."""

    name: str
    write: Callable[[Value], str]
    best: Literal["low", "high"]


SHOWS = {
    "ratio": Show("times faster than SDPA", number, "high"),
    "seconds": Show("time", seconds, "low"),
    "peak_bytes": Show("peak memory", size, "low"),
    "flops": Show("FLOPs", operations, "low"),
    "peak_fraction": Show("share of the matrix product's peak", percent, "high"),
}

LEGEND = (
    "Times faster than SDPA: the time of torch's fused exact attention divided by the method's, median and quartiles "
    "of rounds, taken round by round; above 1 the method is faster. Faster than SDPA: the length from which it stays "
    "faster, interpolated on logarithmic axes, where a shorter length was measured at which it was slower. Grows as: "
    "the exponent a of time ~ n^a between the two greatest lengths, per example. Peak: FLOPs per second as a share of "
    "a large matrix product's. In bold: the best method shown at each n, V-mean aside."
)


def bench_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """Time and memory against n, and the table of each mode."""
    records = _with_device(records)
    sections = []
    if panels := speed_panels(records):
        note = "Per example, on logarithmic axes. Dashed: SDPA, torch's fused exact attention. At the largest d."
        html = f"<p class='faint'>{escape(note)}</p>\n{grid_html(panels, styles)}"
        sections.append(Section("Time and memory against length", html, FIELDS, records))
    tables = []
    shown = {field: show.name for field, show in SHOWS.items() if any(real(r, field) is not None for r in records)}
    for setting, rows in _settings(records).items():
        for field in shown:
            data = {"mode": setting.mode, "show": field}
            tables.append(boxed(_table_html(rows, field), f"{_title(setting, records)}: {shown[field]}", data))
    choice = f"<p class='control'>show {select_html('show', shown, 'show')}</p>\n" if len(shown) > 1 else ""
    html = f"{choice}<div class='holds'>{''.join(tables)}</div>\n<p class='faint'>{escape(LEGEND)}</p>"
    return [*sections, Section("Speed", html, FIELDS, records)]


def speed_panels(records: Sequence[Record]) -> list[Panel]:
    """Time and memory per example against n, for each mode, at the largest d."""
    records = _with_device(records)
    panels = []
    for setting, rows in _settings(records).items():
        largest = _largest(rows)
        kept = [r for r in rows if r.get("budget") in (None, largest)]
        ticks = [float(n or 0) for n in distinct(kept, "n")]
        for field, name, unit in (("seconds", "time", 1e3), ("peak_bytes", "peak memory", 1 / 2**20)):
            series = [
                Series(key, [point[0] for point in points], [point[1] * unit for point in points])
                for key, points in _points(kept, field).items()
            ]
            if series:
                axis = f"{name} per example, {'ms' if field == 'seconds' else 'MiB'}"
                title = f"{name}, {_title(setting, records)}"
                panels.append(Panel(title, "length n", axis, series, {"mode": setting.mode}, x_ticks=ticks))
    return panels


def peer_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """Our methods beside the packages that implement them."""
    note = "Forward and backward. Their time / ours: above 1 ours is faster; median and quartiles of rounds."
    columns = (
        Column("method", label),
        Column("n", lambda r: count(r.get("n")), field="n"),
        Column("d", lambda r: str(r.get("budget") or ""), field="budget"),
        Column("package", lambda r: str(r.get("peer") or "")),
        spread_column("ours", "seconds", seconds),
        spread_column("theirs", "peer_seconds", seconds),
        spread_column("theirs / ours", "ratio", number),
    )
    return [Section("Beside other packages", simple_table(records, columns, note), frozenset({"label"}), records)]


def step_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """A training step of the model for the LRA task Text."""
    note = "Forward, loss, backward and optimizer. Standard / this: above 1 the method is faster."
    columns = (
        Column("method", label),
        Column("n", lambda r: count(r.get("n")), field="n"),
        Column("batch", lambda r: count(r.get("batch")), field="batch"),
        Column("d", lambda r: str(r.get("budget") or ""), field="budget"),
        spread_column("a step", "seconds", seconds, "low"),
        spread_column("standard / this", "ratio", number, "high"),
    )
    return [Section("A training step", simple_table(records, columns, note), frozenset({"label"}), records)]


def process_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """Attention over tokens that are divided among processes."""
    note = (
        "The slowest process of each round, and the most memory of one process. Exact / this: the time of exact "
        "attention over gathered keys and values by the method's; above 1 the method is faster."
    )
    columns = (
        Column("method", label),
        Column("mode", lambda r: str(r.get("mode") or "")),
        Column("processes", lambda r: count(r.get("processes")), field="processes"),
        Column("n in all", lambda r: count(r.get("n")), field="n"),
        Column("n each", lambda r: count(r.get("n_each")), field="n_each"),
        Column("d", lambda r: str(r.get("budget") or ""), field="budget"),
        spread_column("time", "seconds", seconds),
        Column("per token", lambda r: microseconds(r.get("seconds_per_token")), field="seconds_per_token"),
        Column("memory of one", lambda r: size(r.get("peak_bytes")), field="peak_bytes"),
        Column("received by one", lambda r: size(r.get("received_bytes")), field="received_bytes"),
        spread_column("exact / this", "ratio", number),
    )
    return [Section("Over several processes", simple_table(records, columns, note), frozenset({"label"}), records)]


def _table_html(rows: Sequence[Record], field: str) -> str:
    """A row for each method and d, a column for each n; where it overtakes SDPA, and how its time grows."""
    show = SHOWS[field]
    lengths = [int(n or 0) for n in distinct(rows, "n")]
    columns = [
        Column("method", label),
        Column("d", lambda r: str(r.get("budget") or ""), field="budget"),
        *(
            spread_column(f"n = {n:,}", f"{field}_{n}", show.write, show.best)._replace(data={"n": str(n)})
            for n in lengths
        ),
    ]
    if field in ("ratio", "seconds"):
        columns += [
            Column("faster than SDPA", lambda r: str(r.get("overtakes") or ""), field="crossover"),
            Column("grows as", lambda r: f"n^{r['exponent']:.2f}" if r.get("exponent") else "", field="exponent"),
        ]
    largest = _largest(rows)

    def data(record: Record) -> dict[str, str]:
        budget = record.get("budget")
        chosen = {"largest": ""} if budget == largest else {}
        return {"label": label(record), **({} if budget is None else {"budget": str(budget), **chosen})}

    return table_html(
        _wide(rows, field), columns, contest=lambda r: r.get("budget") or largest, data=data, sortable=True
    )


def _wide(rows: Iterable[Record], field: str) -> list[Record]:
    """One record for each method and d, with the values at all n: field_1024, field_1024_q25 and so on."""
    found: dict[tuple[str, Value], list[Record]] = {}
    for row in sorted(rows, key=lambda r: real(r, "n") or 0):
        found.setdefault((label(row), row.get("budget")), []).append(row)
    wide = []
    for (name, budget), points in found.items():
        # exact attention is no approximation, so that it is never the best one
        method = "softmax" if points[0].get("method") == SDPA else points[0].get("method")
        record: Record = {"label": name, "method": method, "budget": budget}
        for point in points:
            for end in ("", "_q25", "_q75"):
                record[f"{field}_{point['n']}{end}"] = point.get(f"{field}{end}")
        wide.append({**record, **_growth(points), **({} if points[0].get("method") == SDPA else _overtaking(points))})
    return wide


def _overtaking(points: Sequence[Record]) -> Record:
    known = [(int(real(r, "n") or 0), ratio) for r in points if (ratio := real(r, "ratio")) is not None]
    if not known:
        return {}
    length = crossover([n for n, _ in known], [ratio for _, ratio in known])
    if length is None:
        return {"overtakes": faster_from(*map(list, zip(*known, strict=True)))}
    return {"crossover": length, "overtakes": faster_from(*map(list, zip(*known, strict=True)))}


def _growth(points: Sequence[Record]) -> Record:
    timed = _points(points, "seconds")
    for known in timed.values():
        if len(known) > 1:
            return {"exponent": growth_exponent(*known[-2], *known[-1])}
    return {}


def _points(rows: Iterable[Record], field: str) -> dict[str, list[tuple[float, float]]]:
    """n and `field` per example, by label and growing n, where a logarithmic axis can show it."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda r: real(r, "n") or 0):
        n, value = real(row, "n"), real(row, field)
        if n and value:
            found.setdefault(label(row), []).append((n, value / (real(row, "batch") or 1)))
    return found


def _with_device(records: Iterable[Record]) -> list[Record]:
    """The records with their device, which those of a CPU leave out."""
    return [{**record, "device": record.get("device") or "cpu"} for record in records]


def _settings(records: Iterable[Record]) -> dict[BenchSetting, list[Record]]:
    """The records by setting, forward before backward."""
    found: dict[BenchSetting, list[Record]] = {}
    for record in records:
        found.setdefault(BenchSetting(*(str(record.get(name)) for name in BenchSetting._fields)), []).append(record)
    return dict(sorted(found.items(), key=lambda item: (item[0].mode not in MODES, -len(item[0].mode), item[0])))


def _title(setting: BenchSetting, records: Sequence[Record]) -> str:
    """The mode, and what else differs among the records."""
    others = [
        f"{name.replace('_', ' ')} {value}"
        for name, value in setting._asdict().items()
        if name != "mode" and len(distinct(records, name)) > 1
    ]
    return ", ".join([MODES.get(setting.mode, setting.mode), *others])


def _largest(rows: Iterable[Record]) -> Value:
    sizes = distinct(rows, "budget")
    return sizes[-1] if sizes else None
