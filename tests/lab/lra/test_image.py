"""Image: CIFAR-10 as pickles, as binary files and as arrays; pickles run nothing; bad files."""

import io
import lzma
import os
import pickle
import struct
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from studies.soak_files import fuzzed_batches
from studies.soak_inputs import python_2_pickle

from skeinformer.lab.lra.image import decode_pickle, gray, read_image, shrink
from skeinformer.lab.lra.store import Example
from tests.lab.lra.sources import shared

Batches = dict[str, tuple[NDArray[np.uint8], list[int]]]  # colours (N, 3072), labels
SIZE = 20


def batches() -> Batches:
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    return {name: (rng.integers(0, 256, (SIZE, 3072), np.uint8), [i % 10 for i in range(SIZE)]) for name in names}


def write_pickles(folder: Path, found: Batches) -> Path:
    folder.mkdir()
    for name, (data, labels) in found.items():
        (folder / name).write_bytes(python_2_pickle(data, labels))
    (folder / "batches.meta").write_bytes(b"not to be read")
    return folder


def write_binary(folder: Path, found: Batches) -> Path:
    folder.mkdir()
    for name, (data, labels) in found.items():
        rows = np.concatenate([np.array(labels, np.uint8)[:, None], data], 1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return folder


def write_arrays(folder: Path, found: Batches, xz: bool) -> Path:
    folder.mkdir()
    split = {"train": [name for name in found if name != "test_batch"], "test": ["test_batch"]}
    labels = {
        part: np.array([label for name in names for label in found[name][1]], np.uint8) for part, names in split.items()
    }
    np.savez(folder / "labels.npz", **labels)  # type: ignore[arg-type]
    for part, names in split.items():
        pixels = gray(np.concatenate([found[name][0] for name in names]).reshape(-1, 3, 1024)).reshape(-1, 32, 32)
        content = io.BytesIO()
        np.save(content, pixels)
        if xz:
            (folder / f"gray_{part}_x.npy.xz").write_bytes(lzma.compress(content.getvalue()))
        else:
            (folder / f"gray_{part}_x.npy").write_bytes(content.getvalue())
    return folder


def contents(splits: Mapping[str, Iterator[Example]]) -> dict[str, list[tuple[bytes, int]]]:
    return {name: [(e.sequences[0].tobytes(), e.label) for e in examples] for name, examples in splits.items()}


def read(source: Path, valid: int = 20, seed: int = 0) -> dict[str, list[tuple[bytes, int]]]:
    return contents(read_image(source, valid=valid, seed=seed))


def test_all_forms_hold_the_same(tmp_path: Path) -> None:
    found = batches()
    sources = [
        write_pickles(tmp_path / "cifar-10-batches-py", found),
        write_binary(tmp_path / "cifar-10-batches-bin", found),
        write_arrays(tmp_path / "npy", found, xz=False),
        write_arrays(tmp_path / "xz", found, xz=True),
    ]
    for name in ("cifar-10-batches-py", "cifar-10-batches-bin"):
        with tarfile.open(tmp_path / f"{name}.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / name, name)
        sources.append(tmp_path / f"{name}.tar.gz")
    first, *rest = (read(source) for source in sources)
    assert all(other == first for other in rest)
    assert {name: len(rows) for name, rows in first.items()} == {"train": 80, "valid": 20, "test": 20}
    assert Counter(label for _, label in first["valid"]) == dict.fromkeys(range(10), 2)
    assert {len(pixels) for rows in first.values() for pixels, _ in rows} == {1024}
    data, labels = found["test_batch"]
    assert first["test"] == [
        (gray(row.reshape(1, 3, 1024)).tobytes(), label) for row, label in zip(data, labels, strict=True)
    ]


def test_gray() -> None:
    colours = np.array([[0, 0, 0], [255, 255, 255], [255, 0, 0], [0, 255, 0], [0, 0, 255], [10, 20, 30]], np.uint8)
    found = gray(colours[:, :, None]).ravel().tolist()
    assert found == [0, 255, 76, 149, 29, 18]  # 0.2989 R + 0.587 G + 0.114 B, times 255.5 / 255, cut
    every = np.repeat(np.arange(256, dtype=np.uint8)[:, None, None], 3, 1)
    assert np.abs(gray(every).ravel().astype(int) - np.arange(256)).max() <= 1


def test_a_pixel_of_a_smaller_image_is_the_mean_of_a_square() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 1024)).astype(np.uint8)
    np.testing.assert_array_equal(shrink(pixels, 32), pixels)
    for side in (1, 8, 16):
        width = 32 // side
        means = pixels.reshape(3, 32, 32).astype(float)[:, :width, -width:].mean((1, 2))  # of the upper right corner
        np.testing.assert_array_equal(shrink(pixels, side)[:, side - 1], np.floor(means + 0.5))
    assert shrink(np.full((1, 1024), 255, np.uint8), 16).tolist() == [[255] * 256]


