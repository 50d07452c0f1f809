"""Records are written and read as they are, also after a run that was killed; files are written completely."""

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skeinformer.cli.records import Ledger, Record, append, check, machine, read, write_file

VALUES = st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.lists(st.dictionaries(st.text(), VALUES), max_size=3))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, records: list[Record]) -> None:
    path = tmp_path_factory.mktemp("records") / "folder" / "x.jsonl"
    for record in records:
        append(path, record)
    assert read(path, missing_ok=True) == records


@pytest.mark.parametrize("tail", [b'{"a": 1', b"\xff", b'{"a": [1]}x'])
def test_an_unfinished_last_line_is_left_out_and_then_removed(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 0}\n' + tail)
    assert read(path) == [{"a": 0}]
    append(path, {"a": 2})
    assert path.read_bytes() == b'{"a": 0}\n{"a": 2}\n'


def test_a_last_line_without_its_newline_stays(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"a": 0}')
    append(path, {"a": 1})
    assert read(path) == [{"a": 0}, {"a": 1}]


@pytest.mark.parametrize("line", ["[1]", '{"a": [1]}', '{"a": NaN}', "{", "\x00"])
def test_any_other_line_is_an_error_that_names_it(tmp_path: Path, line: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(f'{{"a": 0}}\n{line}\n{{"a": 1}}\n')
    with pytest.raises(ValueError, match=r"x\.jsonl, line 2: not a record"):
        read(path)


def test_what_is_no_record_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="records are flat"):
        append(tmp_path / "x.jsonl", {"a": [1]})  # type: ignore[dict-item]
    assert not (tmp_path / "x.jsonl").exists()


def test_a_ledger_knows_by_some_fields() -> None:
    ledger = Ledger(("a", "b"), [{"a": 1, "c": 2}])
    assert {"a": 1, "c": 3} in ledger
    assert {"a": 1, "b": 2} not in ledger
    ledger.add({"a": 1, "b": 2})
    assert {"a": 1, "b": 2} in ledger


def test_a_file_is_written_completely_or_not_at_all(tmp_path: Path) -> None:
    path = write_file(tmp_path / "new" / "x.txt", "one")
    assert path.read_text() == "one"
    assert write_file(path, b"two").read_bytes() == b"two"
    assert [file.name for file in path.parent.iterdir()] == ["x.txt"]
    with pytest.raises(ValueError, match="is a folder"):
        write_file(tmp_path, "x")


def test_the_machine_names_no_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/skein", "bench", "--text", str(tmp_path / "mine.txt")])
    assert machine()["command"] == "skein bench --text mine.txt"
    assert check(machine())
