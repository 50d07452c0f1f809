"""`skein`: the command line. Each command is a frozen dataclass of options, which tyro fills, and a function of it.

tyro, rich and what the commands need beyond torch and numpy come with the extra `lab`; they are imported only when a
command runs, so that without them `skein` can say what to install.
"""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from skeinformer import __version__
from skeinformer.attention import METHODS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from skeinformer.lab.records import Record, Value

# the modules of the extra `lab`: a missing one is the user's to install, any other missing module is a defect
LAB_MODULES = {"tyro", "rich", "transformers", "tokenizers", "safetensors", "matplotlib", "pyarrow", "PIL"}
# and of the extra `train`, which includes it
TRAIN_MODULES = {"accelerate", "tensorboard", "huggingface_hub"}
# of the table of methods: in the order in which a wider terminal gets them
TITLES = ("name", "summary", "cost", "exact at full budget", "random", "cross attention", "masks", "paper")
SUMMARY = TITLES.index("summary")  # the one column whose cells may be broken
SUMMARY_ROOM = 34  # characters that the summary keeps before there is another column
USER_ERROR = 2
INTERRUPTED = 130


@dataclass(frozen=True)
class Methods:
    """List the attention methods: what each does, its cost, exactness, randomness, masks and paper."""

    json: bool = False
    """Print JSON with every field, for scripts."""


@dataclass(frozen=True)
class Flops:
    """Count the multiply-adds of one head of each method, beside the leading terms that the paper gives."""

    lengths: tuple[int, ...] = (1024, 4096, 16384, 65536)
    """Sequence lengths, in tokens."""
    budget: int = 256
    """The sketch size d, the same for every method."""
    head_dim: int = 32
    """The head width p."""
    methods: tuple[str, ...] = ()
    """Names of methods. Default: all. Beside them wildcat, thinformer and hyperattention, of the lab."""
    backward: bool = False
    """Count the forward and backward pass of a training step too."""
    json: bool = False
    """Print one JSON record per line, with exact counts, for scripts."""


class Command(NamedTuple):
    """What `skein <name>` reads and does."""

    options: type
    run: Callable[[Any], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `skein` and return its exit status: 0 done, 2 an error that the user can mend, 130 interrupted."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments == ["--version"]:
        print(f"skeinformer {__version__}")
        return 0
    try:
        _run(arguments)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in LAB_MODULES | TRAIN_MODULES:
            raise
        extra = "train" if missing in TRAIN_MODULES else "lab"
        return _fail(f"this needs {missing}, which is not installed: pip install 'skeinformer[{extra}]'")
    except FileNotFoundError as error:
        return _fail(f"there is no {error.filename}" if error.filename else str(error))
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error))
    except ValueError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)
    return 0


