"""Rows of text files and of parquet files, with errors that name file and row."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skeinformer.lra.archives import open_member


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


def _shown(field: bytes) -> str:
    return repr(field[:40].decode(errors="replace"))
