"""Retrieval: two documents as bytes, and whether one cites the other (ACL Anthology Network; Radev et al. 2013)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from lra.data.store import SPLITS, Example
from lra.data.tables import check_column, first_bytes, parquet_table, tsv_rows
from skeinformer.checks import check_count

VOCAB_SIZE = 256
NUM_CLASSES = 2
NAME = "new_aan_pairs"  # of the official set
OFFICIAL = {
    "train": "new_aan_pairs.train.tsv",
    "valid": "new_aan_pairs.eval.tsv",
    "test": "new_aan_pairs.test.tsv",
}
LABELS = {b"0": 0, b"1": 1, b"0.0": 0, b"1.0": 1}


def read_official(source: Path, *, max_len: int) -> dict[str, Iterator[Example]]:
    """Read the splits of `new_aan_pairs.{train,eval,test}.tsv` in a folder or archive.

    A line has label, two ids and two texts, without header and quoting; the first `max_len` bytes of a text are kept.
    """
    check_count("max_len", max_len)

    def rows(name: str) -> Iterator[Example]:
        for place, (label, _, _, *texts) in tsv_rows(source, name, columns=5):
            if label not in LABELS:
                raise ValueError(f"{place}: the label is {label[:20].decode(errors='replace')!r}, expected 0 or 1")
            for number, text in enumerate(texts, start=1):
                if not text:
                    raise ValueError(f"{place}: text {number} is empty")
            yield Example(tuple(np.frombuffer(text[:max_len], np.uint8) for text in texts), LABELS[label])

    return {split: rows(name) for split, name in OFFICIAL.items()}


def read_parquet(papers: Path, pairs: Path, *, max_len: int, strict: bool = True) -> dict[str, list[Example]]:
    """Read the splits of two tables: papers with pid and text, pairs with split, a, b, label and perhaps strict.

    With `strict`, only pairs that are marked so are kept, where the table marks them. Papers are held in memory.
    """
    check_count("max_len", max_len)
    table = parquet_table(papers, ("pid", "text"))
    if len(twice := table.pid[table.pid.duplicated()]):
        raise ValueError(f"{papers.name}: paper {twice.iloc[0]} is there twice")
    texts = {pid: first_bytes(text, max_len) for pid, text in zip(table.pid, table.text, strict=True)}
    rows = parquet_table(pairs, ("split", "a", "b", "label"))
    for name in ("a", "b"):
        check_column(pairs, rows[name], lambda pid: pid in texts, f"a pid of {papers.name}")
    if strict and "strict" in rows:
        rows = rows[rows.strict.astype(bool)]
    return {
        name: [Example((texts[row.a], texts[row.b]), int(row.label)) for row in rows[rows.split == name].itertuples()]
        for name in SPLITS
    }
