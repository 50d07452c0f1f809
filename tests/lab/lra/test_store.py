"""The store: what is written is read, it is whole or not there, and damage is found and named."""

import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skeinformer.lab.files import seal, unseal
from skeinformer.lab.lra.store import ARRAYS, SPLITS, Example, Meta, open_store, write_store

ROOT = Path(__file__).parents[3]
FACTS: dict[str, Any] = {"task": "text", "source": "reviews", "vocab_size": 256, "num_classes": 2, "max_len": 9}


def examples(count: int, sequences: int = 1, seed: int = 0) -> list[Example]:
    rng = np.random.default_rng(seed)
    return [
        Example(tuple(rng.integers(0, 256, rng.integers(1, 10), np.uint8) for _ in range(sequences)), index % 2)
        for index in range(count)
    ]


def three(sequences: int = 1, seed: int = 0) -> dict[str, list[Example]]:
    return {name: examples(size, sequences, seed + size) for name, size in zip(SPLITS, (7, 3, 4), strict=True)}


def write(folder: Path, splits: Any = None, **changes: Any) -> Meta:
    return write_store(folder, splits or three(), **{**FACTS, "sequences": 1, **changes})


@pytest.mark.parametrize("sequences", [1, 2])
def test_what_is_written_is_read(tmp_path: Path, sequences: int) -> None:
    data = three(sequences)
    meta = write(tmp_path / "new" / "store", data, sequences=sequences, seed=3, options={"depth": 2, "strict": True})
    store = open_store(tmp_path / "new" / "store", verify=True)
    assert store.meta == meta
    assert (meta.seed, meta.options, meta.splits) == (
        3,
        {"depth": 2, "strict": True},
        {"train": 7, "valid": 3, "test": 4},
    )
    for name in SPLITS:
        split = store.split(name)
        assert len(split) == len(data[name])
        assert (split.labels.dtype, split.lengths.dtype) == (np.int64, np.int32)
        for index, example in enumerate(data[name]):
            assert split.labels[index] == example.label
            for which, tokens in enumerate(example.sequences):
                assert split.lengths[index, which] == len(tokens)
                np.testing.assert_array_equal(split.sequence(index, which), tokens)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["store"]


def test_tokens_are_one_flat_array_and_views_of_it_are_read_only(tmp_path: Path) -> None:
    data = three()
    write(tmp_path / "store", data)
    flat = np.load(tmp_path / "store" / "train.tokens.npy")
    np.testing.assert_array_equal(flat, np.concatenate([example.sequences[0] for example in data["train"]]))
    tokens = open_store(tmp_path / "store").split("train").sequence(1)
    assert not tokens.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


def test_a_split_in_another_process_opens_the_files_itself(tmp_path: Path) -> None:
    write(tmp_path / "store", {name: [Example((np.zeros(10**5, np.uint8),), 0)] for name in SPLITS}, max_len=10**5)
    split = open_store(tmp_path / "store").split("test")
    sent = pickle.dumps(split)
    assert len(sent) < 1000
    np.testing.assert_array_equal(pickle.loads(sent).sequence(0), split.sequence(0))


def test_the_same_examples_give_the_same_bytes(tmp_path: Path) -> None:
    assert write(tmp_path / "a").checksums == write(tmp_path / "b").checksums


