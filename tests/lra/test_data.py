"""Stores and readers: what is written is read, and bad input is one line that names the file."""

import io
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from lra import files
from lra.__main__ import main
from lra.data import image, listops, pathfinder, retrieval, text
from lra.data.holdout import hold_out
from lra.data.store import SPLITS, Example, open_store, write_store
from tests.lra.tiny import write_tiny


def example(tokens: bytes, label: int = 0) -> Example:
    return Example((np.frombuffer(tokens, np.uint8),), label)


FACTS: dict[str, Any] = {"task": "text", "source": "x", "vocab_size": 256, "num_classes": 2, "sequences": 1}
FACTS |= {"max_len": 8}


def write_archive(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_a_store_gives_what_was_written(tmp_path: Path) -> None:
    splits = {"train": [example(b"ab"), example(b"\0", 1)], "valid": [example(b"c")], "test": [example(b"d" * 8)]}
    write_store(tmp_path / "store", splits, **FACTS, seed=3, options={"a": 1})
    store = open_store(tmp_path / "store", verify=True)
    train = store.split("train")
    assert (train.labels.tolist(), train.lengths.tolist()) == ([0, 1], [[2], [1]])
    assert [train.sequence(index).tobytes() for index in (0, 1)] == [b"ab", b"\0"]
    assert (store.meta.seed, store.meta.options, store.meta.splits) == (
        3,
        {"a": 1},
        {"train": 2, "valid": 1, "test": 1},
    )
    with pytest.raises(IndexError):
        train.sequence(2)
    with pytest.raises(ValueError, match="unknown split 'tset'; did you mean 'test'"):
        store.split("tset")


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (example(b"", 0), "train example 1 has 0 tokens, expected 1 to 8"),
        (example(b"123456789"), "train example 1 has 9 tokens, expected 1 to 8"),
        (example(b"a", 2), "train example 1 has label 2, expected 0 to 1"),
        (Example((np.zeros(2, np.uint8),) * 2, 0), "train example 1 has 2 sequences, expected 1"),
        (Example((np.zeros(2, np.int64),), 0), "train example 1 has tokens of dtype int64"),
    ],
)
def test_a_wrong_example_leaves_no_store(tmp_path: Path, bad: Example, message: str) -> None:
    good = [example(b"a")]
    with pytest.raises(ValueError, match=message):
        write_store(tmp_path / "store", {"train": [*good, bad], "valid": good, "test": good}, **FACTS)
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_replaced_only_when_asked_and_a_foreign_folder_never(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "store", "text")
    (tmp_path / ".store.0badc0de.unfinished").mkdir()  # what a killed writer left
    splits = {name: [example(b"a")] for name in SPLITS}
    with pytest.raises(ValueError, match="already holds a store; give another folder, or --overwrite"):
        write_store(folder, splits, **FACTS)
    write_store(folder, splits, **FACTS, overwrite=True)
    assert open_store(folder).meta.splits["train"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    (folder / "mine.txt").touch()
    with pytest.raises(ValueError, match=r"holds mine\.txt, which is not part of a store"):
        write_store(folder, splits, **FACTS, overwrite=True)


@pytest.mark.parametrize("name", ["meta.json", "train.tokens.npy", "valid.labels.npy", "test.lengths.npy"])
@pytest.mark.parametrize("damage", ["missing", "short", "altered"])
def test_a_damaged_store_names_the_file(tmp_path: Path, name: str, damage: str) -> None:
    path = write_tiny(tmp_path / "store", "text") / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if damage == "short" else content[:-9] + b"\xff" + content[-8:])
    with pytest.raises(ValueError, match=rf"{name} .*: prepare the data again with python -m lra data"):
        open_store(tmp_path / "store", verify=True)


