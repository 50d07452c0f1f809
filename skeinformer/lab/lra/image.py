"""Image: CIFAR-10 (Krizhevsky 2009) in gray, 32 x 32 pixels row by row, as 256 gray levels."""

import io
import lzma
import math
import re
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skeinformer.checks import check_count
from skeinformer.lab.files import open_plain, read_at_most
from skeinformer.lab.lra.archives import MOST, damage_named, members
from skeinformer.lab.lra.batch_pickle import read_batch
from skeinformer.lab.lra.holdout import hold_out
from skeinformer.lab.lra.store import Example

SIDE = 32
PIXELS = SIDE * SIDE
VOCAB_SIZE = 256
NUM_CLASSES = 10
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
BATCH = re.compile(r"(data_batch_[1-5]|test_batch)(\.bin)?")
WEIGHTS = np.array([0.2989, 0.587, 0.114], np.float32)  # of red, green and blue


class Images(NamedTuple):
    pixels: NDArray[np.uint8]  # (N, 1024), gray; fewer where they were shrunk
    labels: NDArray[np.uint8]  # (N,)


def read_image(source: Path, *, valid: int, seed: int, side: int = SIDE) -> dict[str, Iterator[Example]]:
    """The splits of `source`, with `valid` images held out of the training set, equally many of each class.

    `source` is the folder cifar-10-batches-py or cifar-10-batches-bin, the tar.gz of one, or a folder with
    gray_train_x.npy, gray_test_x.npy (or .npy.xz; uint8, N x 32 x 32) and labels.npz (train, test). An image that the
    training set has twice is never held out. `side` is the width and height of the images: a pixel is the mean of a
    square of the original's.
    """
    check_side(side)
    read = _read_arrays(source) if (source / "labels.npz").exists() else _read_batches(source)
    train, test = (Images(shrink(images.pixels, side), images.labels) for images in read)
    held_out = hold_out([row.tobytes() for row in train.pixels], train.labels.tolist(), valid, seed)
    splits = {
        "train": Images(train.pixels[~held_out], train.labels[~held_out]),
        "valid": Images(train.pixels[held_out], train.labels[held_out]),
        "test": test,
    }
    return {name: _examples(images) for name, images in splits.items()}


