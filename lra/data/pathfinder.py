"""Pathfinder: do the two disks mark the ends of one dashed curve? A generator, and a reader of the official files.

After Linsley et al. (2018), with the parameters of the Long Range Arena. Two long snakes of paddles grow side by side,
and short ones distract. A disk lies at the start of one long snake, and one at the far end of the same (label 1) or of
the other one (label 0); nothing else depends on the label. docs/pathfinder.md says what may differ from the official
set.
"""

from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lra.data.snakes import Board, PathfinderSettings, Snake, grow_distractors, grow_pair, make_board
from lra.data.store import SPLITS, Example
from lra.data.workers import in_order
from skeinformer.checks import check_count

__all__ = ["Drawing", "ImageEntry", "OfficialSplit", "PathfinderSettings", "draw_image", "generate", "read_official"]

HARD = PathfinderSettings()
BLOCK = 128  # uniform numbers that are drawn at once
OFFICIAL = Path("pathfinder32", "curv_contour_length_14")  # the hard set in the official release
OFFICIAL_SIZE = HARD.image_size
HELD_OUT = 10  # one image of so many is for validation, and one for the test


@dataclass(frozen=True)
class Drawing:
    """An image, and what is in it. Coordinates are (row, column); whole numbers are centres of pixels."""

    image: NDArray[np.uint8]  # (size, size)
    snakes: tuple[NDArray[np.float64], ...]  # the long ones, (paddles, 2 ends, 2 coordinates), from start to far end
    distractors: tuple[NDArray[np.float64], ...]  # likewise
    markers: NDArray[np.int64]  # (2, 2): the disk at a start, the disk at a far end
    label: int


def draw_image(rng: np.random.Generator, label: int, settings: PathfinderSettings = HARD) -> Drawing:
    """Draw a random image with this label, 0 or 1. A ValueError says where the settings leave no room for one."""
    if label not in (0, 1):
        raise ValueError(f"label is {label!r}, expected 0 or 1")
    board = make_board(settings)
    uniform = _uniform(rng)
    pair = grow_pair(board, uniform)
    distractors = grow_distractors(board, pair[0].pixels | pair[1].pixels, uniform)
    begin = pair[int(2 * next(uniform))]
    end = begin if label else pair[begin is pair[0]]
    markers = board.pixels([begin.positions[0] - board.ahead[begin.directions[0]], end.positions[-1]])
    return Drawing(
        image=_render(board, [*pair, *distractors], markers),
        snakes=tuple(_coordinates(board, snake) for snake in pair),
        distractors=tuple(_coordinates(board, snake) for snake in distractors),
        markers=markers,
        label=int(label),
    )


def generate(
    count: int, *, seed: int, workers: int = 1, settings: PathfinderSettings = HARD
) -> Generator[Example, None, None]:
    """Generate `count` examples, half of them with each label; if the count is odd, one label has one more.

    An example depends on the seed, its index and the settings alone: any number of workers gives the same ones, and a
    larger count begins with those of a smaller one. Close the generator to end its processes early.
    """
    check_count("count", count)
    check_count("seed", seed, at_least=0)
    make_board(settings)  # wrong settings are an error now, not at the first example
    return in_order(partial(_examples, seed=seed, settings=settings), count, workers=workers)


def _examples(indices: range, *, seed: int, settings: PathfinderSettings) -> list[Example]:
    examples = []
    for index in indices:
        # of the examples 2 k and 2 k + 1 each label has one; which comes first is drawn for each k
        order = np.random.SeedSequence(seed, spawn_key=(index // 2, 0)).generate_state(1)[0]
        label = (index + int(order)) % 2
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,)))
        examples.append(Example((draw_image(rng, label, settings).image.ravel(),), label))
    return examples


