"""Rows of text files and of parquet files, with errors that name file and row."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from lra.data.archives import open_member

SPLIT_NAMES = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}
# columns whose values are checked: what is valid, and how an error says it
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "split": (lambda value: isinstance(value, str) and value in SPLIT_NAMES, "train, valid or test"),
    "label": (lambda value: value in (0, 1), "0 or 1"),
    "text": (lambda value: isinstance(value, str) and value != "", "a text"),
}


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


def parquet_table(path: Path, columns: Sequence[str]) -> pd.DataFrame:
    """Read a parquet file that has these columns, and check their values; splits get one name each."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no {path}")
    try:
        table = pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no parquet file: {error}") from error
    for name in columns:
        if name not in table:
            raise ValueError(f"{path} has no column {name}; its columns are {', '.join(table)}")
        if name in CHECKS:
            check_column(path, table[name], *CHECKS[name])
    return table.replace({"split": SPLIT_NAMES})


def check_column(path: Path, column: "pd.Series[Any]", is_valid: Callable[[Any], bool], expected: str) -> None:
    """Raise a ValueError that names the first row whose value is not valid."""
    for number, value in enumerate(column, start=1):
        if not is_valid(value):
            raise ValueError(f"{path.name}, row {number}: {column.name} is {value!r}, expected {expected}")


def first_bytes(text: str, max_len: int) -> NDArray[np.uint8]:
    """Return the first `max_len` bytes of a text."""
    return np.frombuffer(text[:max_len].encode()[:max_len], np.uint8)
