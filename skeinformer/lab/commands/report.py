"""`skein report`: read files of records, write the page and, if asked, its pictures and tables as files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from skeinformer.lab.contender import parse
from skeinformer.lab.files import write_whole
from skeinformer.lab.progress import status
from skeinformer.lab.records import Record, read
from skeinformer.lab.report.approx import RATIO, error_time_panels, figure_1_panels, frontiers_markdown
from skeinformer.lab.report.bench import speed_panels
from skeinformer.lab.report.embeddings import embedding_panels
from skeinformer.lab.report.figures import method_styles, write_panels
from skeinformer.lab.report.inputs import group_inputs, pick_input
from skeinformer.lab.report.sections import check_kinds, write_report
from skeinformer.lab.report.values import check_values


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page from records that the other commands wrote."""

    records: tuple[Path, ...]
    """Files of records, one JSON object per line."""
    out: Path = Path("report.html")
    """File for the page."""
    title: str = "Sketched attention, measured"
    """The page's title."""
    figures: Path | None = None
    """A folder for the pictures, each as .svg and .png: figure1, figure1-ratio, error-time, error-time-forward, speed
    and embeddings."""
    markdown: Path | None = None
    """A file for tables as markdown: the methods of least error by time."""
    length: int | None = None
    """Sequence length in the pictures error-time. Default: the greatest."""
    weights: str | None = None
    """Weights in the pictures error-time: pretrained or initialized. Default: pretrained, where there are such."""
    layer: int | None = None
    """Layer in the pictures error-time, figure1 and figure1-ratio. Default: the first."""
    methods: tuple[str, ...] = ()
    """Methods to draw in the pictures, named as for `skein approx`: skeinformer:num_pilots=32. Default: all."""


def command(options: Report) -> None:
    """Write the page, and print where it is."""
    print(run_report(options), flush=True)


def run_report(options: Report, console: Console | None = None) -> Path:
    """Write the page and return its path."""
    console = console or Console(stderr=True, highlight=False)
    records = read_all(options.records)
    with status(console, lines=False) as show:
        show("drawing")
        if options.markdown is not None:
            write_whole(markdown_tables(records), options.markdown)
            console.print(str(options.markdown), markup=False, soft_wrap=True)
        if options.figures is not None:
            drawn = choose_methods(records, options.methods)
            for path in write_pictures(drawn, options.figures, options.length, options.weights, options.layer):
                console.print(str(path), markup=False, soft_wrap=True)
        return write_report(records, options.out, options.title)


def read_all(paths: Sequence[Path]) -> list[Record]:
    """The records of all files, each file with records of known kinds only, and with at least one."""
    if not paths:
        raise ValueError("no files of records; name at least one")
    records = []
    for path in paths:
        found = read(path)
        if not found:
            raise ValueError(f"{path} holds no records; measure something first")
        check_kinds(found, path)
        check_values(found, path)
        records += found
    return records


def choose_methods(records: Sequence[Record], specs: Sequence[str]) -> Sequence[Record]:
    """The records of these methods, or all where none is named."""
    if not specs:
        return records
    wanted = {(contender.method, contender.options_text): spec for spec in specs for contender in [parse(spec)]}
    found = {(record.get("method"), record.get("options") or "") for record in records}
    missing = [spec for key, spec in wanted.items() if key not in found]
    if missing:
        raise ValueError(f"no records of {', '.join(missing)}; measure them first, or leave them out of --methods")
    return [r for r in records if (r.get("method"), r.get("options") or "") in wanted or r.get("method") == "sdpa"]


def markdown_tables(records: Sequence[Record]) -> str:
    """The tables that the records have, as the text of a markdown file; a ValueError where there is none."""
    text = frontiers_markdown(records)
    if not text:
        raise ValueError("no table shows these records; give some of `skein approx`")
    return text


def write_pictures(
    records: Sequence[Record],
    folder: Path,
    length: int | None = None,
    weights: str | None = None,
    layer: int | None = None,
) -> list[Path]:
    """Write those of the pictures of `Report.figures` that the records have, and return their paths."""
    styles = method_styles(records)
    pictures = {
        "speed": speed_panels([r for r in records if r.get("kind") == "bench"]),
        "embeddings": embedding_panels([r for r in records if r.get("kind") == "embeddings"]),
    }
    if inputs := group_inputs(records):
        where, rows = pick_input(inputs, n=length, weights=weights, layer=layer)
        pictures["error-time"] = error_time_panels({where: rows}, "both")
        pictures["error-time-forward"] = error_time_panels({where: rows}, "forward")
        alike = {other: inputs[other] for other in inputs if where.alike(other, ("model", "text", "layer"))}
        pictures["figure1"] = figure_1_panels(alike, "spectral")
        pictures["figure1-ratio"] = figure_1_panels(alike, RATIO)
    written = []
    for name, panels in pictures.items():
        if panels:
            written += write_panels(panels, styles, folder / name)
    if not written:
        needed = "`skein approx`, `skein bench`, or embeddings"
        raise ValueError(f"no picture shows these records; give some of {needed}")
    return written
