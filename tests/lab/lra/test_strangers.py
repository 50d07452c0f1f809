"""Files from strangers, given to `skein data`: one line, exit status 2, no store, and little memory."""

import io
import os
import resource
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from studies.soak_inputs import batches, listops_archive, pathfinder, retrieval_archive

from skeinformer.lab import cli
from skeinformer.lab.lra.tables import _cells, parquet_rows
from tests.lab.lra.test_archives import sparse


def long_text(folder: Path) -> list[str]:
    """2 GB of text, which take 6 kB on disk."""
    rows = {"split": ["train", "test"] * 512, "label": [0, 1] * 512, "text": ["x" * 2_000_000] * 1024}
    values = pyarrow.array(["x" * 2_000_000])
    text = pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(1024, np.int32)), values)
    table = pyarrow.table({**rows, "text": text})
    pyarrow.parquet.write_table(table, folder / "a.parquet", compression="zstd", store_schema=False)
    return ["text", "--source", str(folder / "a.parquet")]


def listed_ids(folder: Path) -> list[str]:
    pyarrow.parquet.write_table(pyarrow.table({"pid": [[1], [2]], "text": ["a", "b"]}), folder / "papers.parquet")
    pairs = {"split": ["train"], "a": [[1]], "b": [[2]], "label": [1]}
    pyarrow.parquet.write_table(pyarrow.table(pairs), folder / "pairs.parquet")
    return ["retrieval", "--papers", str(folder / "papers.parquet"), "--pairs", str(folder / "pairs.parquet")]


def no_text(folder: Path) -> list[str]:
    table = pyarrow.table({"split": ["train"], "label": [0], "text": pyarrow.array([b"\xff\xfe"], pyarrow.binary())})
    changed = table.set_column(2, "text", table["text"].cast(pyarrow.string(), safe=False))
    pyarrow.parquet.write_table(changed, folder / "a.parquet")
    return ["text", "--source", str(folder / "a.parquet")]


def huge_image(folder: Path) -> list[str]:
    pathfinder(folder)
    header = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")):
        content += struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
    (folder / "imgs" / "0" / "sample_3.png").write_bytes(content)
    return ["pathfinder", "--source", str(folder)]


def linked_image(folder: Path) -> list[str]:
    pathfinder(folder)
    path = folder / "imgs" / "0" / "sample_3.png"
    path.unlink()
    path.symlink_to("sample_4.png")
    return ["pathfinder", "--source", str(folder)]


def waiting_metadata(folder: Path) -> list[str]:
    pathfinder(folder)
    os.mkfifo(folder / "metadata" / "1.npy")
    return ["pathfinder", "--source", str(folder)]


def linked_batch(folder: Path) -> list[str]:
    batches(folder)
    (folder / "data_batch_3").rename(folder / "elsewhere")
    (folder / "data_batch_3").symlink_to("elsewhere")
    return ["image", "--source", str(folder)]


def sparse_archive(folder: Path) -> list[str]:
    return ["text", "--source", str(sparse(folder / "a.tar.gz", 8 << 30))]


def altered(make: Callable[[Path], None], task: str) -> Callable[[Path], list[str]]:
    """An archive whose length at its end is wrong: all that is read of it before looks sound."""

    def case(folder: Path) -> list[str]:
        make(folder)
        path = folder / "a.tar.gz"
        path.write_bytes(path.read_bytes()[:-1] + b"\x07")
        return [task, "--source", str(path)]

    return case


CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "a text of 2 MB in 1,024 rows": (long_text, "column text, rows 1 to 1024: a text has 2,000,000 bytes, more than"),
    "ids that are lists": (listed_ids, "papers.parquet: column pid holds list<"),
    "text that is not UTF-8": (no_text, "a.parquet: a text in or after row 1 is not UTF-8"),
    "an image of 100,000 x 100,000": (huge_image, "sample_3.png, of 100000 x 100000 pixels; expected 32 x 32"),
    "a link to an image": (linked_image, "sample_3.png, which is or lies behind a link"),
    "a FIFO among metadata": (waiting_metadata, "1.npy is neither a file nor a folder"),
    "a link to a batch": (linked_batch, "data_batch_3 is a link; only plain files are read"),
    "a sparse file of 8 GB": (sparse_archive, "member set/a.txt: it is a sparse file"),
    "an altered archive of ListOps": (altered(listops_archive, "listops"), "a.tar.gz is damaged"),
    "an altered archive of Retrieval": (altered(retrieval_archive, "retrieval"), "a.tar.gz is damaged"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_file_from_a_stranger_is_refused(tmp_path: Path, case: str, capsys: pytest.CaptureFixture[str]) -> None:
    make, message = CASES[case]
    (tmp_path / "source").mkdir()
    arguments = make(tmp_path / "source")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert cli.main(["data", *arguments, "--out", str(tmp_path / "store")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("skein: ")
    assert message in line
    assert not (tmp_path / "store").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10  # KiB


def test_a_line_without_an_end_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv"):
        (tmp_path / name).write_bytes(b"Source\tTarget\n" + bytes(5 << 20))
    assert cli.main(["data", "listops", "--source", str(tmp_path), "--out", str(tmp_path / "store")]) == 2
    assert "basic_test.tsv, line 2: it has more than 4,194,304 bytes" in capsys.readouterr().err


def test_repeated_short_texts_are_read(tmp_path: Path) -> None:
    """What is held once in a dictionary stands in every row."""
    rows = {
        "split": ["train"] * 300 + ["test"] * 300,
        "label": [0, 1] * 300,
        "text": [f"t{i // 2}" for i in range(600)],
    }
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(rows), buffer, use_dictionary=True)
    (tmp_path / "a.parquet").write_bytes(buffer.getvalue())
    found = [values for _, values in parquet_rows(tmp_path / "a.parquet", ("split", "label", "text"), {"strict": True})]
    assert found == [(*row, True) for row in zip(rows["split"], rows["label"], rows["text"], strict=True)]


@pytest.mark.parametrize("indices", [[0, 2], [-1, 0]])
def test_a_row_without_a_value_is_damage(indices: list[int]) -> None:
    """As a file has it whose bits were flipped."""
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array(indices, pyarrow.int32()), ["a", "b"], safe=False)
    with pytest.raises(ValueError, match=r"rows 1 to 2: the file is damaged: a row has no value"):
        _cells(column, "rows 1 to 2")
