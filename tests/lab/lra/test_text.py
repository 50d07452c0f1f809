"""Text: the official folder and archive, parquet, the held-out validation set, bad files."""

import tarfile
from collections import Counter
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from skeinformer.lab.lra.holdout import hold_out
from skeinformer.lab.lra.store import Example
from skeinformer.lab.lra.text import read_text
from tests.lab.lra.sources import shared

Splits = dict[str, list[Example]]


def reviews(split: str, label: int, count: int) -> list[str]:
    return [f"{split} {label} review {number}: caf\u00e9 " * (number + 1) for number in range(count)]


def folder(path: Path, count: int = 20) -> Path:
    """The layout of aclImdb, with what is not to be read."""
    for split in ("train", "test"):
        for label, name in enumerate(("neg", "pos")):
            (path / split / name).mkdir(parents=True)
            for number, text in enumerate(reviews(split, label, count)):
                (path / split / name / f"{number}_7.txt").write_text(text)
        (path / split / "urls_pos.txt").write_text("http://example.org")
    (path / "train" / "unsup").mkdir()
    (path / "train" / "unsup" / "0_0.txt").write_text("no label")
    (path / "README").write_text("about")
    return path


def parquet(path: Path, columns: dict[str, list[object]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def columns(count: int = 20) -> dict[str, list[object]]:
    rows = [(s, label, t) for s in ("train", "test") for label in (0, 1) for t in reviews(s, label, count)]
    return {
        name: list(values) for name, values in zip(("split", "label", "text"), zip(*rows, strict=True), strict=True)
    }


def read(path: Path, valid: int = 10, max_len: int = 4000, seed: int = 0) -> Splits:
    return read_text(path, max_len=max_len, valid=valid, seed=seed)


def contents(examples: list[Example]) -> list[tuple[bytes, int]]:
    return [(example.sequences[0].tobytes(), example.label) for example in examples]


def test_the_folder_the_archive_and_parquet_hold_the_same(tmp_path: Path) -> None:
    whole = folder(tmp_path / "aclImdb")
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as archive:
        archive.add(whole, "aclImdb")
    one, two = read(whole), read(tmp_path / "aclImdb_v1.tar.gz")
    for name in ("train", "valid", "test"):
        assert contents(one[name]) == contents(two[name])
    three = read(parquet(tmp_path / "a.parquet", columns()))
    assert Counter(contents(one["test"])) == Counter(contents(three["test"]))
    assert Counter(contents(one["train"] + one["valid"])) == Counter(contents(three["train"] + three["valid"]))
    expected = {(text.encode(), label) for label in (0, 1) for text in reviews("test", label, 20)}
    assert set(contents(one["test"])) == expected


def test_text_is_cut_in_bytes(tmp_path: Path) -> None:
    for source in (folder(tmp_path / "aclImdb"), parquet(tmp_path / "a.parquet", columns())):
        splits = read(source, max_len=30)
        lengths = [len(example.sequences[0]) for examples in splits.values() for example in examples]
        assert max(lengths) == 30
        assert any(text.startswith(b"test 1 review 9: caf\xc3\xa9 test") for text, _ in contents(splits["test"]))


def test_validation_is_stratified_seeded_and_disjoint(tmp_path: Path) -> None:
    source = parquet(tmp_path / "a.parquet", columns())
    first, again, other = read(source), read(source), read(source, seed=1)
    assert Counter(example.label for example in first["valid"]) == {0: 5, 1: 5}
    assert contents(first["valid"]) == contents(again["valid"])
    assert contents(first["valid"]) != contents(other["valid"])
    assert len(first["train"]) == 30
    assert not set(contents(first["train"])) & set(contents(first["valid"]))
    assert contents(first["test"]) == contents(other["test"])


def test_duplicates_never_straddle(tmp_path: Path) -> None:
    table = columns()
    train = [row for row, split in enumerate(table["split"]) if split == "train"]
    for row in train[::4]:
        table["text"][row] = "the same"  # of both classes
    for seed in range(5):
        splits = read(parquet(tmp_path / "a.parquet", table), valid=16, seed=seed)
        valid = [text for text, _ in contents(splits["valid"])]
        assert len(set(valid)) == 16
        assert not set(valid) & {text for text, _ in contents(splits["train"])}


def test_a_table_with_its_own_validation_keeps_it(tmp_path: Path) -> None:
    table = columns()
    table["split"][3] = "val"
    table["text"][4] = table["text"][3]  # a copy in the training set goes
    splits = read(parquet(tmp_path / "a.parquet", table))
    assert [text.decode() for text, _ in contents(splits["valid"])] == [table["text"][3]]
    assert len(splits["train"]) == 38


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("label", [2], r"a\.parquet, row 3: the label is 2, expected 0 or 1"),
        ("label", [-1], "row 3: the label is -1"),
        ("label", [None], "row 3: there is no label"),
        ("text", [""], "row 3: expected a text, got an empty one"),
        ("text", [None], "row 3: there is no text"),
        ("split", ["dev"], "row 3: the split is 'dev'"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, column: str, values: list[object], message: str) -> None:
    table = columns()
    table[column][2:3] = values
    with pytest.raises(ValueError, match=message):
        read(parquet(tmp_path / "a.parquet", table))


def test_wrong_columns_and_types_are_named(tmp_path: Path) -> None:
    table = columns()
    table["review"] = table.pop("text")
    with pytest.raises(ValueError, match=r"a\.parquet has no column text; its columns are split, label, review"):
        read(parquet(tmp_path / "a.parquet", table))
    with pytest.raises(ValueError, match="row 1: expected a text, got int"):
        read(parquet(tmp_path / "a.parquet", {**columns(), "text": list(range(80))}))
    with pytest.raises(ValueError, match="row 1: the label is 'pos'"):
        read(parquet(tmp_path / "a.parquet", {**columns(), "label": ["pos"] * 80}))


def test_a_truncated_table_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", columns())
    content = path.read_bytes()
    for length in (0, 3, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"a\.parquet is damaged, or no parquet file"):
            read(path)
    path.write_bytes(content[:4] + bytes(1000) + content[1004:])
    with pytest.raises(ValueError, match=r"a\.parquet"):
        read(path)


def test_sources_without_reviews(tmp_path: Path) -> None:
    (tmp_path / "train" / "pos").mkdir(parents=True)
    with pytest.raises(ValueError, match="has no reviews to train"):
        read(tmp_path)
    (tmp_path / "train" / "pos" / "0_9.txt").write_text("")
    with pytest.raises(ValueError, match=r"train/pos/0_9\.txt: the review is empty"):
        read(tmp_path)
    with pytest.raises(FileNotFoundError, match="none"):
        read(tmp_path / "none.parquet")
    with pytest.raises(FileNotFoundError, match="none"):
        read(tmp_path / "none")


def test_hold_out_has_the_share_of_each_class() -> None:
    labels = [0] * 70 + [1] * 25 + [2] * 5
    chosen = hold_out(range(100), labels, 21, seed=0)
    assert chosen.sum() == 21
    assert Counter(label for label, out in zip(labels, chosen, strict=True) if out) == {0: 15, 1: 5, 2: 1}


@pytest.mark.parametrize(
    ("keys", "count", "message"),
    [
        ("abcd", 4, "4 validation examples cannot be held out of 4"),
        ("aabb", 2, "1 validation examples of class 0"),
        ("ab", 0, "valid must be at least 1"),
    ],
)
def test_too_many_cannot_be_held_out(keys: str, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hold_out(keys, [index % 2 for index in range(len(keys))], count, 0)


def test_the_real_reviews() -> None:
    splits = read_text(shared("imdb.parquet"), max_len=4000, valid=2500, seed=0)
    assert {name: len(examples) for name, examples in splits.items()} == {"train": 22500, "valid": 2500, "test": 25000}
    for examples in splits.values():
        assert Counter(example.label for example in examples) == {0: len(examples) // 2, 1: len(examples) // 2}
    assert not set(contents(splits["train"])) & set(contents(splits["valid"]))
