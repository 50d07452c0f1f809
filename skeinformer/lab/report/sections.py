"""Which records give which sections of the page."""

from collections.abc import Callable, Sequence
from pathlib import Path

from skeinformer.lab.files import write_whole
from skeinformer.lab.records import Record
from skeinformer.lab.report.approx import approx_sections
from skeinformer.lab.report.bench import bench_sections, peer_sections, process_sections, step_sections
from skeinformer.lab.report.compare import compare_sections
from skeinformer.lab.report.demo import demo_sections, headline, next_section
from skeinformer.lab.report.embeddings import embedding_sections
from skeinformer.lab.report.figures import Styles, method_styles
from skeinformer.lab.report.finetune import finetune_sections
from skeinformer.lab.report.page import Section, page_html

# a kind of record -> the function of all records that share it, and of the methods' styles
SECTIONS: dict[str, Callable[[Sequence[Record], Styles], list[Section]]] = {
    "demo": demo_sections,
    "embeddings": embedding_sections,
    "compare_model": compare_sections,
    "compare_layer": compare_sections,
    "approx": approx_sections,
    "approx_summary": approx_sections,
    "approx_time": approx_sections,
    "approx_skipped": approx_sections,
    "bench": bench_sections,
    "bench_peer": peer_sections,
    "bench_step": step_sections,
    "bench_processes": process_sections,
    "finetune": finetune_sections,
}


DEMO_KINDS = {"demo", "embeddings", "compare_model", "compare_layer"}


def write_report(records: Sequence[Record], path: Path | str, title: str) -> Path:
    """Write the page that shows `records` to `path`, whole or not at all, and return the path."""
    if not records:
        raise ValueError("no records to report; measure something first")
    check_kinds(records)
    styles = method_styles(records)
    sections = []
    for function in dict.fromkeys(SECTIONS.values()):
        kinds = {kind for kind, other in SECTIONS.items() if other is function}
        if found := [record for record in records if record.get("kind") in kinds]:
            sections += function(found, styles)
    lede = []
    found_kinds = {record.get("kind") for record in records}
    if "demo" in found_kinds:
        lede = headline(records)
        sections.append(next_section())
    if "demo" in found_kinds <= DEMO_KINDS:  # read from top to bottom, without filters
        sections = [section._replace(fields=frozenset()) for section in sections]
    return write_whole(page_html(records, sections, styles, title, lede), Path(path))


def check_kinds(records: Sequence[Record], where: Path | str = "the records") -> None:
    """A ValueError that names `where` and the kind, if a record is of a kind that no section shows."""
    for record in records:
        if record.get("kind") not in SECTIONS:
            kind, known = record.get("kind"), ", ".join(SECTIONS)
            raise ValueError(f"{where} has a record of kind {kind!r}, which no section shows; known: {known}")