@pytest.mark.parametrize(
    ("example", "changes", "message"),
    [
        (Example((np.zeros(3, np.uint8),), 2), {}, "valid example 1 has label 2, expected 0 to 1"),
        (Example((np.zeros(3, np.uint8),), -1), {}, "label -1"),
        (Example((np.zeros(0, np.uint8),), 0), {}, "0 tokens, expected 1 to 9"),
        (Example((np.zeros(10, np.uint8),), 0), {}, "10 tokens, expected 1 to 9"),
        (Example((np.full(3, 15, np.uint8),), 0), {"vocab_size": 15}, "token 15, expected 0 to 14"),
        (Example((np.zeros(3, np.uint8),) * 2, 0), {}, "2 sequences, expected 1"),
        (Example((np.zeros(3),), 0), {}, "float64"),  # type: ignore[arg-type]
        (Example((np.zeros((3, 1), np.uint8),), 0), {}, r"shape \(3, 1\)"),
    ],
)
def test_a_bad_example_is_named_and_leaves_nothing(
    tmp_path: Path, example: Example, changes: dict[str, Any], message: str
) -> None:
    good = Example((np.zeros(3, np.uint8),), 0)
    splits = {"train": [good], "valid": [good, example], "test": [good]}
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "store", splits, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("splits", "changes", "message"),
    [
        ({"train": examples(1), "valid": [], "test": examples(1)}, {}, "split valid has no examples"),
        ({"train": examples(1)}, {}, "splits train, valid, test; got train"),
        (None, {"task": "txt"}, "unknown task 'txt'"),
        (None, {"vocab_size": 257}, "vocab_size is 257"),
        (None, {"num_classes": 1}, "num_classes is 1"),
        (None, {"source": "/home/me/reviews"}, "give the name alone"),
    ],
)
def test_a_store_that_cannot_be_is_refused(tmp_path: Path, splits: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "store", splits, **changes)
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_replaced_only_if_asked(tmp_path: Path) -> None:
    first = write(tmp_path / "store")
    with pytest.raises(ValueError, match=r"already holds a store.*--overwrite"):
        write(tmp_path / "store")
    second = write(tmp_path / "store", three(seed=5), overwrite=True)
    assert first.checksums != second.checksums
    assert open_store(tmp_path / "store", verify=True).meta == second
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_an_old_store_survives_a_failed_replacement(tmp_path: Path) -> None:
    first = write(tmp_path / "store")
    with pytest.raises(ValueError, match="no examples"):
        write(tmp_path / "store", {**three(), "test": []}, overwrite=True)
    assert open_store(tmp_path / "store", verify=True).meta == first


