"""`skein report`: read files of records, write the page and, if asked, its pictures as files."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from skeinformer.lab.contenders import parse
from skeinformer.records import Record, read
from skeinformer.report.approx import RATIO, error_time_panels, figure_1_panels, group_inputs, pick_input
from skeinformer.report.bench import speed_panels
from skeinformer.report.embeddings import embedding_panels
from skeinformer.report.figures import method_styles, write_panels
from skeinformer.report.sections import check_kinds, write_report


@dataclass(frozen=True)
class Report:
    """Write one self-contained HTML page from records that the other commands wrote."""

    records: tuple[Path, ...]
    """Files of records, one JSON object per line."""
    out: Path = Path("report.html")
    """The page."""
    title: str = "Sketched attention, measured"
    """The page's title."""
    figures: Path | None = None
    """A folder for the pictures: figure1, figure1-ratio, error-time, speed and embeddings, each as .svg and .png."""
    length: int | None = None
    """Of the picture error-time: the sequence length. Default: the greatest."""
    weights: str | None = None
    """Of the picture error-time: pretrained or initialized. Default: pretrained, where there are such."""
    layer: int | None = None
    """Of the pictures error-time, figure1 and figure1-ratio: the layer. Default: the first."""
    methods: tuple[str, ...] = ()
    """Of the pictures: the methods to draw, named as for `skein approx`: skeinformer:num_pilots=32. Default: all."""


def run_report(options: Report, console: Console | None = None) -> Path:
    """Write the page and return its path."""
    console = console or Console(stderr=True, highlight=False)
    records = read_all(options.records)
    with console.status("drawing"):
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
        alike = {other: inputs[other] for other in inputs if where.alike(other, ("model", "text", "layer"))}
        pictures["figure1"] = figure_1_panels(alike, "spectral")
        pictures["figure1-ratio"] = figure_1_panels(alike, RATIO)
    written = []
    for name, panels in pictures.items():
        if panels:
            written += write_panels(panels, styles, folder / name)
    if not written:
        raise ValueError("no picture shows these records; give some of `skein approx`, `skein bench` or embeddings")
    return written