def test_validation_is_a_share_of_each_class_and_no_duplicate() -> None:
    keys = [f"text {number // 2 if number < 40 else number}" for number in range(100)]  # 20 pairs of duplicates
    labels = [number % 2 if number < 80 else 1 for number in range(100)]
    chosen = hold_out(keys, labels, 10, seed=0)
    assert [sum(chosen & (np.array(labels) == label)) for label in (0, 1)] == [4, 6]
    assert not chosen[:40].any()
    with pytest.raises(ValueError, match="100 validation examples cannot be held out of 100; ask for fewer"):
        hold_out(keys, labels, 100, seed=0)


LISTOPS = b"Source\tTarget\r\n( ( [MAX 2 ) 9 ) ] )\t9\n[SM 5 7 ]\t2\n"


def write_listops(folder: Path, train: bytes = LISTOPS) -> Path:
    for name, content in {"basic_train.tsv": train, "basic_val.tsv": LISTOPS, "basic_test.tsv": LISTOPS}.items():
        (folder / name).write_bytes(content)
    return folder


def test_official_listops_drops_parentheses_and_expressions_of_other_splits(tmp_path: Path) -> None:
    splits = {name: list(rows) for name, rows in listops.read_official(write_listops(tmp_path)).items()}
    assert [tuple(row.sequences[0]) for row in splits["test"]] == [(11, 2, 9, 14), (13, 5, 7, 14)]
    assert [row.label for row in splits["test"]] == [9, 2]
    assert splits["train"] == splits["valid"] == []


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b"[MAX 2 9 ]\t3\n", "the label is '3', but the expression has the value 9"),
        (b"[MAX 2 9\t9\n", "1 of its operators are not closed"),
        (b"[MAX 2 x ]\t2\n", "unknown token 'x'"),
        (b"[MAX 2 ]\n", "1 columns, expected 2, separated by tabs"),
        (b"2 ]\t2\n", "a ] closes nothing"),
        (b"[MIN ]\t2\n", r"\[MIN has no arguments"),
        (b"[MAX " + b"1 " * 2000 + b"]\t1\n", "2002 tokens, more than 2000; set --max-len"),
    ],
)
def test_a_wrong_row_of_listops_is_named(tmp_path: Path, row: bytes, message: str) -> None:
    folder = write_listops(tmp_path, LISTOPS + row)
    with pytest.raises(ValueError, match=rf"basic_train\.tsv, line 4: .*{message}"):
        list(listops.read_official(folder)["train"])


def test_operators_have_their_values() -> None:
    values = {"[MED 1 9 4 6 ]": 5, "[MED 3 1 2 ]": 2, "[SM 9 9 4 ]": 2, "[MIN 4 [MAX 2 7 ] 5 ]": 4, "[MAX 0 0 ]": 0}
    assert {text: listops.evaluate(listops.parse(text)) for text in values} == values


def test_reviews_come_from_folder_archive_and_parquet_alike(tmp_path: Path) -> None:
    members = {
        f"aclImdb/{split}/{label}/{number}_7.txt": f"{number} {split} {label}".encode()
        for split in ("train", "test")
        for label in ("neg", "pos")
        for number in range(6)
    }
    for name, content in members.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    archive = write_archive(tmp_path / "a.tar.gz", members)
    columns: dict[str, list[Any]] = {
        "split": [name.split("/")[1] for name in members],
        "label": [int("/pos/" in name) for name in members],
        "text": [content.decode() for content in members.values()],
    }
    table = write_parquet(tmp_path / "a.parquet", **columns)
    sources = (tmp_path / "aclImdb", archive, table)
    readings = [text.read_text(source, max_len=10, valid=4, seed=0) for source in sources]
    shown = [
        {name: [(row.sequences[0].tobytes(), row.label) for row in rows] for name, rows in r.items()} for r in readings
    ]
    assert shown[0] == shown[1]
    assert {name: len(rows) for name, rows in shown[2].items()} == {"train": 8, "valid": 4, "test": 12}
    assert set(shown[0]["test"]) == set(shown[2]["test"])
    assert all(len(tokens) <= 10 for tokens, _ in shown[0]["train"])