def gray(colours: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """0.2989 R + 0.587 G + 0.114 B of (N, 3, pixels), rounded as TensorFlow's rgb_to_grayscale does."""
    share: NDArray[np.float32] = (colours.astype(np.float32) / 255 * WEIGHTS[:, None]).sum(1)  # (N, pixels)
    return (share * 255.5).astype(np.uint8)


def shrink(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Images of (N, 1024) as (N, side^2): the mean of each square of pixels, rounded, a half up."""
    width = SIDE // side
    squares = pixels.reshape(-1, side, width, side, width)
    total: NDArray[np.uint32] = squares.sum((2, 4), dtype=np.uint32)  # (N, side, side)
    mean = (2 * total + width**2) // (2 * width**2)
    return mean.astype(np.uint8).reshape(-1, side**2)


def check_side(side: int) -> None:
    """A ValueError where 32 pixels cannot be cut into `side` equal parts."""
    check_count("side", side)
    if SIDE % side:
        raise ValueError(f"side is {side}, expected a divisor of {SIDE}: 1, 2, 4, 8, 16 or 32")


def _examples(images: Images) -> Iterator[Example]:
    for pixels, label in zip(images.pixels, images.labels.tolist(), strict=True):
        yield Example((pixels,), label)


def _read_batches(source: Path) -> tuple[Images, Images]:
    batches: dict[str, Images] = {}
    for name, content in members(source, lambda name: BATCH.fullmatch(PurePosixPath(name).name) is not None):
        batch = PurePosixPath(name).name
        place = f"{source}, {name}"
        if batch.removesuffix(".bin") in batches:
            raise ValueError(f"{place}: the batch is there twice; name the folder that holds it once")
        decode = _from_binary if batch.endswith(".bin") else decode_pickle
        batches[batch.removesuffix(".bin")] = decode(content, place)
    for name in (*TRAIN, *TEST):
        if name not in batches:
            raise ValueError(f"{source} holds no {name}; expected CIFAR-10's batches, or labels.npz beside npy files")
    return _joined([batches[name] for name in TRAIN]), _joined([batches[name] for name in TEST])


def _joined(parts: list[Images]) -> Images:
    return Images(np.concatenate([part.pixels for part in parts]), np.concatenate([part.labels for part in parts]))


def _from_binary(content: bytes, place: str) -> Images:
    """A label and 3 x 1024 colours for each image, one byte each."""
    record = 1 + 3 * PIXELS
    if not content or len(content) % record:
        raise ValueError(f"{place}: {len(content):,} bytes, expected a multiple of {record:,}; the file was cut off")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return Images(gray(rows[:, 1:].reshape(-1, 3, PIXELS)), _checked_labels(rows[:, 0], len(rows), place))


def decode_pickle(content: bytes, place: str) -> Images:
    """A dictionary with the array `data`, uint8 (N, 3072), and the list `labels`."""
    try:
        batch = read_batch(content)
    except Exception as error:  # what pickletools says of damage has many forms
        raise ValueError(f"{place}: no batch of CIFAR-10: {str(error) or type(error).__name__}") from error
    data = batch.get(b"data")
    if not isinstance(data, np.ndarray) or data.ndim != 2 or data.shape[1] != 3 * PIXELS or not len(data):
        raise ValueError(f"{place}: expected an array 'data' of uint8 with {3 * PIXELS} columns")
    return Images(gray(data.reshape(-1, 3, PIXELS)), _checked_labels(batch.get(b"labels"), len(data), place))


def _read_arrays(source: Path) -> tuple[Images, Images]:
    path = source / "labels.npz"
    found = []
    for split in ("train", "test"):
        labels = _load(path, split)
        compressed = source / f"gray_{split}_x.npy.xz"
        pixels_path = compressed if compressed.exists() else source / f"gray_{split}_x.npy"
        pixels = _load(pixels_path)
        if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[1:] != (SIDE, SIDE):
            raise ValueError(f"{pixels_path} holds {pixels.dtype} {pixels.shape}, expected uint8 (N, {SIDE}, {SIDE})")
        found.append(Images(pixels.reshape(-1, PIXELS), _checked_labels(labels, len(pixels), f"{path}, {split}")))
    return found[0], found[1]


def _load(path: Path, key: str | None = None) -> NDArray[Any]:
    """The whole numbers of an npy or npy.xz file, or of the array called `key` of an npz file."""
    with open_plain(path) as file, damage_named(path):
        if key is not None:
            return _array(_zipped(file, path, key), path)
        return _array(read_at_most(lzma.open(file) if path.suffix == ".xz" else file, MOST, path), path)


def _zipped(file: BinaryIO, path: Path, key: str) -> bytes:
    try:
        with zipfile.ZipFile(file) as packed, packed.open(f"{key}.npy") as array:
            return read_at_most(array, MOST, path)
    except KeyError:
        raise ValueError(f"{path} has no array called {key}") from None
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OverflowError, struct.error) as error:
        raise ValueError(f"{path} cannot be read as an array of numbers: {error}") from error


def _array(content: bytes, path: Path) -> NDArray[Any]:
    """The array of an npy file. Its header is checked against the bytes that follow before there is an array."""
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, by_columns, dtype = read(stream)
    except Exception as error:  # the header is a Python literal, which can be wrong in any way
        raise ValueError(
            f"{path} cannot be read as an array of numbers: {str(error) or type(error).__name__}"
        ) from error
    if dtype.names is not None or dtype.subdtype is not None or dtype.kind not in "iuf":
        raise ValueError(f"{path} cannot be read as an array of numbers: it holds {str(dtype)[:40]}")
    if math.prod(shape) * dtype.itemsize != len(content) - stream.tell() or min(shape, default=0) < 0:
        raise ValueError(f"{path} cannot be read as an array of numbers: {shape} is not the size of what follows")
    flat = np.frombuffer(content, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if by_columns else "C")


def _checked_labels(labels: Any, count: int, place: str) -> NDArray[np.uint8]:
    """The labels as an array, if there are `count` and all are classes."""
    if isinstance(labels, list) and all(type(label) is int and -(2**31) <= label < 2**31 for label in labels):
        labels = np.array(labels, np.int64)
    found = labels if isinstance(labels, np.ndarray) else np.empty(0)
    if found.shape != (count,) or found.dtype.kind not in "iu":
        raise ValueError(f"{place}: expected {count:,} labels, whole numbers in one row")
    wrong = np.flatnonzero((found < 0) | (found >= NUM_CLASSES))
    if len(wrong):
        raise ValueError(f"{place}, row {wrong[0]}: the label is {found[wrong[0]]}, expected 0 to {NUM_CLASSES - 1}")
    return found.astype(np.uint8)
