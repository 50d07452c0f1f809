"""Image: CIFAR-10 (Krizhevsky 2009) in gray, 32 x 32 pixels row by row, as 256 gray levels."""

import io
import lzma
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lra.data.archives import members
from lra.data.holdout import hold_out
from lra.data.store import Example
from skeinformer.checks import check_count

SIDE = 32
PIXELS = SIDE * SIDE
VOCAB_SIZE = 256
NUM_CLASSES = 10
TRAIN = tuple(f"data_batch_{number}" for number in range(1, 6))
TEST = ("test_batch",)
BATCH = re.compile(r"(data_batch_[1-5]|test_batch)\.bin")
WEIGHTS = np.array([0.2989, 0.587, 0.114], np.float32)  # of red, green and blue


class Images(NamedTuple):
    pixels: NDArray[np.uint8]  # (N, 1024), gray; fewer where they were shrunk
    labels: NDArray[np.uint8]  # (N,)


def read_image(source: Path, *, valid: int, seed: int, side: int = SIDE) -> dict[str, Iterator[Example]]:
    """Read the splits of `source`, with `valid` images held out of the training set, equally many of each class.

    `source` is cifar-10-binary.tar.gz, its folder cifar-10-batches-bin, or a folder with
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
    """Return 0.2989 R + 0.587 G + 0.114 B of (N, 3, pixels), rounded as TensorFlow's rgb_to_grayscale does."""
    share: NDArray[np.float32] = (colours.astype(np.float32) / 255 * WEIGHTS[:, None]).sum(1)  # (N, pixels)
    return (share * 255.5).astype(np.uint8)


def shrink(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Return images of (N, 1024) as (N, side^2): the mean of each square of pixels, rounded, a half up."""
    width = SIDE // side
    squares = pixels.reshape(-1, side, width, side, width)
    total: NDArray[np.uint32] = squares.sum((2, 4), dtype=np.uint32)  # (N, side, side)
    mean = (2 * total + width**2) // (2 * width**2)
    return mean.astype(np.uint8).reshape(-1, side**2)


def check_side(side: int) -> None:
    """Raise a ValueError where 32 pixels cannot be cut into `side` equal parts."""
    check_count("side", side)
    if SIDE % side:
        raise ValueError(f"side is {side}, expected a divisor of {SIDE}: 1, 2, 4, 8, 16 or 32")


def _examples(images: Images) -> Iterator[Example]:
    for pixels, label in zip(images.pixels, images.labels.tolist(), strict=True):
        yield Example((pixels,), label)


def _read_batches(source: Path) -> tuple[Images, Images]:
    batches: dict[str, Images] = {}
    for name, content in members(source, lambda name: BATCH.fullmatch(PurePosixPath(name).name) is not None):
        batches[PurePosixPath(name).stem] = _decode(content, f"{source}, {name}")
    for name in (*TRAIN, *TEST):
        if name not in batches:
            raise ValueError(
                f"{source} holds no {name}.bin; expected cifar-10-binary.tar.gz, its folder, or one with labels.npz"
            )
    return _joined([batches[name] for name in TRAIN]), _joined([batches[name] for name in TEST])


def _joined(parts: list[Images]) -> Images:
    return Images(np.concatenate([part.pixels for part in parts]), np.concatenate([part.labels for part in parts]))


def _decode(content: bytes, place: str) -> Images:
    """Read a label and 3 x 1024 colours for each image, one byte each."""
    record = 1 + 3 * PIXELS
    if not content or len(content) % record:
        raise ValueError(f"{place}: {len(content):,} bytes, expected a multiple of {record:,}; the file was cut off")
    rows = np.frombuffer(content, np.uint8).reshape(-1, record)
    return Images(gray(rows[:, 1:].reshape(-1, 3, PIXELS)), _checked_labels(rows[:, 0], len(rows), place))


def _read_arrays(source: Path) -> tuple[Images, Images]:
    """Read gray_{train,test}_x.npy, perhaps with .xz behind it, and labels.npz; no pickle is ever loaded."""
    parts = []
    for split in ("train", "test"):
        path = source / f"gray_{split}_x.npy"
        packed = path.with_name(f"{path.name}.xz")
        try:
            labels = np.load(source / "labels.npz")[split]
            pixels = np.load(io.BytesIO(lzma.decompress(packed.read_bytes())) if packed.exists() else path)
        except (ValueError, KeyError, EOFError, lzma.LZMAError, zipfile.BadZipFile) as error:
            raise ValueError(f"{path} or labels.npz cannot be read as arrays of numbers: {error}") from error
        if pixels.dtype != np.uint8 or pixels.shape[1:] != (SIDE, SIDE):
            raise ValueError(f"{path} holds {pixels.dtype} {pixels.shape}, expected uint8 (N, {SIDE}, {SIDE})")
        labels = _checked_labels(labels, len(pixels), f"{source / 'labels.npz'}, {split}")
        parts.append(Images(pixels.reshape(-1, PIXELS), labels))
    return parts[0], parts[1]


def _checked_labels(labels: NDArray[Any], count: int, place: str) -> NDArray[np.uint8]:
    """Return the labels if there are `count` of them and all are classes."""
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise ValueError(f"{place}: expected {count:,} labels, whole numbers in one row")
    wrong = np.flatnonzero((labels < 0) | (labels >= NUM_CLASSES))
    if len(wrong):
        raise ValueError(f"{place}, row {wrong[0]}: the label is {labels[wrong[0]]}, expected 0 to {NUM_CLASSES - 1}")
    return labels.astype(np.uint8)
