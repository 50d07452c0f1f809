"""Rows of text files and of parquet files, with errors that name file and row."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lra.data.archives import open_member

ROWS = 1024  # of a parquet file that are read at once
SPLIT_NAMES = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}


def tsv_rows(source: Path, name: str, columns: int, header: Sequence[str] = ()) -> Iterator[tuple[str, list[bytes]]]:
    """Yield (place, fields) of each line of a tab-separated file in a folder or archive, without quoting.

    `place` names file and line, for an error. A carriage return before the newline is not part of the line.
    """
    with open_member(source, name) as file:
        for number, line in enumerate(file, start=1):
            place = f"{name}, line {number}"
            cells = line.rstrip(b"\r\n").split(b"\t")
            if number == 1 and header:
                if cells != [title.encode() for title in header]:
                    raise ValueError(f"{place}: expected the header {' '.join(header)}, got {cells[0][:40]!r}")
                continue
            if len(cells) != columns:
                raise ValueError(f"{place}: {len(cells)} columns, expected {columns}, separated by tabs")
            yield place, cells


def parquet_rows(
    path: Path, columns: Sequence[str], optional: Mapping[str, object] | None = None
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield (place, values) of each row of a parquet file, with the named columns and then the optional ones.

    A file without an optional column has its default in every row.
    """
    import pyarrow
    import pyarrow.parquet

    optional = optional or {}
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if missing := [name for name in columns if name not in names]:
                raise ValueError(f"{path} has no column {missing[0]}; its columns are {', '.join(names)}")
            present = [*columns, *(name for name in optional if name in names)]
            for batch in file.iter_batches(columns=present, batch_size=ROWS):
                for row in batch.to_pylist():
                    number += 1
                    place = f"{path.name}, row {number}"
                    values = tuple({**optional, **row}[name] for name in (*columns, *optional))
                    if None in values:
                        raise ValueError(f"{place}: there is no {(*columns, *optional)[values.index(None)]}")
                    yield place, values
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged, or no parquet file: {' '.join(str(error).split())}") from error


def split_called(name: object, place: str) -> str:
    """Return the split that a table calls `name`; validation has several names."""
    if not isinstance(name, str) or name not in SPLIT_NAMES:
        raise ValueError(f"{place}: the split is {name!r}, expected train, valid or test")
    return SPLIT_NAMES[name]


def yes_or_no(label: object, place: str) -> int:
    """Return a label that is 0 or 1."""
    if label not in (0, 1):
        raise ValueError(f"{place}: the label is {label!r}, expected 0 or 1")
    return int(bool(label))


def as_bytes(text: object, place: str, max_len: int) -> NDArray[np.uint8]:
    """Return the first `max_len` bytes of a text that is not empty."""
    if not isinstance(text, str) or not text:
        raise ValueError(f"{place}: expected a text, got {'an empty one' if text == '' else type(text).__name__}")
    return np.frombuffer(text[:max_len].encode()[:max_len], np.uint8)
