"""The report: one HTML page, written by Jinja, with figures by matplotlib and without scripts."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader

from skeinformer.cli.figures import Panel, draw, panel_of, save, svg
from skeinformer.cli.records import Record, write_file
from skeinformer.cli.tables import Table, named, real

MACHINE = ("cpu", "cores", "threads", "gpu", "torch", "python", "skeinformer", "commit", "started")
ERROR_NOTES = (
    "Error: |R - BV| / |BV| in the Frobenius norm, R the method's output and BV exact attention in float64; mean over "
    "heads. Memory: bytes of tensors besides queries, keys and values. Times: median and quartiles of rounds.",
    "V-mean gives every row the mean of the values, whatever the queries and keys: it is the baseline that any method "
    "must be better than.",
)
BENCH_NOTES = (
    *ERROR_NOTES,
    "Errors are means over pieces of text too, ± standard error over pieces. SDPA / time: the time of torch's exact "
    "attention over the method's in the same round; above 1 the method is faster. Multiply-adds: of matrix products, "
    "counted by their shapes.",
)


class Section(NamedTuple):
    """A part of the page: figures as svg elements, tables, notes and commands to copy."""

    title: str
    tables: Sequence[Table] = ()
    figures: Sequence[str] = ()
    notes: Sequence[str] = ()
    commands: Sequence[str] = ()


def write_page(
    path: Path, title: str, sections: Sequence[Section], records: Sequence[Record], sentences: Sequence[str] = ()
) -> Path:
    """Write a page, and return its path.

    Args:
        path: The file to write.
        title: The page's title.
        sections: What it shows.
        records: The records that it is made of; the page says on what machine they were measured.
        sentences: What it says at the top.

    Returns:
        The path.

    Raises:
        ValueError: The path is a folder.

    Example:
        >>> write_page(Path("report.html"), "Errors", [Section("One", [table])], records)  # doctest: +SKIP
    """
    environment = Environment(loader=PackageLoader("skeinformer.cli", "."), autoescape=True, trim_blocks=True)
    found = {name: next((r[name] for r in records if r.get(name) is not None), None) for name in MACHINE}
    machine = {name: value for name, value in found.items() if value is not None}
    page = environment.get_template("report.html.j2").render(
        title=title, sections=sections, sentences=sentences, machine=machine
    )
    return write_file(path, page)


def write_bench(
    records: Sequence[Record], tables: Sequence[Table], *, html: Path | None = None, figure: Path | None = None
) -> None:
    """Write the page of `skein bench`, and its figure as a file."""
    panels = error_panels(records) or time_panels(records)
    if not panels:
        raise ValueError("there is nothing to draw: no method was measured at these sizes")
    drawing = draw(panels)
    if html is not None:
        sections = [Section("Time, memory and error", tables, [svg(drawing)], BENCH_NOTES)]
        print(f"The page: {write_page(html, 'Attention methods, measured', sections, records)}", flush=True)
    if figure is not None:
        print(f"The figure: {save(drawing, figure)}", flush=True)


def error_panels(records: Sequence[Record]) -> list[Panel]:
    """Figure 1 of the paper: a panel for each n and layer, error against d, a line for each method."""
    rows = sorted((r for r in records if r.get("spectral")), key=lambda r: real(r, "budget") or 0)
    panels = []
    for layer, n in sorted({(int(r.get("layer") or 0), int(r["n"] or 0)) for r in rows}):
        here = [r for r in rows if (r.get("layer") or 0, r["n"]) == (layer, n)]
        titles = (f"n = {n:,}, layer {layer}", "sample size d", "spectral error |BV - R|")
        panels.append(
            panel_of(here, lambda r: real(r, "budget"), lambda r: real(r, "spectral"), titles, error="spectral_se")
        )
    return panels


def time_panels(records: Sequence[Record]) -> list[Panel]:
    """Time for an example against n: a panel for each mode, a line for each method and d."""

    def per_example(record: Record) -> float | None:
        return 1e3 * (real(record, "seconds") or 0) / (real(record, "batch") or 1)

    panels = []
    for mode, title in {"forward": "forward", "both": "forward and backward"}.items():
        here = sorted((r for r in records if r.get("mode") == mode), key=lambda r: real(r, "n") or 0)
        titles = (title, "length n", "time per example, ms")
        panels.append(panel_of(here, lambda r: real(r, "n"), per_example, titles, name=named))
    return [panel for panel in panels if panel.lines]