def test_other_files_are_never_removed(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("all of it")
    with pytest.raises(ValueError, match=r"holds thesis\.tex, which is not part of a store"):
        write(tmp_path / "store", overwrite=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        write(tmp_path / "file", overwrite=True)


def test_an_empty_folder_and_a_link_may_become_a_store(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert open_store(tmp_path / "empty").meta == open_store(tmp_path / "link").meta


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Example]:
        yield from examples(2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "store", {**three(), "valid": interrupted()})
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_examples(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    write(tmp_path / "store", on_example=lambda split, done: seen.append((split, done)))
    assert seen == [(name, done + 1) for name, size in zip(SPLITS, (7, 3, 4), strict=True) for done in range(size)]


KILLED = """
import itertools, sys
import numpy as np
from skeinformer.lab.files import seal, unseal
from skeinformer.lab.lra.store import Example, write_store

def forever():
    for index in itertools.count():
        yield Example((np.zeros(9, np.uint8),), 0)
        if index == 10:
            print("writing", flush=True)

write_store(sys.argv[1], {"train": forever(), "valid": [], "test": []}, task="text", source="x", vocab_size=256,
            num_classes=2, sequences=1, max_len=9)
"""


def test_what_a_kill_leaves_is_no_store_and_is_removed_by_the_next_writer(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        write(tmp_path / "store")  # beside a living writer, whose folder is left alone
        assert len(list(tmp_path.iterdir())) == 2
        (tmp_path / "store").rename(tmp_path / "elsewhere")
        process.send_signal(signal.SIGKILL)
    with pytest.raises(FileNotFoundError, match="no store at"):
        open_store(tmp_path / "store")
    write(tmp_path / "store")
    assert {path.name for path in tmp_path.iterdir()} == {"store", "elsewhere"}


def test_a_store_whose_replacement_was_killed_between_two_names_comes_back(tmp_path: Path) -> None:
    first = write(tmp_path / "store")
    (tmp_path / "store").rename(tmp_path / ".store.0123abcd.replaced")
    with pytest.raises(ValueError, match="no examples"):
        write(tmp_path / "store", {**three(), "test": []})
    assert open_store(tmp_path / "store", verify=True).meta == first


def test_a_planted_link_does_not_become_the_store(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / ".store.0123abcd.replaced").symlink_to("elsewhere")
    write(tmp_path / "store")
    assert not (tmp_path / "store").is_symlink()
    assert list((tmp_path / "elsewhere").iterdir()) == []


def damaged(folder: Path, name: str, change: Any) -> None:
    path = folder / name
    path.write_bytes(change(path.read_bytes()))


@pytest.mark.parametrize("name", ARRAYS)
def test_damage_is_found_and_named(tmp_path: Path, name: str) -> None:
    write(tmp_path / "store")
    (tmp_path / "store" / name).rename(tmp_path / "kept")
    with pytest.raises(ValueError, match=f"{name} is missing: prepare the data again"):
        open_store(tmp_path / "store")
    (tmp_path / "kept").rename(tmp_path / "store" / name)
    damaged(tmp_path / "store", name, lambda content: content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ValueError, match=f"{name} .*prepare the data again"):
        open_store(tmp_path / "store", verify=True)
    damaged(tmp_path / "store", name, lambda content: content[:-1])
    with pytest.raises(ValueError, match=f"{name} has .* bytes, expected"):
        open_store(tmp_path / "store")


def test_shapes_are_checked_without_checksums(tmp_path: Path) -> None:
    write(tmp_path / "store")
    damaged(tmp_path / "store", "train.tokens.npy", lambda content: content.replace(b"u1", b"i1"))
    with pytest.raises(ValueError, match=r"train\.tokens\.npy holds int8"):
        open_store(tmp_path / "store")
    damaged(tmp_path / "store", "train.tokens.npy", lambda content: b"x" + content[1:])
    with pytest.raises(ValueError, match=r"train\.tokens\.npy cannot be read"):
        open_store(tmp_path / "store")
    damaged(tmp_path / "store", "train.labels.npy", lambda content: content[:-1] + b"\x7f")
    with pytest.raises(ValueError, match=r"train\.labels\.npy holds .*expected 0 to 1"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2, and this version reads format 1"),
        ({"task": 3}, "field 'task' is 3, expected a text"),
        ({"task": "txt"}, "unknown task 'txt'"),
        ({"splits": {"train": 1}}, "field 'splits' does not name train, valid, test"),
        ({"splits": {"train": 0, "valid": 3, "test": 4}}, "field 'splits' has a split without examples"),
        ({"splits": []}, "field 'splits' is a list, expected an object"),
        ({"sizes": {"../../passwd": 3}}, "field 'sizes' does not name"),
        ({"sizes": {"train.labels.npy": "3"}}, "field 'sizes', 'train.labels.npy' is the text '3'"),
        ({"seed": "x"}, "field 'seed' is the text 'x', expected a whole number or null"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"max_len": True}, "field 'max_len' is True, expected a whole number"),
        ({"extra": 1}, "has a field 'extra', which is not known"),
    ],
)
def test_wrong_meta_data_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    write(tmp_path / "store")
    path = tmp_path / "store" / "meta.json"
    path.write_bytes(seal({**unseal(path.read_bytes(), path), **change}))
    with pytest.raises(ValueError, match=f"meta.json.*{message}.*prepare the data again"):
        open_store(tmp_path / "store")


def test_every_flipped_bit_of_a_store_is_found(tmp_path: Path) -> None:
    write(tmp_path / "store")
    for path in sorted((tmp_path / "store").iterdir()):
        content = path.read_bytes()
        for place in range(0, 8 * len(content), 83 if path.suffix == ".json" else 411):
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            with pytest.raises(ValueError, match=rf"{path.name}.*prepare the data again"):
                open_store(tmp_path / "store", verify=True)
        path.write_bytes(content)
    open_store(tmp_path / "store", verify=True)


def test_a_store_of_an_earlier_version_has_no_checksum_of_its_meta_data(tmp_path: Path) -> None:
    write(tmp_path / "store")
    path = tmp_path / "store" / "meta.json"
    path.write_text(json.dumps(unseal(path.read_bytes(), path)))
    assert open_store(tmp_path / "store", verify=True).meta.task == "text"


def test_tokens_beyond_the_vocabulary_are_found(tmp_path: Path) -> None:
    write(tmp_path / "store", {name: [Example((np.arange(5, dtype=np.uint8),), 0)] for name in SPLITS}, vocab_size=5)
    damaged(tmp_path / "store", "valid.tokens.npy", lambda content: content[:-1] + b"\x05")
    with pytest.raises(ValueError, match=r"valid\.tokens\.npy holds 0 to 5, expected 0 to 4: prepare the data again"):
        open_store(tmp_path / "store")


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}"])
def test_meta_data_of_nothing(tmp_path: Path, content: str) -> None:
    write(tmp_path / "store")
    (tmp_path / "store" / "meta.json").write_text(content)
    with pytest.raises(ValueError, match=r"meta\.json .*prepare the data again"):
        open_store(tmp_path / "store")


def test_meta_data_of_a_terabyte_are_not_read_into_memory(tmp_path: Path) -> None:
    write(tmp_path / "store")
    os.truncate(tmp_path / "store" / "meta.json", 1 << 40)
    with pytest.raises(ValueError, match=r"meta\.json has more than .* bytes.*prepare the data again"):
        open_store(tmp_path / "store")


def test_unknown_places_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "store")
    store = open_store(tmp_path / "store")
    with pytest.raises(ValueError, match="unknown split 'dev'"):
        store.split("dev")
    for index, which in ((7, 0), (-1, 0), (0, 1)):
        with pytest.raises(IndexError):
            store.split("train").sequence(index, which)