def test_papers_are_read_from_tables_and_from_lines(tmp_path: Path) -> None:
    for name in retrieval.OFFICIAL.values():
        (tmp_path / name).write_bytes(b"1.0\ta\tb\tfirst paper\tsecond\n0\ta\tc\tx\ty\n")
    (first, second) = retrieval.read_official(tmp_path, max_len=5)["train"]
    assert [tokens.tobytes() for tokens in first.sequences] == [b"first", b"secon"]
    assert (first.label, second.label) == (1, 0)
    papers = write_parquet(tmp_path / "papers.parquet", pid=["a", "b"], text=["one", "two"])
    rows: dict[str, list[Any]] = {"split": ["train", "val", "test", "test"], "a": ["a"] * 4, "b": ["b"] * 4}
    pairs = write_parquet(tmp_path / "pairs.parquet", **rows, label=[1, 0, 1, 0], strict=[True, True, True, False])
    kept = {name: len(list(split)) for name, split in retrieval.read_parquet(papers, pairs, max_len=9).items()}
    every = retrieval.read_parquet(papers, pairs, max_len=9, strict=False)
    assert (kept, len(list(every["test"]))) == ({"train": 1, "valid": 1, "test": 1}, 2)


def write_cifar(folder: Path, **changes: bytes) -> Path:
    folder.mkdir()
    rows = np.arange(40 * 3073, dtype=np.uint64).astype(np.uint8).reshape(40, 3073)
    rows[:, 0] = np.arange(40) % 10
    for name in ("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"):
        (folder / f"{name}.bin").write_bytes(changes.get(name, rows.tobytes()))
    return folder


def test_gray_arrays_are_read(tmp_path: Path) -> None:
    pixels = np.arange(100 * 1024, dtype=np.uint64).reshape(100, 32, 32).astype(np.uint8)
    pixels[:, 0, 0] = np.arange(100)  # no duplicates
    np.save(tmp_path / "gray_train_x.npy", pixels)
    with lzma.open(tmp_path / "gray_test_x.npy.xz", "wb") as file:
        np.save(file, pixels)
    np.savez(tmp_path / "labels.npz", train=np.arange(100) % 10, test=np.arange(100) % 10)
    splits = {name: list(rows) for name, rows in image.read_image(tmp_path, valid=10, seed=0).items()}
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 90, "valid": 10, "test": 100}
    np.save(tmp_path / "gray_train_x.npy", pixels.astype(float))
    with pytest.raises(ValueError, match=r"gray_train_x\.npy holds float64 \(100, 32, 32\), expected uint8"):
        image.read_image(tmp_path, valid=10, seed=0)


def write_pathfinder(root: Path, lines: list[str]) -> Path:
    folder = root / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata" / "0.npy").write_text("".join(f"{line}\n" for line in lines))
    for number in range(20):
        pixels = np.full((32, 32), number, np.uint8)
        Image.fromarray(pixels).save(folder / "imgs" / "0" / f"sample_{number}.png")
    return folder


LINES = [f"imgs/0 sample_{number}.png {number} {number % 2} more words" for number in range(20)]


def test_official_pathfinder_is_divided_by_a_seed(tmp_path: Path) -> None:
    write_pathfinder(tmp_path, LINES)
    splits = {name: list(rows) for name, rows in pathfinder.read_official(tmp_path, seed=0).items()}
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 16, "valid": 2, "test": 2}
    rows = [row for split in splits.values() for row in split]
    assert sorted(int(row.sequences[0][0]) for row in rows) == list(range(20))
    assert all(row.label == row.sequences[0][0] % 2 for row in rows)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("imgs/0 sample_1.png 1", r"0\.npy line 20 is .*, expected folder, file, number and a label"),
        ("imgs/0 sample_1.png 1 2", r"0\.npy line 20 is .* 1 2', expected folder, file, number and a label of 0 or 1"),
        ("imgs/0 sample_1.png 1 1", r"0\.npy line 20 names imgs/0/sample_1\.png, as does .*0\.npy line 2"),
        ("imgs/0 none.png 1 1", r"0\.npy line 20 names imgs/0/none\.png, which cannot be read"),
        ("imgs/0 text.png 1 1", r"0\.npy line 20 names imgs/0/text\.png, which cannot be read"),
        ("imgs/0 large.png 1 1", r"0\.npy line 20 names imgs/0/large\.png, of shape \(33, 33\)"),
    ],
)
def test_a_wrong_image_of_pathfinder_is_named(tmp_path: Path, line: str, message: str) -> None:
    folder = write_pathfinder(tmp_path, [*LINES[:19], line])
    (folder / "imgs" / "0" / "text.png").write_text("no png")
    Image.fromarray(np.zeros((33, 33), np.uint8)).save(folder / "imgs" / "0" / "large.png")
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        [list(rows) for rows in pathfinder.read_official(folder, seed=0).values()]