def test_smaller_images_keep_order_and_labels(tmp_path: Path) -> None:
    source = write_binary(tmp_path / "bin", batches())
    whole = list(read_image(source, valid=20, seed=0)["test"])
    small = list(read_image(source, valid=20, seed=0, side=16)["test"])
    assert [example.label for example in small] == [example.label for example in whole]
    for one, other in zip(small, whole, strict=True):
        np.testing.assert_array_equal(one.sequences[0], shrink(other.sequences[0][None], 16)[0])
    with pytest.raises(ValueError, match="side is 12, expected a divisor of 32: 1, 2, 4, 8, 16 or 32"):
        read_image(source, valid=20, seed=0, side=12)


def test_an_image_that_is_there_twice_is_never_held_out(tmp_path: Path) -> None:
    found = batches()
    data, _ = found["data_batch_1"]
    for number in range(2, 6):
        found[f"data_batch_{number}"][0][:10] = data[:10]
    source = write_binary(tmp_path / "bin", found)
    for seed in range(3):
        splits = read(source, valid=40, seed=seed)
        assert not {pixels for pixels, _ in splits["valid"]} & {pixels for pixels, _ in splits["train"]}


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("asked", ["posix.mkdir", "builtins.eval", "numpy.load", "builtins.getattr"])
def test_a_pickle_that_wants_to_run_code_runs_nothing(tmp_path: Path, asked: str) -> None:
    source = write_pickles(tmp_path / "py", batches())
    module, name = asked.split(".")
    evil = f"c{module}\n{name}\n(X".encode() + struct.pack("<i", 1) + b"1tR."
    if asked == "posix.mkdir":
        evil = pickle.dumps(Evil(tmp_path / "ran"), protocol=2)
    (source / "data_batch_3").write_bytes(evil)
    with pytest.raises(
        ValueError, match=rf"py, data_batch_3: no batch of CIFAR-10: it asks for {asked}.*nothing was run"
    ):
        read(source)
    assert not (tmp_path / "ran").exists()


def damaged(found: Batches, form: str, folder: Path, content: bytes) -> Path:
    source = write_pickles(folder, found) if form == "py" else write_binary(folder, found)
    (source / ("data_batch_2" if form == "py" else "data_batch_2.bin")).write_bytes(content)
    return source


def a_pickle(**changes: Any) -> bytes:
    data, labels = batches()["data_batch_2"]
    batch = {b"data": data, b"labels": labels, **{name.encode(): value for name, value in changes.items()}}
    return pickle.dumps(batch, protocol=3)


