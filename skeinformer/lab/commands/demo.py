"""`skein demo`: measure, show the tables while they fill, and write the records and the page."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from skeinformer.lab.console import plain_table, wrapped
from skeinformer.lab.progress import filling
from skeinformer.lab.records import Record, append
from skeinformer.lab.report.format import count, label, number, percent, seconds
from skeinformer.lab.work import OnStep

TITLE = "Exact and sketched attention in a pretrained model"


@dataclass(frozen=True)
class Demo:
    """Show on a pretrained model what sketched attention gives and costs, and write a page of it.

    First attention alone: error, the methods' own estimates of it, and time. Then the whole model, which embeds long
    passages. Then `compare`, which says in which layers the sketch is safe.
    """

    lengths: tuple[int, ...] = (1024, 4096, 8192)
    """Sequence lengths of attention alone, in tokens."""
    layer: int = 3
    """The layer of the model whose queries, keys and values are taken."""
    text: Path | None = None
    """A .txt file, or a .parquet file with a column `text`. Default: the Python language reference."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    rounds: int = 3
    """Rounds in which each method is timed."""
    budget: int = 256
    """The sketch size d of Skeinformer: the columns that it selects. The cluster sketch has 16 and 128 clusters."""
    pilots: int = 32
    """The number of Skeinformer's pilot rows."""
    passages: int = 8
    """Passages that the whole model embeds; 0 leaves this part out."""
    passage_length: int = 4096
    """Tokens of a passage."""
    compare_length: int = 2048
    """Tokens on which the layers are compared; 0 leaves this part out."""
    tolerance: float = 0.3
    """Greatest relative error of each head of a safe layer."""
    seed: int = 0
    """The seed of all draws."""
    out: Path = Path("demo")
    """The folder for records.jsonl, report.html and figure.svg."""


def command(options: Demo) -> None:
    """Measure, and print where the page is."""
    print(f"The page: {run_demo(options)}", flush=True)


def run_demo(options: Demo, console: Console | None = None) -> Path:
    """Run the demo and return the path of its page. Records of an earlier run in the same folder are replaced."""
    from skeinformer.lab.report.demo import headline, write_figure
    from skeinformer.lab.report.sections import write_report

    console = console or Console(highlight=False)
    records: list[Record] = []
    file = options.out / "records.jsonl"
    options.out.mkdir(parents=True, exist_ok=True)  # fails before anything is measured
    found = parts(options)
    for i, (title, (measure, tables)) in enumerate(found.items(), start=1):
        console.print(f"{i} of {len(found)}: {title}", markup=False)
        with filling(console, tables, line, key=identity) as display:
            for record in measure(display.step):
                display.row(record)
                if record.get("seconds", 0) is not None:  # its times are there
                    if not records:
                        file.unlink(missing_ok=True)
                    append(file, record)
                    records.append(record)
    console.print("writing the page")
    page = write_report(records, options.out / "report.html", TITLE)
    write_figure([record for record in records if record["kind"] == "demo"], options.out / "figure.svg")
    for sentence in headline(records):
        console.print(wrapped(sentence, console), markup=False, soft_wrap=True)
    return page


MeasurePart = Callable[[OnStep], Iterable[Record]]
Tables = Callable[[Sequence[Record]], list[Table]]


def parts(options: Demo) -> dict[str, tuple[MeasurePart, Tables]]:
    """What is measured, and how it is shown, by title."""
    from skeinformer.lab.measure.demo import attention_records
    from skeinformer.lab.measure.demo_model import embedding_records, layer_records

    def attention(step: OnStep) -> Iterator[Record]:
        return attention_records(
            lengths=tuple(dict.fromkeys(options.lengths)),
            layer=options.layer,
            text=options.text,
            model=options.model,
            rounds=options.rounds,
            budget=options.budget,
            pilots=options.pilots,
            seed=options.seed,
            on_step=step,
        )

    def embeddings(step: OnStep) -> Iterator[Record]:
        return embedding_records(
            passages=options.passages,
            length=options.passage_length,
            text=options.text,
            model=options.model,
            seed=options.seed,
            on_step=step,
        )

    def layers(step: OnStep) -> Iterable[Record]:
        return layer_records(
            length=options.compare_length,
            tolerance=options.tolerance,
            rounds=1,
            text=options.text,
            model=options.model,
            seed=options.seed,
            on_step=step,
        )

    found: dict[str, tuple[MeasurePart, Tables]] = {
        "attention on pretrained queries, keys, values": (attention, shown_rows)
    }
    if options.passages:
        title = f"the whole model embeds {options.passages} passages of {options.passage_length:,} tokens"
        found[title] = (embeddings, shown_rows)
    if options.compare_length:
        found[f"compare, layer by layer, {options.compare_length:,} tokens"] = (layers, shown_rows)
    return found


Columns = dict[str, Callable[[Record], str]]
COLUMNS: dict[str, Columns] = {
    "demo": {
        "n": lambda r: count(r.get("n")),
        "method": label,
        "time": lambda r: seconds(r.get("seconds")),
        "/ exact": lambda r: number(r.get("ratio")),
        "true error": lambda r: number(r.get("error")),
        "estimate": lambda r: number(r.get("estimate")),
        "bound": lambda r: number(r.get("bound")),
    },
    "embeddings": {
        "method": label,
        "time": lambda r: seconds(r.get("seconds")),
        "/ exact": lambda r: number(r.get("ratio")),
        "cosine": lambda r: f"{r['cosine']:.3f}",
        "least": lambda r: f"{r['cosine_min']:.3f}",
        "same nearest": lambda r: percent(r.get("recall_1")),
    },
    "compare_layer": {
        "layer": lambda r: str(r.get("index")),
        "true error": lambda r: number(r.get("error")),
        "estimate": lambda r: number(r.get("estimate")),
        "bound": lambda r: number(r.get("bound")),
        "safe": lambda r: "yes" if r.get("safe") else "no",
    },
}


def shown_rows(records: Sequence[Record]) -> list[Table]:
    """The rows so far; of a comparison the layers, without their heads. A line between lengths."""
    rows = [record for record in records if is_shown(record)]
    if not rows:
        return []
    columns = COLUMNS[str(rows[0]["kind"])]
    sections = 1 if rows[0]["kind"] == "demo" else 0
    return [
        plain_table(columns, [[show(r) for show in columns.values()] for r in rows], sections=sections, broken="method")
    ]


def is_shown(record: Record) -> bool:
    """Has the record a row in the terminal?"""
    return record["kind"] in COLUMNS and record.get("head") is None


def identity(record: Record) -> object:
    """What the later of two records replaces."""
    return tuple(record.get(name) for name in ("kind", "n", "label", "layer", "head"))


def line(record: Record) -> str:
    """A row that is complete, in one line."""
    if not is_shown(record) or record.get("seconds", 0) is None:
        return ""
    first = "layer" if record["kind"] == "compare_layer" else "method"
    columns = COLUMNS[str(record["kind"])]
    values = ((name, show(record)) for name, show in columns.items() if name not in (first, "n"))
    name = f"layer {columns['layer'](record)}" if first == "layer" else label(record)
    return f"  {name}: " + ", ".join(f"{heading} {value}" for heading, value in values if value)
