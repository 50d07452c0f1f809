"""`skein demo`: measure, show the table while it fills, and write the records and the page."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from skeinformer.lab.console import filling, plain_table
from skeinformer.lab.records import Record, append
from skeinformer.lab.report.format import label, number, seconds, size, with_error

TITLE = "Exact and sketched attention on pretrained queries, keys and values"


@dataclass(frozen=True)
class Demo:
    """Compare exact attention, V-mean and Skeinformer on pretrained Q, K, V: time, memory, true and estimated error."""

    lengths: tuple[int, ...] = (1024, 4096, 16384)
    """Sequence lengths, in tokens."""
    layer: int = 3
    """The layer of the model whose queries, keys and values are taken."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    rounds: int = 5
    """How often each method is timed."""
    budget: int = 256
    """The sketch size d: columns that Skeinformer selects."""
    pilots: tuple[int, ...] = (256, 32)
    """Numbers of pilot rows, each a row of the table."""
    seed: int = 0
    """Of Skeinformer's draws."""
    out: Path = Path("demo")
    """The folder for records.jsonl, report.html and figure.svg."""


def command(options: Demo) -> None:
    """Measure, and print where the page is."""
    print(run_demo(options), flush=True)


def run_demo(options: Demo, console: Console | None = None) -> Path:
    """Run the demo and return the path of its page. Records of an earlier run in the same folder are replaced."""
    from skeinformer.lab.measure.demo import demo_records
    from skeinformer.lab.report.demo import summary, write_figure
    from skeinformer.lab.report.sections import write_report

    console = console or Console(highlight=False)
    records: list[Record] = []
    file = options.out / "records.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)  # fails before anything is measured
    with filling(console, tables, line, key=lambda r: (r["n"], label(r))) as display:
        for record in demo_records(
            lengths=tuple(dict.fromkeys(options.lengths)),
            layer=options.layer,
            text=options.text,
            model=options.model,
            rounds=options.rounds,
            budget=options.budget,
            pilots=options.pilots,
            seed=options.seed,
            on_step=display.step,
        ):
            display.row(record)
            if record["seconds"] is not None:
                if not records:
                    file.unlink(missing_ok=True)
                append(file, record)
                records.append(record)
        display.step("writing: the page", 1.0)
        page = write_report(records, options.out / "report.html", TITLE)
        write_figure(records, options.out / "figure.svg")
    console.print(" ".join(summary(records)), soft_wrap=not console.is_terminal)
    return page


HEADINGS = ("n", "method", "time", "/ exact", "memory", "true error", "estimate")


def cells(record: Record) -> tuple[str, ...]:
    """What a record shows in the terminal, in the order of HEADINGS."""
    return (
        f"{record['n']:,}",
        label(record),
        seconds(record["seconds"]),
        number(record["ratio"]),
        size(record["peak_bytes"]),
        with_error(record["error"], record["error_se"]),
        with_error(record["estimate"], record["estimate_se"]),
    )


def tables(records: Sequence[Record]) -> list[Table]:
    """The rows so far, with a line between lengths."""
    return [plain_table(HEADINGS, map(cells, records), sections=1, broken="method")]


def line(record: Record) -> str:
    """A row that is complete, in one line."""
    if record["seconds"] is None:
        return ""
    values = zip(HEADINGS[2:], cells(record)[2:], strict=True)
    return f"  {label(record)}: " + ", ".join(f"{name} {value}" for name, value in values if value)