@pytest.mark.parametrize(
    ("form", "content", "message"),
    [
        ("py", a_pickle()[:-500], "data_batch_2: no batch of CIFAR-10"),
        ("py", b"", "data_batch_2: no batch of CIFAR-10"),
        ("py", a_pickle(data=np.zeros((SIZE, 1024), np.uint8)), "data_batch_2: expected an array 'data' of uint8"),
        (
            "py",
            a_pickle(data=np.zeros((SIZE, 3072))),
            "data_batch_2: .* numpy's array of unsigned bytes; nothing",
        ),
        ("py", a_pickle(data=[1, 2]), "data_batch_2: expected an array 'data' of uint8"),
        ("py", a_pickle(data=np.zeros((0, 3072), np.uint8)), "data_batch_2: expected an array 'data' of uint8"),
        ("py", pickle.dumps([1, 2], protocol=3), "data_batch_2: no batch of CIFAR-10: it is not a dictionary"),
        ("py", a_pickle(labels=[3] * (SIZE - 1)), "data_batch_2: expected 20 labels"),
        ("py", a_pickle(labels=None), "data_batch_2: expected 20 labels"),
        ("py", a_pickle(labels=[*[3] * (SIZE - 1), 10]), "data_batch_2, row 19: the label is 10, expected 0 to 9"),
        ("py", a_pickle(labels=[-1, *[3] * (SIZE - 1)]), "data_batch_2, row 0: the label is -1"),
        ("py", a_pickle(labels=["x"] * SIZE), "data_batch_2: expected 20 labels"),
        ("bin", bytes(3073 * 3 - 1), r"data_batch_2\.bin: 9,218 bytes, expected a multiple of 3,073"),
        ("bin", b"", r"data_batch_2\.bin: 0 bytes"),
        ("bin", bytes(3073) + b"\x0a" + bytes(3072), r"data_batch_2\.bin, row 1: the label is 10"),
    ],
)
def test_a_bad_batch_is_named(tmp_path: Path, form: str, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(damaged(batches(), form, tmp_path / "set", content))


def test_missing_and_doubled_batches_are_named(tmp_path: Path) -> None:
    write_pickles(tmp_path / "set", batches())
    write_binary(tmp_path / "set" / "bin", batches())
    with pytest.raises(ValueError, match=r"the batch is there twice"):
        read(tmp_path / "set")
    (tmp_path / "set" / "bin" / "data_batch_4.bin").unlink()
    with pytest.raises(ValueError, match=r"bin holds no data_batch_4"):
        read(tmp_path / "set" / "bin")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read(tmp_path / "nowhere")


def test_bad_arrays_are_named(tmp_path: Path) -> None:
    source = write_arrays(tmp_path / "xz", batches(), xz=True)
    path = source / "gray_test_x.npy.xz"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(ValueError, match=r"gray_test_x\.npy\.xz is damaged"):
        read(source)
    path.unlink()
    plain = source / "gray_test_x.npy"
    with pytest.raises(FileNotFoundError, match=r"gray_test_x\.npy"):
        read(source)
    np.save(plain, np.zeros((20, 32, 32), np.float32))
    with pytest.raises(ValueError, match=r"gray_test_x\.npy holds float32 \(20, 32, 32\), expected uint8"):
        read(source)
    np.save(plain, np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"gray_test_x\.npy cannot be read as an array of numbers"):
        read(source)
    np.save(plain, np.zeros((19, 32, 32), np.uint8))
    with pytest.raises(ValueError, match=r"labels\.npz, test: expected 19 labels"):
        read(source)
    np.savez(source / "labels.npz", train=np.zeros(100, np.uint8))
    with pytest.raises(ValueError, match=r"labels\.npz has no array called test"):
        read(source)
    (source / "labels.npz").write_bytes((source / "labels.npz").read_bytes()[:-30])
    with pytest.raises(ValueError, match=r"labels\.npz cannot be read"):
        read(source)


NDARRAY = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"


def state_of_dtype(code: bytes, state: tuple[Any, ...], content: bytes = b"U\x08" + bytes(8)) -> bytes:
    """A batch with an array of eight items whose dtype has this state; its content is 8 bytes, or another pickle."""
    asked = b"cnumpy\ndtype\nU" + bytes([len(code)]) + code + b"K\x00K\x01\x87R"
    array = NDARRAY + b"(K\x01K\x08\x85" + asked + pickle.dumps(state, protocol=2)[2:-1] + b"b\x89" + content
    return b"\x80\x02}U\x04data" + array + b"tbs."


@pytest.mark.parametrize(
    "content",
    [
        # a field that lies outside of its item: numpy's own array of it ended the process by SIGSEGV
        state_of_dtype(b"V8", (3, "|", None, ("a",), {"a": (np.dtype("O"), 1 << 30)}, 8, 1, 27), b"](NNNNNNNNe"),
        state_of_dtype(b"u1", (3, "|", None, ("a",), {"a": ("u1", 1 << 30)}, 1, 1, 0)),
        state_of_dtype(b"u1", (3, ">", None, None, None, -1, -1, 0)),
        state_of_dtype(b"u1", (3, "|", None, None, None, 1 << 30, -1, 0)),
        state_of_dtype(b"O8", (3, "|", None, None, None, -1, -1, 63)),
        b"\x80\x02}(U\x04data" + NDARRAY + b"u.",  # an array without content
        b"\x80\x02}" + b")" + b"\x85" * 200_000 + b"Ns.",  # a key in which tuples are nested deeply
        b"\x80\x02N" + b"r" + struct.pack("<I", 2**32 - 1) + b".",  # a memo of 34 GB
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",  # a bytearray of a terabyte
        b"\x80\x02]" + b"]a" * 100_000 + b".",
        b"\x80\x02(((((.",
        b"\x80\x02}K\x01K\x02s.",
        b"\x80\x02cnumpy\ndtype\n(Nt\x81.",
    ],
)
def test_a_hostile_batch_is_refused_and_nothing_crashes(content: bytes) -> None:
    with pytest.raises(ValueError, match="batch: no batch of CIFAR-10"):
        decode_pickle(content, "batch")


@pytest.mark.parametrize("protocol", [3, 4])
def test_a_batch_that_numpy_pickled_is_read(protocol: int) -> None:
    data, labels = batches()["data_batch_1"]
    found = decode_pickle(
        pickle.dumps({"data": data, b"labels": labels, "more": [None, {"x": True}]}, protocol), "batch"
    )
    np.testing.assert_array_equal(found.pixels, gray(data.reshape(-1, 3, 1024)))
    assert found.labels.tolist() == labels


def test_a_thousand_mutated_batches_are_read_or_refused(tmp_path: Path) -> None:
    """`python -m studies.soak --parts batches` reads 100,000."""
    outcome = fuzzed_batches(1000, seed=0, folder=tmp_path, on_case=lambda tried, failed: None)
    assert outcome == (1000, 0, ())


def test_arrays_that_claim_more_than_they_have_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_arrays(tmp_path / "npy", batches(), xz=False)
    path = source / "gray_test_x.npy"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(20, 32, 32)", b"(2000000, 32, 32)  "[:12]))
    with pytest.raises(ValueError, match=r"gray_test_x\.npy cannot be read as an array of numbers"):
        read(source)
    path.unlink()
    monkeypatch.setattr("skeinformer.lab.lra.image.MOST", 200_000)
    (source / "gray_test_x.npy.xz").write_bytes(lzma.compress(bytes(200_001)))
    with pytest.raises(ValueError, match=r"gray_test_x\.npy\.xz has more than 200,000 bytes"):
        read(source)
    (source / "gray_test_x.npy.xz").unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"gray_test_x\.npy is a link"):
        read(source)


@pytest.mark.slow
def test_the_real_images() -> None:
    splits = read_image(shared("cifar10/labels.npz").parent, valid=5000, seed=0)
    counts = {name: Counter(example.label for example in examples) for name, examples in splits.items()}
    assert counts == {
        "train": dict.fromkeys(range(10), 4500),
        "valid": dict.fromkeys(range(10), 500),
        "test": dict.fromkeys(range(10), 1000),
    }
