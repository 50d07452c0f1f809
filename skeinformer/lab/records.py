"""A Record is one flat JSON line. Everything that measures appends Records; everything that reports reads them."""

import contextlib
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from skeinformer.comparison.measure import Record, Value
from skeinformer.lab.fields import LARGEST
from skeinformer.lab.files import nested_or
from skeinformer.lab.machine import machine

__all__ = [
    "RUN_KEYS",
    "Ledger",
    "Record",
    "Value",
    "append",
    "append_all",
    "check",
    "key_of",
    "machine",
    "read",
    "read_known",
]

RUN_KEYS = ("recipe", "task", "method", "options", "seed", "overrides")
"""What tells a run of the Long Range Arena from others, in each of its records."""


def append(path: Path | str, record: Record) -> None:
    """Add `record` to `path` as one line, in a single write, and create the file and its folder if need be.

    Concurrent writers do not mix their lines. What a killed writer left of a line is removed first.
    """
    check(record)
    line = json.dumps(record, allow_nan=False, ensure_ascii=False).encode() + b"\n"
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+", buffering=0) as file, _locked(file):
        _remove_torn_line(file)
        file.write(line)


def read(paths: Path | str | Iterable[Path | str]) -> list[Record]:
    """All Records of one file or several, in order.

    A last line that was not written to its end is dropped; any other line that is not a Record is a ValueError that
    names file and line.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    return [record for path in paths for record in _read_file(Path(path))]


def read_known(path: Path) -> list[Record]:
    """The Records of a file that may not be there yet."""
    return read(path) if path.exists() else []


def append_all(path: Path, known: list[Record], found: Iterable[Record]) -> None:
    """Append each record to the file, and to what is known, as soon as it is measured."""
    for record in found:
        append(path, record)
        known.append(record)


def key_of(record: Mapping[str, Value], names: Sequence[str]) -> tuple[Value, ...]:
    """What a record is about: its values of these fields, None for a missing one."""
    return tuple(record.get(name) for name in names)


class Ledger:
    """What is measured already, by the fields that tell one measurement from another: `settings in ledger`."""

    def __init__(self, names: Sequence[str], records: Iterable[Mapping[str, Value]] = ()) -> None:
        self.names = names
        self.keys = {key_of(record, names) for record in records}

    def __contains__(self, record: Mapping[str, Value]) -> bool:
        return key_of(record, self.names) in self.keys

    def add(self, record: Mapping[str, Value]) -> None:
        """It is measured now."""
        self.keys.add(key_of(record, self.names))


def check(record: object) -> Record:
    """`record` itself if it is one: names to text, finite numbers, booleans or None. Else a ValueError."""
    if not isinstance(record, dict):
        raise ValueError(f"a record is a JSON object, got {type(record).__name__}")
    for name, value in record.items():
        if not isinstance(name, str):
            raise ValueError(f"the names in a record must be text, got {name!r}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"record field {name!r} is a number above {LARGEST}, more than any measurement gives")
        if not isinstance(value, str | int | float | bool | None):
            raise ValueError(
                f"record field {name!r} holds {type(value).__name__}; records are flat: text, numbers, booleans or None"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"record field {name!r} is {value}, which JSON cannot hold; write None")
    return record


def _read_file(path: Path) -> Iterator[Record]:
    lines = path.read_bytes().split(b"\n")  # what follows the last newline is empty, or torn
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield check(json.loads(line))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise ValueError(f"{path}, line {number}: not a record: {nested_or(error)}") from error


def _remove_torn_line(file: BinaryIO) -> None:
    """Make the file end in a newline: complete a last line that is a Record, cut off one that is not."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    content = file.read()
    last_line = content[content.rfind(b"\n") + 1 :]
    try:
        check(json.loads(last_line))
    except (ValueError, RecursionError):
        file.truncate(end - len(last_line))
    else:
        file.write(b"\n")


@contextlib.contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Hold the file against other writers; where the system has no such lock (Windows), do nothing."""
    if sys.platform == "win32":
        yield
    else:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)  # closing the file releases it
        yield