def _run(arguments: Sequence[str]) -> None:
    import tyro

    commands = _commands()
    options = tyro.extras.subcommand_cli_from_dict(
        {name: command.options for name, command in commands.items()},
        prog="skein",
        description="Sketched self-attention for long sequences. `skein --version` prints the version.",
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    for command in commands.values():
        if isinstance(options, command.options):
            command.run(options)


def _commands() -> dict[str, Command]:
    from skeinformer.lab.commands.approx import Approx, run_approx
    from skeinformer.lab.commands.bench import Bench, run_bench
    from skeinformer.lab.commands.compare import Compare, run_compare
    from skeinformer.lab.commands.data import Data, run_data
    from skeinformer.lab.commands.demo import Demo, run_demo
    from skeinformer.lab.commands.report import Report, run_report
    from skeinformer.lab.training.options import Lra, Train

    def approx(options: Approx) -> None:
        path = run_approx(options)
        print(f"For a page of this: skein report --records {path}", flush=True)

    def bench(options: Bench) -> None:
        print(run_bench(options), flush=True)

    def data(options: Data) -> None:
        print(run_data(options), flush=True)

    def compare(options: Compare) -> None:
        path = run_compare(options)
        print(f"For a page of this: skein report --records {path}", flush=True)

    def demo(options: Demo) -> None:
        print(run_demo(options), flush=True)

    def report(options: Report) -> None:
        print(run_report(options), flush=True)

    def train(options: Train) -> None:
        from skeinformer.lab.commands.train import print_result, run_train

        print_result(run_train(options))

    def lra(options: Lra) -> None:
        from skeinformer.lab.commands.lra import run_lra

        path, whole = run_lra(options)
        print(f"For a page of this: skein report --records {path}", flush=True)
        if not whole:
            raise SystemExit(1)

    return {
        "demo": Command(Demo, demo),
        "approx": Command(Approx, approx),
        "compare": Command(Compare, compare),
        "report": Command(Report, report),
        "bench": Command(Bench, bench),
        "data": Command(Data, data),
        "train": Command(Train, train),
        "lra": Command(Lra, lra),
        "methods": Command(Methods, print_methods),
        "flops": Command(Flops, print_flops),
    }


def print_methods(options: Methods, console: "Console | None" = None) -> None:
    """Print METHODS as a table or as JSON.

    In a terminal the table has the columns that fit, and the summaries are broken between words; in a pipe it is whole,
    a line for each method.
    """
    if options.json:
        print(json.dumps(methods_as_json(), indent=2, default=str))
        return
    from rich.console import Console

    console = console or Console(highlight=False)
    widths = column_widths(methods_rows(), console.width if console.is_terminal else None)
    console.width = max(console.width, sum(widths) + 2 * len(widths) - 2)
    console.print(methods_table(widths))
    if left_out := TITLES[len(widths) :]:
        console.print(f"For {', '.join(left_out)}: a wider terminal, or skein methods --json.")


def methods_as_json() -> dict[str, dict[str, object]]:
    """METHODS as plain data: every field but the constructor."""
    return {
        name: {field.name: getattr(method, field.name) for field in fields(method) if field.name != "make"}
        for name, method in METHODS.items()
    }


def methods_rows() -> list[tuple[str, ...]]:
    """A row of text for each method, in the order of TITLES."""
    return [
        (
            name,
            method.summary,
            method.cost,
            method.exact,
            "yes" if method.random else "no",
            "yes" if method.cross_attention else "no",
            method.masks,
            method.paper,
        )
        for name, method in METHODS.items()
    ]


def column_widths(rows: Sequence[Sequence[str]], room: int | None) -> list[int]:
    """The widths of as many columns as fit, two spaces apart: cells are whole, but summaries may have to be broken.

    There are names and summaries in any case. Without a `room` all columns are whole; only headings are broken.
    """
    widths = [
        max(len(text) for text in (*title.split(), *cells))
        for title, cells in zip(TITLES, zip(*rows, strict=True), strict=True)
    ]
    if room is None:
        return widths
    whole, widths[SUMMARY] = widths[SUMMARY], SUMMARY_ROOM
    while len(widths) > SUMMARY + 1 and sum(widths) + 2 * len(widths) - 2 > room:
        widths.pop()
    rest = room - sum(widths) - 2 * len(widths) + 2
    widths[SUMMARY] = min(whole, widths[SUMMARY] + max(0, rest))
    return widths


def methods_table(widths: Sequence[int]) -> "Table":
    """METHODS as a table with the first columns of TITLES, of the given widths, two spaces apart."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for title, width in zip(TITLES, widths, strict=False):
        table.add_column(title, width=width, vertical="top")
    for row in methods_rows():
        table.add_row(*map(Text, row[: len(widths)]))  # as Text, so that brackets are not read as markup
    return table


def print_flops(options: Flops) -> None:
    """Print counted and published multiply-adds as a table, or as one JSON record per line."""
    from skeinformer.lab.measure.flops import flop_records

    records = flop_records(
        methods=options.methods,
        lengths=options.lengths,
        budget=options.budget,
        head_dim=options.head_dim,
        backward=options.backward,
    )
    if options.json:
        for record in records:
            print(json.dumps(record), flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("counting"):
        table = flops_table(list(records), options)
    console = Console(highlight=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(table)


def flops_table(records: "Sequence[Record]", options: Flops) -> "Table":
    """Millions of multiply-adds, a section for each length."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=f"millions of multiply-adds per head, d = {options.budget}, p = {options.head_dim}",
        title_style="",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    titles = [
        "n",
        "method",
        "forward",
        *(["with backward"] if options.backward else []),
        "paper's term",
        "paper",
        "ratio",
    ]
    for title in titles:
        table.add_column(title, justify="left" if title in ("method", "paper's term") else "right", no_wrap=True)
    last = None
    for record in records:
        if last is not None and record["n"] != last:
            table.add_section()
        last = record["n"]
        both = [_millions(record["multiply_adds_with_backward"])] if options.backward else []
        ratio = record["ratio"]
        table.add_row(
            f"{record['n']:,}",
            str(record["method"]),
            _millions(record["multiply_adds"]),
            *both,
            str(record["paper_term"] or ""),
            _millions(record["paper"]),
            f"{ratio:.3f}" if isinstance(ratio, float) else "",
        )
    return table


def _millions(count: "Value") -> str:
    return f"{count / 1e6:,.1f}" if isinstance(count, int | float) else ""


def _fail(message: str, status: int = USER_ERROR) -> int:
    print("skein:", " ".join(message.split()), file=sys.stderr)
    return status
