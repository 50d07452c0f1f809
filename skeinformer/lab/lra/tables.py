"""Rows of text files and of parquet files, with errors that name file and row."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skeinformer.lab.lra.archives import open_member

LONGEST = 1 << 20  # bytes of a text; the longest of the sets that are known has a fifth of that
LONGEST_LINE = 4 * LONGEST  # of a table: two texts and what stands beside them
MOST_OF_COLUMN = 1 << 30  # bytes of a column of a parquet file between two of its row groups
ROWS = 1024  # of a parquet file that are read at once
FEW = 16  # different texts that are held as Python's
SPLIT_NAMES = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}


def tsv_rows(source: Path, name: str, columns: int, header: Sequence[str] = ()) -> Iterator[tuple[str, list[bytes]]]:
    """(place, fields) of each line of a tab-separated file in a folder or archive, without quoting.

    `place` names file and line, for an error. A carriage return before the newline is not part of the line.
    """
    with open_member(source, name) as file:
        for number, line in enumerate(iter(lambda: file.readline(LONGEST_LINE + 1), b""), start=1):
            place = f"{name}, line {number}"
            if len(line) > LONGEST_LINE:
                raise ValueError(f"{place}: it has more than {LONGEST_LINE:,} bytes")
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
    number = 0
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            present = _present(file, path, columns, optional)
        # a text that stands in many rows is then held once
        with pyarrow.parquet.ParquetFile(path, read_dictionary=present) as file:
            for batch in file.iter_batches(columns=present, batch_size=ROWS):
                rows = f"rows {number + 1} to {number + len(batch)}"
                cells = {name: _cells(batch.column(name), f"{path.name}, column {name}, {rows}") for name in present}
                for row in range(len(batch)):
                    number += 1
                    place = f"{path.name}, row {number}"
                    values = tuple(
                        cells[name](row) if name in cells else optional[name] for name in (*columns, *optional)
                    )
                    if None in values:
                        raise ValueError(f"{place}: there is no {(*columns, *optional)[values.index(None)]}")
                    yield place, values
    except UnicodeDecodeError:
        raise ValueError(f"{path}: a text in or after row {max(number, 1)} is not UTF-8") from None
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is damaged, or no parquet file: {' '.join(str(error).split())}") from error


def _present(file: Any, path: Path, columns: Sequence[str], optional: Mapping[str, object]) -> list[str]:
    """The columns to read: all that are needed, of plain values and not absurdly large, and the optional ones."""
    import pyarrow

    schema = file.schema_arrow
    if missing := [name for name in columns if name not in schema.names]:
        raise ValueError(f"{path} has no column {missing[0]}; its columns are {', '.join(schema.names)}")
    present = [*columns, *(name for name in optional if name in schema.names)]
    for name in present:
        if schema.names.count(name) > 1:
            raise ValueError(f"{path} has {schema.names.count(name)} columns {name}")
        kind = schema.field(name).type
        plain = kind.value_type if pyarrow.types.is_dictionary(kind) else kind
        if pyarrow.types.is_nested(plain):
            raise ValueError(f"{path}: column {name} holds {str(kind)[:60]}, expected texts or numbers")
    for group in range(file.metadata.num_row_groups):
        chunks = [file.metadata.row_group(group).column(i) for i in range(file.metadata.num_columns)]
        for chunk in chunks:
            if chunk.path_in_schema in present and chunk.total_uncompressed_size > MOST_OF_COLUMN:
                size = f"{chunk.total_uncompressed_size:,} bytes"
                raise ValueError(f"{path}: column {chunk.path_in_schema} has {size} in row group {group}; write more")
    return present


def _cells(column: Any, place: str) -> Callable[[int], Any]:
    """The value of a row of the column. A text becomes one of Python's only then, and only if it is not too long."""
    import pyarrow
    from pyarrow import compute

    held = column.dictionary if pyarrow.types.is_dictionary(column.type) else column
    kinds = pyarrow.types
    if any(is_kind(held.type) for is_kind in (kinds.is_string, kinds.is_large_string, kinds.is_binary)):
        longest = compute.max(compute.binary_length(held)).as_py() or 0
        if longest > LONGEST:
            raise ValueError(f"{place}: a text has {longest:,} bytes, more than {LONGEST:,}")
    if held is not column:
        bounds = compute.min_max(column.indices).as_py()
        if bounds["max"] is not None and not 0 <= bounds["min"] <= bounds["max"] < len(held):
            raise ValueError(f"{place}: the file is damaged: a row has no value")
    few = held.to_pylist() if held is not column and len(held) <= FEW else None
    indices = range(len(column)) if held is column else column.indices.to_pylist()

    def value(row: int) -> Any:
        index = indices[row]
        return None if index is None else held[index].as_py() if few is None else few[index]

    return list(column.to_pylist()).__getitem__ if held is column else value


def split_called(name: object, place: str) -> str:
    """The split that a table calls `name`; validation has several names."""
    if not isinstance(name, str) or name not in SPLIT_NAMES:
        raise ValueError(f"{place}: the split is {repr(name)[:20]}, expected train, valid or test")
    return SPLIT_NAMES[name]


def yes_or_no(label: object, place: str) -> int:
    """A label that is 0 or 1."""
    if label not in (0, 1):
        raise ValueError(f"{place}: the label is {repr(label)[:20]}, expected 0 or 1")
    return int(bool(label))


def as_bytes(text: object, place: str, max_len: int) -> NDArray[np.uint8]:
    """The first `max_len` bytes of a text that is not empty."""
    if not isinstance(text, str) or not text:
        got = "an empty one" if text == "" else type(text).__name__
        raise ValueError(f"{place}: expected a text, got {got}")
    return np.frombuffer(text[:max_len].encode()[:max_len], np.uint8)


def _shown(field: bytes) -> str:
    return repr(field[:40].decode(errors="replace"))
