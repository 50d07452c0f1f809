"""`skein demo`: measure, show the table while it fills, and write the records and the page."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from skeinformer.lab.records import Record, append
from skeinformer.lab.report.format import label, number, seconds, size, spread

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
    """Columns that Skeinformer selects."""
    pilots: tuple[int, ...] = (256, 32)
    """Numbers of pilot rows, each a row of the table."""
    seed: int = 0
    """Of Skeinformer's draws."""
    out: Path = Path("demo")
    """The folder for records.jsonl, report.html and figure.svg."""


def command(options: Demo) -> None:
    """Measure, and print where the page is."""
    print(run_demo(options), flush=True)


class Display(Protocol):
    """What shows the progress of a run."""

    def step(self, stage: str, detail: str, done: float) -> None: ...

    def row(self, record: Record) -> None: ...


def run_demo(options: Demo, console: Console | None = None) -> Path:
    """Run the demo and return the path of its page. Records of an earlier run in the same folder are replaced."""
    from skeinformer.lab.measure.demo import demo_records
    from skeinformer.lab.report.demo import summary, write_figure
    from skeinformer.lab.report.sections import write_report

    console = console or Console(highlight=False)
    records: list[Record] = []
    file = options.out / "records.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)  # fails before anything is measured
    with _display(console) as display:
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
        display.step("writing", "the page", 1.0)
        page = write_report(records, options.out / "report.html", TITLE)
        write_figure(records, options.out / "figure.svg")
    console.print(" ".join(summary(records)), soft_wrap=not console.is_terminal)
    return page


class LiveDisplay:
    """A table that fills row by row above a progress bar."""

    def __init__(self, live: Live) -> None:
        self.live = live
        self.rows: dict[tuple[object, str], Record] = {}
        self.progress = Progress(
            BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
        )
        self.task = self.progress.add_task("", total=1.0)

    def step(self, stage: str, detail: str, done: float) -> None:
        self.progress.update(self.task, description=f"{stage}: {detail}", completed=done)
        self.show()

    def row(self, record: Record) -> None:
        self.rows[record["n"], label(record)] = record
        self.show()

    def show(self) -> None:
        self.live.update(Group(table(self.rows.values()), self.progress), refresh=True)


class PlainDisplay:
    """A line at the start of every stage and for every finished row, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.stage = ""

    def step(self, stage: str, detail: str, done: float) -> None:
        if stage != self.stage:
            self.stage = stage
            self.console.print(f"{stage}: {detail}", markup=False, soft_wrap=True)

    def row(self, record: Record) -> None:
        if record["seconds"] is not None:
            values = zip(HEADINGS[2:], cells(record)[2:], strict=True)
            line = f"  {label(record)}: " + ", ".join(f"{name} {value}" for name, value in values if value)
            self.console.print(line, markup=False, soft_wrap=True)


HEADINGS = ("n", "method", "time", "/ exact", "memory", "true error", "estimate")


def cells(record: Record) -> tuple[str, ...]:
    """What a record shows in the terminal, in the order of HEADINGS."""
    return (
        f"{record['n']:,}",
        label(record),
        seconds(record["seconds"]),
        number(record["ratio"]),
        size(record["peak_bytes"]),
        spread(record["error"], record["error_se"]),
        spread(record["estimate"], record["estimate_se"]),
    )


def table(records: Iterable[Record]) -> Table:
    """The rows so far, with a line between lengths."""
    result = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in HEADINGS:
        result.add_column(heading, justify="left" if heading == "method" else "right", no_wrap=heading != "method")
    last = None
    for record in records:
        if last is not None and record["n"] != last:
            result.add_section()
        last = record["n"]
        result.add_row(*map(Text, cells(record)))
    return result


@contextmanager
def _display(console: Console) -> Iterator[Display]:
    if not console.is_terminal:
        yield PlainDisplay(console)
        return
    with Live(console=console, refresh_per_second=4) as live:
        display = LiveDisplay(live)
        yield display
        live.update(table(display.rows.values()))
