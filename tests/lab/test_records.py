"""Records: one flat JSON line each, safe to append to and to read after a crash."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from skeinformer.lab import records
from skeinformer.lab.records import Ledger, append, append_all, key_of, read, read_known

RECORD: records.Record = {"method": "skeinformer", "n": 1024, "error": 0.25, "exact": False, "note": None}


def test_what_is_appended_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "records.jsonl"
    second: records.Record = {"method": "ä <b> \n line", "n": 2}
    append(path, RECORD)
    append(path, second)
    assert read(path) == [RECORD, second]
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2


def test_several_files_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b", "a"):
        append(tmp_path / name, {"file": name})
    assert read([tmp_path / "b", str(tmp_path / "a")]) == [{"file": "b"}, {"file": "a"}]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append(path, RECORD)
    with path.open("a") as file:
        file.write(json.dumps(RECORD)[:20])
    assert read(path) == [RECORD]


def test_appending_after_a_torn_line_leaves_only_records(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    append(path, {"n": 1})
    with path.open("a") as file:
        file.write('{"n": 2, "err')
    append(path, {"n": 3})
    assert read(path) == [{"n": 1}, {"n": 3}]


def test_appending_after_a_line_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"n": 1}\n' + "[" * 100_000)
    append(path, {"n": 2})
    assert read(path) == [{"n": 1}, {"n": 2}]


def test_appending_keeps_a_record_that_lacks_its_newline(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"n": 1}')
    append(path, {"n": 2})
    assert read(path) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    "bad", ['{"n": 1', "[1, 2]", '{"n": [1]}', "\x00", "[" * 100_000, '{"n":' * 100_000, '{"n": 1' + "0" * 30 + "}"]
)
def test_a_bad_line_is_named(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text(f'{{"n": 0}}\n{bad}\n{{"n": 2}}\n')
    with pytest.raises(ValueError, match=r"records\.jsonl, line 2: not a record"):
        read(path)


def test_a_bad_last_line_that_was_written_to_its_end_is_named(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_text('{"n": 0}\n{"n": \n')
    with pytest.raises(ValueError, match="line 2"):
        read(path)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"error": float("nan")}, "'error' is nan.*write None"),
        ({"error": float("inf")}, "'error' is inf"),
        ({"sizes": [1, 2]}, "'sizes' holds list; records are flat"),
        ({"x": torch.tensor(1.0)}, "'x' holds Tensor"),
        ({1: 2}, "the names in a record must be text"),
        ([1], "JSON object, got list"),
    ],
)
def test_what_is_no_record_is_refused_and_nothing_is_written(tmp_path: Path, record: object, message: str) -> None:
    path = tmp_path / "records.jsonl"
    with pytest.raises(ValueError, match=message):
        append(path, record)  # type: ignore[arg-type]
    assert not path.exists()


def test_concurrent_writers_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    long = "x" * 20_000
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: append(path, {"i": i, "long": long}), range(100)))
    assert sorted(record["i"] for record in read(path)) == list(range(100))  # type: ignore[type-var]


def test_a_ledger_knows_what_was_measured_by_the_fields_that_tell(tmp_path: Path) -> None:
    ledger = Ledger(("method", "n"), [RECORD])
    assert {"method": "skeinformer", "n": 1024, "error": 0.5} in ledger
    assert {"method": "skeinformer", "n": 2} not in ledger
    assert {"method": "skeinformer"} not in ledger
    ledger.add({"method": "skeinformer", "n": 2})
    assert {"method": "skeinformer", "n": 2} in ledger
    assert key_of(RECORD, ("n", "other")) == (1024, None)


def test_what_is_measured_is_kept_at_once(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    assert read_known(path) == []
    known: list[records.Record] = []

    def measured() -> Iterator[records.Record]:
        yield RECORD
        assert read_known(path) == [RECORD]
        yield {**RECORD, "n": 2}

    append_all(path, known, measured())
    assert known == read_known(path)
    assert [r["n"] for r in known] == [1024, 2]
