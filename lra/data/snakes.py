"""Snakes of paddles that grow on a grid of pixels and never meet: what the images of Pathfinder are made of.

A set of pixels is one whole number, with a bit for each pixel of a board: the image and a rim around it. A paddle with
its margin is a stamp, shifted to its position; one `&` tests all its pixels against everything already there.
"""

import math
from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate
from operator import or_

import numpy as np
from numpy.typing import NDArray

from lra.data.paddles import TOLERANCE, angle, brightness, circle, covered
from skeinformer.checks import check_count, check_number

MAX_STARTS = 200_000  # of one image: a second or two; 25 are usual, thousands in small and crowded images
RETREAT = 3  # paddles
DISTRACTOR_TRIES = 5  # for each distractor, as it may not fit


@dataclass(frozen=True)
class PathfinderSettings:
    """What the images look like; the defaults are the Long Range Arena's hard set. Lengths are in pixels."""

    image_size: int = 32
    """Width and height of the image."""
    paddles: int = 14
    """Paddles in each of the two long snakes."""
    distractors: int = 5
    """Short snakes, or as many of them as fit."""
    distractor_paddles: int = 4
    """Paddles in each short snake."""
    paddle_length: int = 2
    """Length of a paddle from end to end."""
    paddle_thickness: float = 0.5
    """Thickness of the line."""
    margin: int = 1
    """Margin around a paddle. The next one begins two margins after its end; other paddles' margins do not overlap."""
    border: int = 1
    """Pixels that stay black at each side of the image."""
    continuity: float = 1.0
    """A turn by an angle a has weight cos(continuity a)^2, and none from a right angle on: larger is straighter."""
    seed_distance: float = 7.0
    """Distance of the starts of the long snakes. The first starts twice as far from the sides, or in the middle."""
    retreats: int = 0
    """Times that a long snake that cannot go on takes back three paddles before both start again. 0 is the original;
    10 is several times faster where there is little room, and bends the snakes a little more."""
    marker_radius: float = 1.5
    """Radius of the disks."""
    paddle_contrast: float = 0.75
    """Factor of the brightness of paddles; more than white is white."""
    snake_contrast: float = 2.0
    """Second factor of the brightness of paddles."""
    antialias: int = 2
    """Paddles and disks are drawn on a grid this much finer and scaled down."""


@dataclass
class Snake:
    """Paddles from the start to the far end; a position is that of a paddle's end."""

    positions: list[int]
    directions: list[int]
    paddles: list[int]  # the pixels of each
    body: int = 0  # the pixels of all but the last

    @property
    def pixels(self) -> int:
        return self.body | self.paddles[-1]

    def add(self, position: int, direction: int, pixels: int) -> None:
        self.positions.append(position)
        self.directions.append(direction)
        self.body |= self.paddles[-1]
        self.paddles.append(pixels)

    def take_back(self, count: int) -> None:
        """Remove the last paddles, except the first of all."""
        keep = max(1, len(self.paddles) - count)
        for items in (self.positions, self.directions, self.paddles):
            del items[keep:]
        self.body = reduce(or_, self.paddles[:-1], 0)


@dataclass(frozen=True)
class Board:
    """All that follows from the settings. A position is a pixel: the number that a stamp is shifted by to get there."""

    settings: PathfinderSettings
    side: int  # pixels in a row, with the rim
    origin: int  # the row and column of an image that are 0 on the board
    outside: int  # the pixels where nothing may be drawn
    inside: int  # the positions of all others
    stamps: list[int]  # by direction: a paddle and its margin
    first_stamps: list[int]  # and the disk at its start
    last_stamps: list[int]  # and the disk at its end
    stamp_bits: list[list[int]]  # the numbers of the bits of `stamps`
    turns: list[list[tuple[float, int, int]]]  # by direction: weight, next direction, step to the next position
    sums: list[list[float]]  # of the weights of the turns up to each
    paddles: NDArray[np.float64]  # (directions, 2): from start to end
    ahead: list[int]  # by direction: from the position of the start to that of the end
    pictures: list[NDArray[np.uint8]]  # by direction, a window around the end
    disk: NDArray[np.uint8]  # a window around its centre

    def position(self, row: int, column: int) -> int:
        return (row - self.origin) * self.side + column - self.origin

    def pixels(self, positions: list[int]) -> NDArray[np.int64]:
        """Return rows and columns, (count, 2)."""
        return np.stack(np.divmod(np.array(positions), self.side), axis=-1) + self.origin


def grow_pair(board: Board, uniform: Iterator[float]) -> tuple[Snake, Snake]:
    """Grow the two long snakes. When one cannot go on, both start again."""
    for _ in range(MAX_STARTS):
        pair = _start_pair(board, uniform)
        if pair is not None and _grow_in_turn(board, *pair, uniform):
            return pair
    size, paddles = board.settings.image_size, board.settings.paddles
    raise ValueError(
        f"found no room for two snakes of {paddles} paddles in an image of {size} x {size} pixels; "
        "take fewer paddles, a larger image, a smaller seed_distance or a smaller continuity"
    )


