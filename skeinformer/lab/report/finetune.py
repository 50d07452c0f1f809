"""Section of `python -m studies.finetune`: a pretrained model fine-tuned with exact and sketched attention."""

from collections.abc import Iterable, Sequence

from skeinformer.lab.records import Record
from skeinformer.lab.report.figures import Styles
from skeinformer.lab.report.format import between, count, label, number, percent, real, seconds
from skeinformer.lab.report.intervals import binomial_interval
from skeinformer.lab.report.page import Section
from skeinformer.lab.report.tables import Column, simple_table, spread_column

CELL = (
    "model",
    "text",
    "n",
    "min_tokens",
    "steps",
    "batch",
    "learning_rate",
    "test_examples",
    "method",
    "options",
    "budget",
    "threads",
)
LEGEND = (
    "Accuracy: on held-out reviews of at least so many tokens, the same for all; mean over seeds, and the 95 % "
    "interval of a share of that many answers. Training and test have the same attention. Training: all steps, median "
    "over seeds. Step / exact: a training step as a share of one with exact attention, median and quartiles of rounds "
    "in which all methods take turns. In bold: the best approximation, V-mean aside."
)


def finetune_sections(records: Sequence[Record], styles: Styles) -> list[Section]:
    """One row for each method and d, over its seeds."""
    columns = (
        Column("method", label),
        Column("d", lambda r: str(r.get("budget") or ""), field="budget"),
        Column("n", lambda r: count(r.get("n")), field="n"),
        Column("steps", lambda r: count(r.get("steps")), lambda r: f"batch {r.get('batch')}", "steps"),
        Column("seeds", lambda r: count(r.get("seeds")), field="seeds"),
        Column("accuracy", lambda r: percent(r.get("test_accuracy")), _interval, "test_accuracy", "high"),
        Column("test reviews", lambda r: count(r.get("test_examples")), _least_tokens, "test_examples"),
        Column("training", lambda r: seconds(r.get("seconds")), field="seconds", best="low"),
        spread_column("step / exact", "ratio", number, "low"),
        Column("model", lambda r: str(r.get("model") or "")),
        Column("text", lambda r: str(r.get("text") or "")),
    )
    html = simple_table(over_seeds(records), columns, LEGEND)
    return [Section("Fine-tuning on long reviews", html, frozenset({"label"}), records)]


def over_seeds(records: Iterable[Record]) -> list[Record]:
    """One record for each cell: the mean accuracy and the median time over its seeds. Of two of a seed the last."""
    cells: dict[tuple[object, ...], dict[object, Record]] = {}
    for record in records:
        cells.setdefault(tuple(record.get(name) for name in CELL), {})[record.get("seed")] = record
    rows: list[Record] = []
    for seeds in cells.values():
        group = list(seeds.values())
        known = [x for record in group if (x := real(record, "test_accuracy")) is not None]
        times = sorted(x for record in group if (x := real(record, "seconds")) is not None)
        rows.append(
            {
                **group[-1],
                "seeds": len(group),
                "test_accuracy": sum(known) / len(known) if known else None,
                "seconds": (times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2 if times else None,
            }
        )
    return rows


def _interval(record: Record) -> str:
    """The 95 % interval of Wilson (1927) for the share of right answers; seeds share their reviews and add none."""
    share, answers = real(record, "test_accuracy"), real(record, "test_examples")
    if share is None or not answers:
        return ""
    return between(*map(percent, binomial_interval(share, answers)))


def _least_tokens(record: Record) -> str:
    least = count(record.get("min_tokens"))
    return f"of at least {least} tokens" if least else ""
