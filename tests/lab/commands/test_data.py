"""`skein data`: every task becomes a store, bad files are one line and exit code 2, and nothing is half-written."""

import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from skeinformer.lab import cli
from skeinformer.lab.lra import listops, retrieval
from skeinformer.lab.lra.store import SPLITS, open_store

ROOT = Path(__file__).parents[3]
SMALL = ["--train", "30", "--valid", "5", "--test", "6", "--min-len", "16", "--max-len", "64"]
ONE = ["--workers", "1"]


def data(*arguments: object) -> int:
    return cli.main(["data", *map(str, arguments)])


def failure(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> str:
    """The one line that a failing command prints; it leaves the folder as it was."""
    before = sorted(folder.rglob("*"))
    capsys.readouterr()
    assert data(*arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert sorted(folder.rglob("*")) == before
    return line


def reviews(path: Path) -> Path:
    rows = [
        (split, label, f"{split} {label} {number}")
        for split in ("train", "test")
        for label in (0, 1)
        for number in range(20)
    ]
    columns = dict(zip(("split", "label", "text"), map(list, zip(*rows, strict=True)), strict=True))
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def test_listops_is_generated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert data("listops", "--out", tmp_path / "a", *SMALL, *ONE, "--seed", 7) == 0
    shown = capsys.readouterr().out
    assert "train: 30 of 30" in shown
    assert shown.splitlines()[-1] == str(tmp_path / "a")
    meta = open_store(tmp_path / "a", verify=True).meta
    assert (meta.task, meta.source, meta.seed, meta.max_len) == ("listops", "generator", 7, 64)
    assert (meta.vocab_size, meta.num_classes, meta.sequences) == (15, 10, 1)
    assert meta.options == {"min_len": 16, "max_depth": 10, "max_args": 10}
    assert meta.splits == {"train": 30, "valid": 5, "test": 6}
    store = open_store(tmp_path / "a")
    every = [store.split(name).sequence(i).tobytes() for name in SPLITS for i in range(meta.splits[name])]
    assert len(set(every)) == 41
    assert data("listops", "--out", tmp_path / "b", *SMALL, "--workers", 2, "--seed", 7) == 0
    assert open_store(tmp_path / "b").meta.checksums == meta.checksums


def test_listops_from_official_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "listops-1000"
    source.mkdir()
    for digit, name in enumerate(listops.OFFICIAL.values()):
        (source / name).write_text(f"Source\tTarget\n( ( ( [MAX 2 ) {digit} ) ] )\t{max(2, digit)}\n")
    assert data("listops", "--source", source, "--out", tmp_path / "a") == 0
    store = open_store(tmp_path / "a", verify=True)
    assert (store.meta.source, store.meta.seed, store.meta.max_len) == ("listops-1000", None, 2000)
    assert store.split("train").sequence(0).tolist() == [11, 2, 2, 14]
    line = failure(capsys, tmp_path, "listops", "--source", source, "--out", tmp_path / "b", "--max-depth", 5)
    assert line == "skein: --max-depth is for the generator; with --source, files are taken as they are"
    (source / "basic_train.tsv").write_text("Source\tTarget\n1\t1\n[MAX 1\t1\n")
    line = failure(capsys, tmp_path, "listops", "--source", source, "--out", tmp_path / "b")
    assert line == "skein: basic_train.tsv, line 3: 1 of its operators are not closed by ]"


def test_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = reviews(tmp_path / "imdb.parquet")
    assert data("text", "--source", source, "--out", tmp_path / "a", "--valid", 8, "--max-len", 9, "--seed", 3) == 0
    assert "reading imdb.parquet" in capsys.readouterr().out
    store = open_store(tmp_path / "a", verify=True)
    assert (store.meta.task, store.meta.source, store.meta.vocab_size) == ("text", "imdb.parquet", 256)
    assert (store.meta.seed, store.meta.options, store.meta.max_len) == (3, {"valid": 8}, 9)
    assert store.meta.splits == {"train": 32, "valid": 8, "test": 40}
    assert store.split("test").sequence(39).tobytes() == b"test 1 19"
    line = failure(capsys, tmp_path, "text", "--source", source, "--out", tmp_path / "b")
    assert line == "skein: 2,500 validation examples cannot be held out of 40; ask for fewer with --valid"


def test_retrieval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in retrieval.OFFICIAL.values():
        (tmp_path / name).write_text("1\ta\tb\tfirst\tsecond\n0\tb\ta\tsecond\tfirst\n")
    assert data("retrieval", "--source", tmp_path, "--out", tmp_path / "a") == 0
    store = open_store(tmp_path / "a", verify=True)
    assert (store.meta.source, store.meta.sequences, store.meta.splits["valid"]) == ("new_aan_pairs", 2, 2)
    assert store.split("test").sequence(0, 1).tobytes() == b"second"
    papers, pairs = tmp_path / "papers.parquet", tmp_path / "pairs.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"pid": [1, 2], "text": ["one", "two"]}), papers)
    table = {"split": ["train", "val", "test", "test"], "a": [1, 1, 1, 1], "b": [2, 2, 2, 2], "label": [0, 1, 0, 1]}
    pyarrow.parquet.write_table(pyarrow.table({**table, "strict": [True, True, True, False]}), pairs)
    for option, count in ((), 1), (("--no-strict",), 2):
        out = tmp_path / f"{count}"
        assert data("retrieval", "--papers", papers, "--pairs", pairs, "--out", out, *option) == 0
        meta = open_store(out).meta
        assert (meta.source, meta.splits["test"]) == ("pairs.parquet", count)
        assert meta.options == {"papers": "papers.parquet", "strict": not option}
    for wrong in ([], ["--papers", papers], ["--source", tmp_path, "--pairs", pairs]):
        line = failure(capsys, tmp_path, "retrieval", "--out", tmp_path / "b", *wrong)
        assert line == "skein: give either --source, or --papers and --pairs"
    line = failure(capsys, tmp_path, "retrieval", "--out", tmp_path / "b", "--source", tmp_path, "--no-strict")
    assert "--no-strict is for --pairs" in line


def test_image(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "cifar"
    source.mkdir()
    rng = np.random.default_rng(0)
    for split, count in (("train", 40), ("test", 20)):
        np.save(source / f"gray_{split}_x.npy", rng.integers(0, 256, (count, 32, 32), np.uint8))
    np.savez(source / "labels.npz", train=np.arange(40) % 10, test=np.arange(20) % 10)
    assert data("image", "--source", source, "--out", tmp_path / "a", "--valid", 10) == 0
    store = open_store(tmp_path / "a", verify=True)
    assert (store.meta.task, store.meta.source, store.meta.max_len) == ("image", "cifar", 1024)
    assert store.meta.splits == {"train": 30, "valid": 10, "test": 20}
    np.testing.assert_array_equal(store.split("test").sequence(3), np.load(source / "gray_test_x.npy")[3].ravel())
    assert data("image", "--source", source, "--out", tmp_path / "small", "--valid", 10, "--side", 16) == 0
    small = open_store(tmp_path / "small", verify=True)
    assert (small.meta.max_len, small.meta.options["side"]) == (256, 16)
    assert len(small.split("train").sequence(0)) == 256
    np.savez(source / "labels.npz", train=np.arange(40) % 11, test=np.arange(20) % 10)
    line = failure(capsys, tmp_path, "image", "--source", source, "--out", tmp_path / "b", "--valid", 10)
    assert line.endswith("labels.npz, train, row 10: the label is 10, expected 0 to 9")


def test_pathfinder_is_generated(tmp_path: Path) -> None:
    sizes = ["--train", 12, "--valid", 4, "--test", 6, "--image-size", 16, "--paddles", 3, "--distractors", 0]
    assert data("pathfinder", "--out", tmp_path / "a", *sizes, *ONE, "--seed", 4) == 0
    store = open_store(tmp_path / "a", verify=True)
    assert (store.meta.task, store.meta.source, store.meta.seed) == ("pathfinder", "generator", 4)
    assert (store.meta.vocab_size, store.meta.num_classes, store.meta.max_len) == (256, 2, 256)
    assert store.meta.options["paddles"] == 3
    for name, count in (("train", 12), ("valid", 4), ("test", 6)):
        split = store.split(name)
        assert (len(split), split.labels.sum()) == (count, count // 2)
        assert set(split.lengths.ravel().tolist()) == {256}


def test_pathfinder_from_official_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pillow = pytest.importorskip("PIL.Image")
    source = tmp_path / "pathfinder32"
    root = source / "curv_contour_length_14"
    (root / "metadata").mkdir(parents=True)
    (root / "imgs" / "0").mkdir(parents=True)
    for number in range(20):
        pillow.fromarray(np.full((32, 32), number, np.uint8)).save(root / "imgs" / "0" / f"sample_{number}.png")
    lines = [f"imgs/0 sample_{number}.png {number} {number % 2} 1.0\n" for number in range(20)]
    (root / "metadata" / "0.npy").write_text("".join(lines))
    assert data("pathfinder", "--source", source, "--out", tmp_path / "a", "--seed", 1) == 0
    assert "train: 16 of 16" in capsys.readouterr().out
    store = open_store(tmp_path / "a", verify=True)
    assert (store.meta.source, store.meta.seed, store.meta.max_len) == ("pathfinder32", 1, 1024)
    assert store.meta.splits == {"train": 16, "valid": 2, "test": 2}
    found = {int(store.split(name).sequence(index)[0]) for name in SPLITS for index in range(store.meta.splits[name])}
    assert found == set(range(20))
    line = failure(capsys, tmp_path, "pathfinder", "--source", source, "--out", tmp_path / "b", "--paddles", 6)
    assert "--paddles is for the generator" in line
    (root / "metadata" / "0.npy").write_text("".join([*lines[:3], "imgs/0 sample_3.png 3 2 1.0\n"]))
    line = failure(capsys, tmp_path, "pathfinder", "--source", source, "--out", tmp_path / "b")
    assert "line 4 has label '2', expected 0 or 1" in line


def test_a_store_is_replaced_only_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["listops", "--out", tmp_path / "a", *SMALL, *ONE]
    assert data(*command) == 0
    first = open_store(tmp_path / "a").meta
    assert "already holds a store" in failure(capsys, tmp_path, *command)
    assert data(*command, "--overwrite", "--seed", 1) == 0
    assert open_store(tmp_path / "a", verify=True).meta.checksums != first.checksums


def test_bad_archives_leave_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "review.txt").write_text("good " * 1000)
    archive = tmp_path / "aclImdb_v1.tar.gz"
    command = ["text", "--source", archive, "--out", tmp_path / "a"]
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "review.txt", "aclImdb/train/pos/0_9.txt")
        tar.add(tmp_path / "review.txt", "aclImdb/../../train/pos/1_9.txt")
    assert "member aclImdb/../../train/pos/1_9.txt: its path leaves" in failure(capsys, tmp_path, *command)
    with tarfile.open(archive, "w:gz") as tar:
        link = tarfile.TarInfo("aclImdb/train/pos/1_9.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    assert "member aclImdb/train/pos/1_9.txt: it is a link" in failure(capsys, tmp_path, *command)
    archive.write_bytes(archive.read_bytes()[:-20])
    assert "aclImdb_v1.tar.gz is damaged" in failure(capsys, tmp_path, *command)
    archive.unlink()
    assert failure(capsys, tmp_path, *command) == f"skein: there is no {archive}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["listops", "--train", "0"], "train must be at least 1, got 0"),
        (["listops", "--max-len", "100"], "max_len must be at least 500, got 100"),
        (["listops", "--workers", "0"], "workers must be at least 1, got 0"),
        (["listops", "--seed", "-1"], "seed must be at least 0, got -1"),
        (["text", "--source", "nowhere"], "there is no nowhere"),
        (["image", "--source", "nowhere"], "there is no nowhere"),
        (["retrieval", "--source", "nowhere"], "there is no nowhere"),
        (["listops", "--source", "nowhere"], "there is no nowhere"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(value),
)
def test_wrong_options_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert failure(capsys, tmp_path, *arguments, "--out", tmp_path / "a") == f"skein: {message}"


def test_an_interrupt_ends_all_processes_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "skeinformer", "data", "listops", "--out", str(tmp_path / "a"), "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command,
        stdout=pipe,
        stderr=pipe,
        env=environment,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test in the background may ignore it
    ) as run:
        assert run.stdout is not None
        assert run.stdout.readline().startswith("train: ")
        os.killpg(run.pid, signal.SIGINT)  # as the terminal does
        _, errors = run.communicate()  # ends when the last process that holds the pipes is gone
    assert (run.returncode, errors) == (130, "skein: interrupted\n")
    assert list(tmp_path.iterdir()) == []
