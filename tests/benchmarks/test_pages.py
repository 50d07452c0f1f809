"""The pages of docs/ have the numbers of the records in docs/results."""

import re
from pathlib import Path

import pytest

from benchmarks import coverage, robustness, scaling
from benchmarks.approximation import choose_methods
from benchmarks.common import write_tables
from benchmarks.embeddings import embedding_panels
from benchmarks.figures import beaten_by_multiply_adds, frontiers, group_inputs, panels_of
from benchmarks.limits import differences, exclusions, table_of
from benchmarks.methods_page import page as methods_page
from benchmarks.never_slower import NeverSlower, page_tables
from benchmarks.speed import faster_from, growth_rows, speed_panels
from benchmarks.summaries import summarize
from skeinformer.cli.figures import Panel
from skeinformer.cli.records import read

DOCS = Path(__file__).parents[2] / "docs"
RESULTS = DOCS / "results"


def rows(text: str) -> list[str]:
    """The rows of all tables, without the lines below their headings."""
    lines = (re.sub(r"\s+", " ", line).strip() for line in text.splitlines())
    return [line for line in lines if line.startswith("|") and set(line) - set("|- :")]


def same_tables(name: str, texts: dict[str, str], tmp_path: Path) -> None:
    """Written again, the page is as it was."""
    page = tmp_path / name
    page.write_text((DOCS / name).read_text())
    write_tables(page, texts)
    assert page.read_text() == (DOCS / name).read_text()


def test_distributed_and_scaling(tmp_path: Path) -> None:
    for name, texts in scaling.parts(read(RESULTS / "processes.jsonl")).items():
        same_tables(name, texts, tmp_path)
    assert set(rows(scaling.traffic_table())) <= set(rows((DOCS / "distributed.md").read_text()))


def test_never_slower(tmp_path: Path) -> None:
    same_tables("drop-in.md", page_tables(NeverSlower(), read(RESULTS / "never_slower.jsonl")), tmp_path)


def test_training_runs() -> None:
    found = [arms for arms in differences(read(RESULTS / "lra.jsonl", RESULTS / "limits.jsonl")).values() if arms]
    page = (DOCS / "training-runs.md").read_text()
    cells = {re.sub(r"\s+", " ", f"| {' | '.join(row)} |") for arms in found for row in table_of(arms)[1]}
    assert cells <= set(rows(page))
    assert len(cells) > 100
    assert exclusions(found) in page


def test_certificate() -> None:
    page = set(rows((DOCS / "certificate.md").read_text()))
    assert set(rows(coverage.table(read(RESULTS / "coverage.jsonl")))) <= page


def test_robustness() -> None:
    page = (DOCS / "cluster-rivals.md").read_text()
    lines = rows(robustness.table(read(RESULTS / "robustness.jsonl")))[1:]
    assert len(lines) == 36
    for line in lines:
        text, n, width, fast, accurate = [cell.strip() for cell in line.strip("|").split("|")][:5]
        (shown,) = [row for row in rows(page) if row.startswith(f"| {text} | {n} |")]
        cells = [cell.strip() for cell in shown.strip("|").split("|")]
        assert (fast, accurate) == tuple(cells[2:4] if width == "32" else cells[4:6])
    assert "on 252 of 252 inputs, than V-mean's on 252" in robustness.table(read(RESULTS / "robustness.jsonl"))


def test_rivals() -> None:
    records = read(RESULTS / "rivals.jsonl")
    inputs = group_inputs(summarize(records), records)
    assert frontiers(inputs, records) == (RESULTS / "rivals.md").read_text()
    assert beaten_by_multiply_adds(inputs) == (2, 120)
    assert "other methods beat 2 of our 120 points" in " ".join((DOCS / "cluster-rivals.md").read_text().split())


def values(panels: list[Panel], label: str) -> list[float]:
    """The last value of a method's line in each panel."""
    return [line.y[-1] for panel in panels for line in panel.lines if line.label == label]


def test_figure_1_has_the_numbers_of_its_table() -> None:
    records = choose_methods(read(RESULTS / "approximation.jsonl"), ["skeinformer", "informer", "vmean", "linformer"])
    panels = panels_of(group_inputs(summarize(records), records))
    page = (DOCS / "approximation.md").read_text().partition("### The order of Figure 1 holds")[2]
    table = {row.split("|")[1].strip(): row.split("|")[2:6] for row in rows(page)[:5]}
    for label in ("Skeinformer", "Informer", "V-mean", "Linformer"):
        shown = [float(cell.strip(" *")) for cell in table[label]]
        assert values(panels["figure1"], label) == pytest.approx(shown, rel=0.01), label
    assert panels["error-time"][0].title == "pretrained, n = 4,096, layer 0"


def test_speed_and_crossovers_have_the_numbers_of_their_tables() -> None:
    records = [r for r in read(RESULTS / "speed.jsonl") if r["kind"] == "bench"]
    page = (DOCS / "performance.md").read_text()
    found = {(mode, name): text for mode, name, text, _ in growth_rows(records)}
    for row in rows(page.partition("This is the length from which")[2].partition("Linformer's unreduced")[0])[1:]:
        name, forward, both = (cell.strip() for cell in row.strip("|").split("|"))
        assert found["forward", name] == f"from n = {forward}"
        assert found["both", name] == f"from n = {both}"
    assert len(speed_panels(records)) == 4


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([0.5, 2.0, 4.0], "from n = 141"),
        ([2.0, 0.5, 2.0], "from n = 283"),
        ([0.5, 0.6, 0.7], "not at n = 400"),
        ([2.0, 3.0, 4.0], "at all n measured"),
    ],
)
def test_where_a_method_is_faster(ratios: list[float], text: str) -> None:
    assert faster_from([100, 200, 400], ratios) == text


def test_embeddings_have_the_numbers_of_their_table() -> None:
    distance, first, ten = embedding_panels(read(RESULTS / "embeddings.jsonl"))
    page = (DOCS / "drop-in.md").read_text().partition("### Embeddings of long passages")[2]
    for row in rows(page.partition("###")[0]):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        if cells[0] == "Cluster sketch" and cells[1] in ("16", "64", "256"):
            at = ("16", "64", "256").index(cells[1])
            (line, nearest, tenth) = (
                next(x for x in panel.lines if x.label == cells[0]) for panel in (distance, first, ten)
            )
            assert f"{1 - line.y[at]:.3f}" == cells[2]
            assert (f"{nearest.y[at]:.3f}", f"{tenth.y[at]:.3f}") == (cells[4], cells[5])
            assert cells[6].startswith(f"{line.x[at]:.2f}")


def test_the_page_of_methods_is_that_of_the_table() -> None:
    assert methods_page() == (DOCS / "methods.md").read_text(), "`make docs` writes it"
