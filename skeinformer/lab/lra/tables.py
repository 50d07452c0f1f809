"""Rows of text files and of parquet files, with errors that name file and row."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skeinformer.lab.lra.archives import open_member

SPLIT_NAMES = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}


def tsv_rows(source: Path, name: str, columns: int, header: Sequence[str] = ()) -> Iterator[tuple[str, list[bytes]]]:
    """(place, fields) of each line of a tab-separated file in a folder or archive, without quoting.

    `place` names file and line, for an error. A carriage return before the newline is not part of the line.
    """
    with open_member(source, name) as file:
        for number, line in enumerate(file, start=1):
            place = f"{name}, line {number}"
            fields = line.rstrip(b"\r\n").split(b"\t")
            if number == 1 and header:
                if fields != [title.encode() for title in header]:
                    raise ValueError(f"{place}: expected the header {' '.join(header)}, got {_shown(fields[0])}")
                continue
            if len(fields) != columns:
                raise ValueError(f"{place}: {len(fields)} columns, expected {columns}, separated by tabs")
            yield place, fields


def parquet_rows(
    path: Path, columns: Sequence[str], optional: Mapping[str, object] | None = None
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(place, values) of each row of a parquet file, with the named columns and then the optional ones.

    A file without an optional column has its default in every row.
    """
    import pyarrow
    import pyarrow.parquet

    optional = optional or {}
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            known = file.schema_arrow.names
            if missing := [name for name in columns if name not in known]:
                raise ValueError(f"{path} has no column {missing[0]}; its columns are {', '.join(known)}")
            present = [*columns, *(name for name in optional if name in known)]
            number = 0
            for batch in file.iter_batches(columns=present, batch_size=1024):
                lists = {name: batch.column(name).to_pylist() for name in present}
                absent = {name: [default] * len(batch) for name, default in optional.items() if name not in known}
                ordered = {**lists, **absent}
                for values in zip(*(ordered[name] for name in (*columns, *optional)), strict=True):
                    number += 1
                    place = f"{path.name}, row {number}"
                    for name, value in zip((*columns, *optional), values, strict=True):
                        if value is None:
                            raise ValueError(f"{place}: there is no {name}")
                    yield place, values
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged, or no parquet file: {' '.join(str(error).split())}") from error


def split_called(name: object, place: str) -> str:
    """The split that a table calls `name`; validation has several names."""
    if not isinstance(name, str) or name not in SPLIT_NAMES:
        raise ValueError(f"{place}: the split is {name!r}, expected train, valid or test")
    return SPLIT_NAMES[name]


def yes_or_no(label: object, place: str) -> int:
    """A label that is 0 or 1."""
    if label not in (0, 1):
        raise ValueError(f"{place}: the label is {label!r}, expected 0 or 1")
    return int(bool(label))


def as_bytes(text: object, place: str, max_len: int) -> NDArray[np.uint8]:
    """The first `max_len` bytes of a text that is not empty."""
    if not isinstance(text, str) or not text:
        got = "an empty one" if text == "" else type(text).__name__
        raise ValueError(f"{place}: expected a text, got {got}")
    return np.frombuffer(text[:max_len].encode()[:max_len], np.uint8)


def _shown(field: bytes) -> str:
    return repr(field[:40].decode(errors="replace"))