def test_settings_without_room_are_an_error() -> None:
    for settings in ({"paddles": 400}, {"paddles": 1}, {"continuity": 0.0}):
        with pytest.raises(ValueError, match=r"take fewer paddles|must be"):
            next(pathfinder.generate(1, seed=0, settings=pathfinder.PathfinderSettings(**settings)))  # type: ignore[arg-type]
    for options in ({"min_len": 3}, {"min_len": 1990, "max_len": 2000, "max_depth": 3}):
        with pytest.raises(ValueError, match=r"min_len must be at least 4|hardly ever come up"):
            next(listops.generate(1, settings=listops.ListOpsSettings(**options)))


def test_a_published_archive_with_another_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = write_archive(tmp_path / "cifar-10-binary.tar.gz", {"a": b"b"})
    words = ["data", "image", "--source", str(archive), "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert f"{archive} has the sha256 " in capsys.readouterr().err
    monkeypatch.setitem(files.PUBLISHED_SHA256, archive.name, files.sha256_of(archive))
    assert main(words) == 2
    assert "holds no data_batch_1.bin; expected cifar-10-binary.tar.gz" in capsys.readouterr().err


def truncated(folder: Path) -> list[str]:
    content = np.random.default_rng(0).bytes(10_000)
    archive = write_archive(folder / "a.tar.gz", {"aclImdb/train/pos/1_1.txt": content})
    archive.write_bytes(archive.read_bytes()[:5_000])
    return ["text", "--source", str(archive)]


def no_paper(folder: Path) -> list[str]:
    papers = write_parquet(folder / "papers.parquet", pid=["a"], text=["x"])
    pairs = write_parquet(folder / "a.parquet", split=["train"], a=["a"], b=["c"], label=[1])
    return ["retrieval", "--papers", str(papers), "--pairs", str(pairs)]


def short_batch(folder: Path) -> list[str]:
    return ["image", "--source", str(write_cifar(folder / "cifar", data_batch_2=b"short")), "--valid", "10"]


def generator_option(folder: Path) -> list[str]:
    return ["listops", "--source", str(write_listops(folder)), "--train", "5"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (truncated, "{folder}/a.tar.gz is damaged, or not of the kind"),
        (no_paper, "a.parquet, row 1: b is 'c', expected a pid of papers.parquet"),
        (short_batch, "{folder}/cifar, data_batch_2.bin: 5 bytes, expected a multiple of 3,073"),
        (generator_option, "--train is for the generator; with --source, files are taken as they are"),
    ],
)
def test_bad_input_is_one_line_and_leaves_no_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Callable[[Path], list[str]], message: str
) -> None:
    assert main(["data", *make(tmp_path), "--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lra: ")
    assert message.format(folder=tmp_path) in line
    assert not (tmp_path / "out").exists()


def test_a_task_is_prepared_by_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--train", "20", "--valid", "4", "--test", "4", "--workers", "1"]
    small = ["--image-size", "12", "--paddles", "2", "--distractors", "0", "--seed-distance", "4"]
    assert main(["data", "pathfinder", "--out", str(tmp_path / "p"), *sizes, *small]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "p")]
    meta = open_store(tmp_path / "p", verify=True).meta
    assert (meta.source, meta.max_len, meta.options["paddles"], meta.splits["train"]) == ("generator", 144, 2, 20)