def grow_distractors(board: Board, taken: int, uniform: Iterator[float]) -> list[Snake]:
    """Grow short snakes where nothing is `taken`, as many as the settings ask for and find room."""
    snakes = []
    for _ in range(board.settings.distractors):
        for _ in range(DISTRACTOR_TRIES):
            snake = _grow_distractor(board, taken, uniform)
            if snake is not None:
                snakes.append(snake)
                taken |= snake.pixels
                break
    return snakes


def _start_pair(board: Board, uniform: Iterator[float]) -> tuple[Snake, Snake] | None:
    """Return the first paddle of both long snakes, if they fit."""
    size, seed_distance = board.settings.image_size, board.settings.seed_distance
    low = min(math.ceil(2 * seed_distance), (size - 1) // 2)
    row, column = (low + int((size - 2 * low) * next(uniform)) for _ in range(2))
    towards = 2 * math.pi * next(uniform)
    other_row = round(row + seed_distance * math.sin(towards))
    other_column = round(column + seed_distance * math.cos(towards))
    if not (0 <= other_row < size and 0 <= other_column < size):
        return None
    first = _start(board, board.position(row, column), board.outside, uniform)
    if first is None:
        return None
    second = _start(board, board.position(other_row, other_column), board.outside | first.pixels, uniform)
    return None if second is None else (first, second)


def _start(board: Board, start: int, taken: int, uniform: Iterator[float]) -> Snake | None:
    direction = int(next(uniform) * len(board.stamps))
    position = start + board.ahead[direction]
    if taken >> position & board.first_stamps[direction]:
        return None
    return Snake([position], [direction], [board.first_stamps[direction] << position])


def _grow_in_turn(board: Board, first: Snake, second: Snake, uniform: Iterator[float]) -> bool:
    """Bring both to their full length, a paddle at a time, the shorter one next, if they fit."""
    retreats = board.settings.retreats
    while True:
        snake, other = (first, second) if len(first.paddles) <= len(second.paddles) else (second, first)
        left = board.settings.paddles - len(snake.paddles)
        if not left:
            return True
        stamps = board.stamps if left > 1 else board.last_stamps
        if not _extend(board, snake, board.outside | other.pixels, stamps, uniform):
            if not retreats:
                return False
            retreats -= 1
            snake.take_back(RETREAT)


def _extend(board: Board, snake: Snake, taken: int, stamps: list[int], uniform: Iterator[float]) -> bool:
    """Add a paddle where nothing is `taken` by others or by the snake itself, its last paddle excepted.

    A turn is drawn by weight among those that fit: first among all, which is often enough, else among those left.
    """
    taken |= snake.body
    here = snake.positions[-1]
    turns = board.turns[snake.directions[-1]]
    sums = board.sums[snake.directions[-1]]
    _, direction, step = turns[bisect(sums, sums[-1] * next(uniform))]
    if taken >> here + step & stamps[direction]:
        turns = [turn for turn in turns if not taken >> here + turn[2] & stamps[turn[1]]]
        if not turns:
            return False
        sums = list(accumulate(turn[0] for turn in turns))
        _, direction, step = turns[bisect(sums, sums[-1] * next(uniform))]
    snake.add(here + step, direction, stamps[direction] << here + step)
    return True


def _grow_distractor(board: Board, taken: int, uniform: Iterator[float]) -> Snake | None:
    """Grow a short snake in a random direction from a random place among those where its first paddle fits."""
    taken |= board.outside
    direction = int(next(uniform) * len(board.stamps))
    free = board.inside
    for bit in board.stamp_bits[direction]:
        free &= ~(taken >> bit)
    if not free:
        return None
    octets = np.frombuffer(free.to_bytes(board.side**2 // 8 + 1, "little"), np.uint8)
    positions = np.flatnonzero(np.unpackbits(octets, bitorder="little"))
    position = int(positions[int(next(uniform) * len(positions))])
    snake = Snake([position], [direction], [board.stamps[direction] << position])
    for _ in range(board.settings.distractor_paddles - 1):
        if not _extend(board, snake, taken, board.stamps, uniform):
            return None
    return snake


@lru_cache(maxsize=8)
def make_board(settings: PathfinderSettings) -> Board:
    """Check the settings and make their board."""
    check_settings(settings)
    length, margin, size, border = settings.paddle_length, settings.margin, settings.image_size, settings.border
    radius = margin + settings.paddle_thickness / 2
    reach = math.ceil(length + max(radius, settings.marker_radius))

    # a paddle ends at a pixel of a circle around its pivot, and the next pivot lies a margin beyond that end
    ends = circle(length + margin)  # (directions, 2)
    units = ends / np.hypot(ends[:, 0], ends[:, 1])[:, None]
    starts = np.rint(-length * units).astype(np.int64)  # from the pixel of a paddle's end to that of its start
    pivots = np.rint((length + 2 * margin) * units).astype(np.int64)
    steps = (pivots - ends)[:, None] + ends  # (directions, next directions, 2): from end to end

    pad = reach + int(np.abs(steps).max())  # so much that no stamp leaves the board or comes in on its other side
    side = size + 2 * pad
    inside = np.zeros((side, side), np.bool_)
    inside[pad + border : pad + size - border, pad + border : pad + size - border] = True
    here = np.zeros(2)
    shapes = [covered(-length * unit, here, radius, reach) for unit in units]
    first_disks = [covered(start, start, settings.marker_radius, reach) for start in starts.astype(np.float64)]
    disk = covered(here, here, settings.marker_radius, reach)
    contrast = settings.paddle_contrast * settings.snake_contrast
    # what the filter spreads beyond the margin is left out: it would cross the border and other snakes
    lines = [
        brightness(-length * unit, here, settings.paddle_thickness / 2, reach, settings.antialias) for unit in units
    ]
    turns = _turns(steps @ np.array([side, 1]), angle(units), settings.continuity)
    board = Board(
        settings=settings,
        side=side,
        origin=reach - pad,
        outside=_number(~inside, side),
        inside=_number(inside, side) >> reach * side + reach,
        stamps=[_number(shape, side) for shape in shapes],
        first_stamps=[_number(shape | around, side) for shape, around in zip(shapes, first_disks, strict=True)],
        last_stamps=[_number(shape | disk, side) for shape in shapes],
        stamp_bits=[(np.argwhere(shape) @ np.array([side, 1])).tolist() for shape in shapes],
        turns=turns,
        sums=[list(accumulate(weight for weight, _, _ in row)) for row in turns],
        paddles=length * units,
        ahead=(-starts @ np.array([side, 1])).tolist(),
        pictures=[_gray(contrast * line * shape) for line, shape in zip(lines, shapes, strict=True)],
        disk=_gray(disk * brightness(here, here, settings.marker_radius, reach, settings.antialias)),
    )
    _check_room(board)
    return board


def _turns(
    steps: NDArray[np.int64], angles: NDArray[np.float64], continuity: float
) -> list[list[tuple[float, int, int]]]:
    """Return by direction the turns with a positive weight: weight, next direction, step."""
    bends = np.abs(angles[:, None] - angles)
    bends = np.minimum(bends, 2 * np.pi - bends)
    weights = np.cos(np.minimum(continuity * bends, np.pi / 2)) ** 2
    return [
        [(float(row[j]), int(j), int(steps[i, j])) for j in np.flatnonzero(row > TOLERANCE)]
        for i, row in enumerate(weights)
    ]


def _number(pixels: NDArray[np.bool_], side: int) -> int:
    """Return the set of pixels of a window at the corner of a board, as a number."""
    board = np.zeros((side, side), np.bool_)
    board[: len(pixels), : len(pixels)] = pixels
    return int.from_bytes(np.packbits(board, bitorder="little").tobytes(), "little")


def _gray(light: NDArray[np.float64]) -> NDArray[np.uint8]:
    return np.rint(255 * np.clip(light, 0, 1)).astype(np.uint8)


def _check_room(board: Board) -> None:
    """Fail where two snakes cannot fit: the margins of every second paddle of theirs have no pixel in common."""
    size, paddles = board.settings.image_size, board.settings.paddles
    needed = 2 * math.ceil(paddles / 2) * min(stamp.bit_count() for stamp in board.stamps)
    if needed > (room := board.inside.bit_count()):
        raise ValueError(
            f"two snakes of {paddles} paddles take at least {needed:,} pixels, and an image of {size} x {size} has "
            f"{room:,} inside its border; take fewer paddles or a larger image"
        )


def check_settings(settings: PathfinderSettings) -> None:
    """Fail where a setting is of the wrong kind or out of its range."""
    for name in ("image_size", "distractor_paddles", "paddle_length", "margin", "antialias"):
        check_count(name, getattr(settings, name))
    check_count("paddles", settings.paddles, at_least=2)
    for name in ("distractors", "border", "retreats"):
        check_count(name, getattr(settings, name), at_least=0)
    numbers = ("paddle_thickness", "continuity", "seed_distance", "marker_radius", "paddle_contrast", "snake_contrast")
    for name in numbers:
        if check_number(name, getattr(settings, name)) <= 0:
            raise ValueError(f"{name} must be more than 0, got {getattr(settings, name)}")
    if settings.paddle_thickness * settings.antialias < 1:
        raise ValueError(
            f"a line of {settings.paddle_thickness} pixels has holes when drawn {settings.antialias} times finer; "
            f"antialias must be at least {math.ceil(1 / settings.paddle_thickness)}"
        )
