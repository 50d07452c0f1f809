"""Retrieval: the official pairs, the tables of papers and pairs, bad files."""

import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from skeinformer.lab.lra.retrieval import OFFICIAL, read_official, read_parquet
from skeinformer.lab.lra.store import Example
from tests.lab.lra.sources import shared

ROWS = ['1.0\tP1\tP2\tfirst "quoted text\tsecond caf\u00e9', "0\tP2\tP1\tsecond caf\u00e9\tfirst, again\r"]


def official(folder: Path, rows: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    for split, name in OFFICIAL.items():
        own = rows if split == "train" else ROWS
        (folder / name).write_bytes("".join(f"{row}\n" for row in own).encode())
    return folder


def texts(example: Example) -> list[str]:
    return [tokens.tobytes().decode() for tokens in example.sequences]


@pytest.mark.parametrize("archived", [False, True])
def test_official_pairs(tmp_path: Path, archived: bool) -> None:
    source = official(tmp_path / "tsv_data", ROWS)
    if archived:
        with tarfile.open(tmp_path / "lra_release.gz", "w:gz") as archive:
            archive.add(source, "lra_release/tsv_data")
        source = tmp_path / "lra_release.gz"
    for examples in read_official(source, max_len=4000).values():
        first, second = examples
        assert (first.label, second.label) == (1, 0)
        assert texts(first) == ['first "quoted text', "second café"]
        assert texts(second) == ["second café", "first, again"]


def test_texts_are_cut(tmp_path: Path) -> None:
    first, _ = read_official(official(tmp_path / "a", ROWS), max_len=5)["test"]
    assert texts(first) == ["first", "secon"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("2\ta\tb\tx\ty", "the label is '2', expected 0 or 1"),
        ("label\tid1\tid2\ttext1\ttext2", "the label is 'label'"),
        ("1\ta\tb\tx", "4 columns, expected 5"),
        ("1\ta\tb\tx\ty\tz", "6 columns, expected 5"),
        ("1\ta\tb\t\ty", "text 1 is empty"),
        ("1\ta\tb\tx\t", "text 2 is empty"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, row: str, message: str) -> None:
    source = official(tmp_path / "a", [*ROWS, row])
    with pytest.raises(ValueError, match=rf"new_aan_pairs\.train\.tsv, line 3: {message}"):
        list(read_official(source, max_len=4000)["train"])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    source = official(tmp_path / "a", ROWS)
    (source / OFFICIAL["valid"]).unlink()
    with pytest.raises(FileNotFoundError, match=r"new_aan_pairs\.eval\.tsv"):
        list(read_official(source, max_len=9)["valid"])


def tables(
    folder: Path, change: Callable[[dict[str, list[object]], dict[str, list[object]]], object]
) -> tuple[Path, Path]:
    papers: dict[str, list[object]] = {"pid": [10, 20, 30], "text": ["ten", "twenty", "thirty"]}
    pairs: dict[str, list[object]] = {
        "split": ["train", "train", "val", "test"],
        "a": [10, 20, 30, 10],
        "b": [20, 30, 10, 30],
        "label": [1, 0, 1, 0],
        "strict": [True, False, True, True],
    }
    change(papers, pairs)
    for name, columns in (("papers", papers), ("pairs", pairs)):
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")
    return folder / "papers.parquet", folder / "pairs.parquet"


def test_tables_of_papers_and_pairs(tmp_path: Path) -> None:
    where = tables(tmp_path, lambda papers, pairs: None)
    loose = {name: list(rows) for name, rows in read_parquet(*where, max_len=4, strict=False).items()}
    assert {name: len(rows) for name, rows in loose.items()} == {"train": 2, "valid": 1, "test": 1}
    assert [(texts(example), example.label) for example in loose["train"]] == [
        (["ten", "twen"], 1),
        (["twen", "thir"], 0),
    ]
    strict = {name: list(rows) for name, rows in read_parquet(*where, max_len=4).items()}
    assert {name: len(rows) for name, rows in strict.items()} == {"train": 1, "valid": 1, "test": 1}


def test_a_table_without_marks_is_taken_whole(tmp_path: Path) -> None:
    where = tables(tmp_path, lambda papers, pairs: pairs.pop("strict"))
    assert len(list(read_parquet(*where, max_len=4)["train"])) == 2


def put(table: int, column: str, value: object) -> Callable[..., object]:
    return lambda *both: both[table][column].__setitem__(1, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(1, "a", 99), r"pairs\.parquet, row 2: there is no paper 99 in papers\.parquet"),
        (put(1, "label", 2), r"pairs\.parquet, row 2: the label is 2"),
        (put(1, "split", "dev"), r"pairs\.parquet, row 2: the split is 'dev'"),
        (put(0, "text", ""), r"papers\.parquet, row 2: expected a text"),
        (put(0, "pid", 10), r"papers\.parquet, row 2: paper 10 is there twice"),
        (lambda papers, pairs: pairs.pop("b"), r"pairs\.parquet has no column b"),
        (lambda papers, pairs: papers.pop("pid"), r"papers\.parquet has no column pid"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, change: Callable[..., object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(read_parquet(*tables(tmp_path, change), max_len=9)["test"])


def test_the_stand_in() -> None:
    splits = read_parquet(shared("peerread_papers.parquet"), shared("peerread_pairs.parquet"), max_len=4000)
    counts = {name: [example.label for example in examples] for name, examples in splits.items()}
    assert {name: (len(labels), sum(labels)) for name, labels in counts.items()} == {
        "train": (28532, 14266),
        "valid": (512, 256),
        "test": (1374, 687),
    }