def _uniform(rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.random(BLOCK).tolist()


def _render(board: Board, snakes: list[Snake], markers: NDArray[np.int64]) -> NDArray[np.uint8]:
    canvas = np.zeros((board.side, board.side), np.uint8)
    width = len(board.disk)
    for snake in snakes:
        for position, direction in zip(snake.positions, snake.directions, strict=True):
            row, column = divmod(position, board.side)
            part = canvas[row : row + width, column : column + width]
            np.maximum(part, board.pictures[direction], out=part)
    for row, column in (markers - board.origin).tolist():
        part = canvas[row : row + width, column : column + width]
        np.maximum(part, board.disk, out=part)
    pad = (board.side - board.settings.image_size) // 2
    return canvas[pad:-pad, pad:-pad].copy()


def _coordinates(board: Board, snake: Snake) -> NDArray[np.float64]:
    ends = board.pixels(snake.positions)
    return np.stack([ends - board.paddles[snake.directions], ends], axis=1)


class ImageEntry(NamedTuple):
    """An image of the official set, and the place of the line that names it."""

    file: str  # from the folder that holds the metadata's
    label: int
    where: str


@dataclass(frozen=True)
class OfficialSplit:
    """Examples of the official set. An image is read when the iteration comes to it."""

    folder: Path
    images: tuple[ImageEntry, ...]

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[Example]:
        for image in self.images:
            yield Example((_read_image(self.folder, image).ravel(),), image.label)


def read_official(folder: Path | str, *, seed: int) -> dict[str, Iterable[Example]]:
    """Read the official hard set: 80 % for training, 10 % for validation, 10 % for the test, permuted by the seed.

    `folder` is curv_contour_length_14, with `metadata` and `imgs` in it, or pathfinder32, or the folder that has it.
    All metadata are read and checked at once, images one by one: a wrong one is an error that names its file and line.
    """
    check_count("seed", seed, at_least=0)
    folders = (Path(folder), Path(folder, OFFICIAL.name), Path(folder, OFFICIAL))
    root = next((path for path in folders if (path / "metadata").is_dir()), None)
    if root is None:
        raise FileNotFoundError(f"{folder} holds no {OFFICIAL}/metadata: give the folder {OFFICIAL.parent}")
    images = _read_metadata(root)
    held_out = len(images) // HELD_OUT
    if not held_out:
        raise ValueError(f"{root} lists {len(images)} images; a split needs at least {HELD_OUT}")
    order = np.random.default_rng(seed).permutation(len(images))
    parts = np.split(order, [len(images) - 2 * held_out, len(images) - held_out])
    return {
        name: OfficialSplit(root, tuple(images[index] for index in part))
        for name, part in zip(SPLITS, parts, strict=True)
    }


def _read_metadata(root: Path) -> list[ImageEntry]:
    """Read the images of metadata/*.npy, which are text: folder, file, number and label in each line."""
    images: dict[str, ImageEntry] = {}
    for path in sorted((root / "metadata").glob("*.npy"), key=lambda path: (len(path.stem), path.stem)):  # 2 before 10
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            where, words = f"{path} line {number}", line.split()
            if len(words) < 4 or words[3] not in ("0", "1"):
                raise ValueError(f"{where} is {line[:60]!r}, expected folder, file, number and a label of 0 or 1")
            image = ImageEntry(f"{words[0]}/{words[1]}", int(words[3]), where)
            if image.file in images:
                raise ValueError(f"{where} names {image.file}, as does {images[image.file].where}")
            images[image.file] = image
    return list(images.values())


def _read_image(root: Path, image: ImageEntry) -> NDArray[np.uint8]:
    """Read the gray levels of a png."""
    from PIL import Image  # comes with matplotlib

    try:
        with Image.open(root / image.file, formats=["PNG"]) as png:
            mode, pixels = png.mode, np.asarray(png, np.uint8)
    except Exception as error:  # damage has many forms
        raise ValueError(f"{image.where} names {image.file}, which cannot be read: {error}") from None
    if mode != "L" or pixels.shape != (OFFICIAL_SIZE, OFFICIAL_SIZE):
        raise ValueError(
            f"{image.where} names {image.file}, of shape {pixels.shape} and mode {mode}; expected {OFFICIAL_SIZE} x "
            f"{OFFICIAL_SIZE} pixels of 8 bits of gray"
        )
    return pixels
