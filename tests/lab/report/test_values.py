"""Records whose fields hold what they cannot: an error that names file and field, never a traceback."""

import json
from pathlib import Path

import pytest

from skeinformer.lab import cli
from skeinformer.lab.records import Record, Value
from skeinformer.lab.report.sections import write_report
from skeinformer.lab.report.values import check_values
from tests.lab.report.synthetic import approx_records, bench_records, embedding_records, finetune_records

RESULTS = Path(__file__).parents[3] / "docs" / "results"
ONE_EACH: tuple[Record, ...] = (
    approx_records(lengths=(1024,), budgets=(8,), trials=1)[0],
    approx_records(lengths=(1024,), budgets=(8,), trials=1)[1],
    bench_records()[0],
    embedding_records()[0],
    finetune_records()[0],
)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("test_examples", 0, "a whole number of at least 1"),
        ("steps", 0, "a whole number of at least 1"),
        ("n", -3, "a whole number of at least 1"),
        ("batch", "many", "a whole number of at least 1"),
        ("budget", 2.5, "a whole number of at least 1"),
        ("test_accuracy", 1.5, "a number from 0 to 1"),
        ("test_accuracy", True, "a number from 0 to 1"),
        ("seconds", -1.0, "a number of at least 0"),
        ("cpu_seconds", "long", "a number of at least 0"),
        ("method", 3, "a text"),
        ("task", False, "a text"),
    ],
)
def test_the_file_and_the_field_are_named(
    tmp_path: Path, field: str, value: Value, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "records.jsonl"
    records = [bench_records()[0], {**bench_records()[0], field: value}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert cli.main(["report", "--records", str(path), "--out", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"records.jsonl, record 2, field {field!r} is {value!r}, expected {expected}" in line
    assert not (tmp_path / "page.html").exists()


def test_a_line_that_is_nested_too_deeply_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text("[" * 100_000 + "\n")
    assert cli.main(["report", "--records", str(path), "--out", str(tmp_path / "page.html")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "records.jsonl, line 1: not a record: it is nested too deeply" in line


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.name)
def test_our_own_records_hold_what_they_should(path: Path) -> None:
    check_values([json.loads(line) for line in path.read_text().splitlines()], path)


@pytest.mark.slow
@pytest.mark.parametrize("record", ONE_EACH, ids=lambda record: str(record["kind"]))
def test_any_value_of_any_field_gives_a_page_or_an_error_of_the_user(tmp_path: Path, record: Record) -> None:
    for field in record:
        for value in (None, 0, -1, 1, 10**18, 1e300, 1e-300, "", "x", True):
            changed = {**record, field: value}
            try:
                check_values([changed], "records.jsonl")
                write_report([changed], tmp_path / "page.html", "title")
            except ValueError:
                continue
