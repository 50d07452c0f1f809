"""Every generated image is traced again from its paddles, and some are drawn again from the description."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from skeinformer.lab.lra.pathfinder import Drawing, PathfinderSettings, draw_image, generate
from skeinformer.lab.lra.store import Example
from tests.processes import children

HARD = PathfinderSettings()
SMALL = PathfinderSettings(image_size=16, paddles=4, distractors=2, distractor_paddles=2, seed_distance=5)
COARSE = PathfinderSettings(
    image_size=64, paddles=9, paddle_length=4, paddle_thickness=1, margin=2, border=3, marker_radius=2.5, antialias=3
)


@pytest.fixture(scope="module", params=[HARD, SMALL, COARSE], ids=["hard", "small", "coarse"])
def settings(request: pytest.FixtureRequest) -> PathfinderSettings:
    chosen: PathfinderSettings = request.param
    return chosen


@pytest.fixture(scope="module")
def drawings(settings: PathfinderSettings) -> list[Drawing]:
    return [draw_image(np.random.default_rng(seed), seed % 2, settings) for seed in range(40)]


def snakes_of(drawing: Drawing) -> list[NDArray[np.float64]]:
    return [*drawing.snakes, *drawing.distractors]


def bends(snake: NDArray[np.float64]) -> NDArray[np.float64]:
    """The angle between each paddle and the next."""
    along = snake[:, 1] - snake[:, 0]
    along /= np.linalg.norm(along, axis=1, keepdims=True)
    return np.arccos(np.clip((along[1:] * along[:-1]).sum(1), -1, 1))


def away(points: NDArray[np.float64], start: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """The distance of each point from a segment: from its line if it is beside it, else from the nearer end."""
    from_ends = np.minimum(np.linalg.norm(points - start, axis=-1), np.linalg.norm(points - end, axis=-1))
    length = np.linalg.norm(end - start)
    if length == 0:
        return from_ends
    row, column = (end - start) / length
    along = (points - start) @ np.array([row, column])
    return np.where((along > 0) & (along < length), np.abs((points - start) @ np.array([column, -row])), from_ends)


def pixels(size: int, scale: int = 1) -> NDArray[np.float64]:
    ticks = np.arange(-scale, size * scale + scale) / scale if scale > 1 else np.arange(size)
    return np.stack(np.meshgrid(ticks, ticks, indexing="ij"), axis=-1).astype(np.float64)


def margins(snake: NDArray[np.float64], settings: PathfinderSettings) -> list[NDArray[np.bool_]]:
    """The pixels of each paddle dilated by the margin."""
    radius = settings.margin + settings.paddle_thickness / 2 + 1e-6
    return [away(pixels(settings.image_size), *paddle) <= radius for paddle in snake]


def test_snakes_have_the_asked_lengths(drawings: list[Drawing], settings: PathfinderSettings) -> None:
    for drawing in drawings:
        assert [snake.shape for snake in drawing.snakes] == [(settings.paddles, 2, 2)] * 2
        assert len(drawing.distractors) <= settings.distractors
        assert {snake.shape for snake in drawing.distractors} <= {(settings.distractor_paddles, 2, 2)}
        for snake in snakes_of(drawing):
            np.testing.assert_allclose(np.linalg.norm(snake[:, 1] - snake[:, 0], axis=1), settings.paddle_length)
    assert np.mean([len(drawing.distractors) for drawing in drawings]) > (0 if settings == SMALL else 2)


def test_a_paddle_begins_two_margins_after_the_last_one(drawings: list[Drawing], settings: PathfinderSettings) -> None:
    snakes = [snake for drawing in drawings for snake in snakes_of(drawing)]
    gaps = np.concatenate([np.linalg.norm(snake[1:, 0] - snake[:-1, 1], axis=1) for snake in snakes])
    turns = np.concatenate([bends(snake) for snake in snakes])
    # one margin straight on to the pivot, one margin in the new direction; both are rounded to pixels
    assert np.abs(gaps - 2 * settings.margin * np.cos(turns / 2)).max() < 1.5
    assert np.abs(gaps - 2 * settings.margin * np.cos(turns / 2)).mean() < 0.5


def test_turns_are_less_than_a_right_angle(drawings: list[Drawing]) -> None:
    assert max(bends(snake).max() for drawing in drawings for snake in snakes_of(drawing)) < math.pi / 2


def test_the_margins_of_paddles_meet_only_from_one_to_the_next(
    drawings: list[Drawing], settings: PathfinderSettings
) -> None:
    for drawing in drawings[:12]:
        dilated = [margins(snake, settings) for snake in snakes_of(drawing)]
        for snake in dilated:
            apart = [(i, j) for i, j in itertools.combinations(range(len(snake)), 2) if j > i + 1]
            assert not any((snake[i] & snake[j]).any() for i, j in apart)
        for one, other in itertools.combinations(dilated, 2):
            assert not (np.any(one, axis=0) & np.any(other, axis=0)).any()


def test_the_border_stays_black(drawings: list[Drawing], settings: PathfinderSettings) -> None:
    border = np.ones((settings.image_size, settings.image_size), np.bool_)
    border[settings.border : -settings.border, settings.border : -settings.border] = False
    for drawing in drawings:
        assert not drawing.image[border].any()
    for drawing in drawings[:12]:
        assert not any(paddle[border].any() for snake in snakes_of(drawing) for paddle in margins(snake, settings))


def test_the_disks_mark_what_the_label_says(drawings: list[Drawing]) -> None:
    begun = set()
    for index, drawing in enumerate(drawings):
        assert drawing.label == index % 2
        starts = np.linalg.norm([snake[0, 0] - drawing.markers[0] for snake in drawing.snakes], axis=1)
        ends = np.linalg.norm([snake[-1, 1] - drawing.markers[1] for snake in drawing.snakes], axis=1)
        assert starts.min() <= math.sqrt(0.5)  # the pixel nearest to it
        assert ends.min() == 0
        assert (starts.argmin() == ends.argmin()) == bool(drawing.label)
        begun.add((drawing.label, int(starts.argmin())))
    assert begun == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_the_snakes_start_at_the_seed_distance(drawings: list[Drawing], settings: PathfinderSettings) -> None:
    starts = np.array([[snake[0, 0] for snake in drawing.snakes] for drawing in drawings])
    distances = np.linalg.norm(starts[:, 0] - starts[:, 1], axis=1)
    assert np.abs(distances - settings.seed_distance).max() < 3 * math.sqrt(0.5)  # three times rounded to a pixel
    assert distances.mean() == pytest.approx(settings.seed_distance, abs=0.5)
    low = min(2 * settings.seed_distance, (settings.image_size - 1) // 2)
    assert starts[:, 0].min() >= low - 1
    assert starts[:, 0].max() <= settings.image_size - low


def transcription(drawing: Drawing, settings: PathfinderSettings) -> NDArray[np.float64]:
    """The image from its paddles and disks: each drawn on a finer grid, filtered by Lanczos, cut off at its margin."""
    size, scale = settings.image_size, settings.antialias
    fine, whole = pixels(size, scale), pixels(size)

    def lanczos(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0.0)

    filters = lanczos(np.arange(size)[:, None] - fine[None, :, 0, 0])
    filters /= lanczos(np.arange(-3 * scale, 3 * scale + 1) / scale).sum()
    light = np.zeros((size, size))
    radius, contrast = settings.paddle_thickness / 2, settings.paddle_contrast * settings.snake_contrast
    shapes = [(paddle, radius, radius + settings.margin, contrast) for paddle in np.concatenate(snakes_of(drawing))]
    shapes += [(np.stack([disk, disk]), settings.marker_radius, settings.marker_radius, 1) for disk in drawing.markers]
    for (start, end), inner, outer, strength in shapes:
        filtered = filters @ (away(fine, start, end) <= inner + 1e-6) @ filters.T
        light = np.maximum(light, strength * filtered * (away(whole, start, end) <= outer + 1e-6))
    return 255 * np.clip(light, 0, 1)


def test_the_image_is_the_drawing_of_its_paddles(drawings: list[Drawing], settings: PathfinderSettings) -> None:
    for drawing in drawings[:2]:
        assert drawing.image.dtype == np.uint8
        assert drawing.image.shape == (settings.image_size, settings.image_size)
        np.testing.assert_allclose(drawing.image, transcription(drawing, settings), atol=0.51)


def test_paddles_and_disks_are_bright(drawings: list[Drawing]) -> None:
    for drawing in drawings:
        for middle in np.concatenate(snakes_of(drawing)).mean(axis=1):
            row, column = np.floor(middle).astype(int)
            assert drawing.image[row : row + 2, column : column + 2].max() > 100  # of the pixels around it
        assert (drawing.image[drawing.markers[:, 0], drawing.markers[:, 1]] >= 250).all()


def connected(drawing: Drawing, level: int) -> bool:
    """Whether a path of pixels that are, or touch, one brighter than `level` leads from disk to disk."""
    bright = np.pad(drawing.image > level, 1)
    shifted = [np.roll(bright, step, axis) for axis in (0, 1) for step in (-1, 1)]
    free = np.logical_or.reduce([bright, *shifted])[1:-1, 1:-1]
    waiting, seen = [tuple(drawing.markers[0].tolist())], set()
    while waiting:
        row, column = waiting.pop()
        inside = 0 <= row < len(free) and 0 <= column < len(free)
        if (row, column) in seen or not inside or not free[row, column]:
            continue
        seen.add((row, column))
        waiting += [(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)]
    return tuple(drawing.markers[1].tolist()) in seen


def test_the_label_is_not_given_away() -> None:
    """A flood fill, and a threshold for the distance of the disks or for brightness, are hardly better than a coin."""
    drawings = [draw_image(np.random.default_rng(seed), seed % 2) for seed in range(240)]
    labels = np.array([drawing.label for drawing in drawings])
    for level in (0, 40, 80, 120):
        correct = np.array([connected(drawing, level) for drawing in drawings[:120]]) == labels[:120]
        assert correct.mean() < 0.65
    for number in (
        [float(np.linalg.norm(np.subtract(*drawing.markers))) for drawing in drawings],
        [float(drawing.image.mean()) for drawing in drawings],
        [float(len(drawing.distractors)) for drawing in drawings],
    ):
        right = np.array([((np.array(number) > threshold) == labels).mean() for threshold in number])
        assert np.maximum(right, 1 - right).max() < 0.65


def test_without_distractors_or_gaps_the_drawing_shows_the_label() -> None:
    """The dilated paddles of one snake, and only of it, lead from disk to disk where the label is 1."""
    for seed in range(30):
        drawing = draw_image(np.random.default_rng(seed), seed % 2)
        begin = next(i for i in (0, 1) if np.linalg.norm(drawing.snakes[i][0, 0] - drawing.markers[0]) < 1)
        path = drawing.snakes[begin].reshape(-1, 2)  # through paddles and the gaps between them
        near = np.min([away(pixels(32), a, b) for a, b in itertools.pairwise(path)], axis=0) <= 1
        masked = Drawing(np.where(near, 255, 0).astype(np.uint8), (), (), drawing.markers, drawing.label)
        assert connected(masked, 254) == bool(drawing.label)


@pytest.mark.parametrize("continuity", [0.8, 1.0, 1.8])
def test_turns_are_drawn_by_their_weights(continuity: float) -> None:
    """Where there is room for all turns, a turn by a has a probability proportional to cos(continuity a)^2."""
    settings = PathfinderSettings(image_size=96, paddles=2, distractors=0, seed_distance=30, continuity=continuity)
    rng = np.random.default_rng(0)
    found = np.array([bends(snake)[0] for _ in range(400) for snake in draw_image(rng, 1, settings).snakes])
    circle = {(round(3 * math.sin(a)), round(3 * math.cos(a))) for a in np.linspace(0, 2 * math.pi, 999)}
    angles = np.array([math.atan2(*pixel) for pixel in circle])
    turns = np.abs(np.angle(np.exp(1j * (angles[:, None] - angles))))
    weights = np.cos(np.minimum(continuity * turns, math.pi / 2)) ** 2
    weights /= weights.sum(1, keepdims=True)
    for power in (1, 2):
        expected = (weights * turns**power).sum(1).mean()
        error = (found**power).std() / math.sqrt(len(found))
        assert abs((found**power).mean() - expected) < 4 * error


def test_retreats_make_crowded_images_possible() -> None:
    crowded = PathfinderSettings(image_size=16, paddles=6, retreats=10)
    for seed in range(8):
        drawing = draw_image(np.random.default_rng(seed), 1, crowded)
        assert all(len(snake) == 6 for snake in drawing.snakes)
        one, other = (np.any(margins(snake, crowded), axis=0) for snake in drawing.snakes)
        assert not (one & other).any()


def together(examples: Iterator[Example]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    images, labels = zip(*((example.sequences[0], example.label) for example in examples), strict=True)
    return np.stack(images), np.array(labels)


def test_the_number_of_workers_changes_nothing() -> None:
    images, labels = together(generate(70, seed=5))
    assert images.shape == (70, 1024)
    assert images.dtype == np.uint8
    for workers in (2, 3):
        others, other_labels = together(generate(70, seed=5, workers=workers))
        np.testing.assert_array_equal(others, images)
        np.testing.assert_array_equal(other_labels, labels)
    assert not children()


def test_examples_depend_on_seed_and_index_alone() -> None:
    images, labels = together(generate(40, seed=5, settings=SMALL))
    fewer, fewer_labels = together(generate(11, seed=5, settings=SMALL))
    np.testing.assert_array_equal(fewer, images[:11])
    np.testing.assert_array_equal(fewer_labels, labels[:11])
    others, _ = together(generate(40, seed=6, settings=SMALL))
    assert len({image.tobytes() for image in (*images, *others)}) == 80


def test_labels_are_balanced() -> None:
    _, labels = together(generate(101, seed=0, settings=SMALL))
    np.testing.assert_array_equal(labels[:100].reshape(50, 2).sum(1), 1)
    assert 10 < labels[:100:2].sum() < 40  # which of a pair comes first is random


def test_an_example_is_the_image_row_by_row() -> None:
    example = next(iter(generate(1, seed=9)))
    rng = np.random.default_rng(np.random.SeedSequence(9, spawn_key=(0,)))
    np.testing.assert_array_equal(example.sequences[0].reshape(32, 32), draw_image(rng, example.label).image)


def test_workers_end_when_the_iteration_is_left() -> None:
    examples = generate(100_000, seed=0, workers=2, settings=SMALL)
    next(examples)
    assert children()
    examples.close()
    assert not children()


def test_workers_end_with_an_error() -> None:
    with pytest.raises(ValueError, match="found no room for two snakes of 2 paddles in an image of 8 x 8 pixels"):
        list(generate(64, seed=0, workers=2, settings=PathfinderSettings(image_size=8, paddles=2)))
    assert not children()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"image_size": 12}, "two snakes of 14 paddles take at least 126 pixels.* 12 x 12 has 100 .*larger image"),
        ({"paddles": 1}, "paddles must be at least 2, got 1"),
        ({"paddles": 1000}, "two snakes of 1000 paddles take at least"),
        ({"margin": 0}, "margin must be at least 1, got 0"),
        ({"border": 20}, "has 0 inside its border"),
        ({"distractors": -1}, "distractors must be at least 0"),
        ({"continuity": 0.0}, "continuity must be more than 0"),
        ({"seed_distance": math.nan}, "seed_distance must be a finite number"),
        ({"paddle_thickness": 0.3}, "antialias must be at least 4"),
    ],
)
def test_impossible_settings(changes: dict[str, float], complaint: str) -> None:
    settings = PathfinderSettings(**changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=complaint):
        generate(1, seed=0, settings=settings)
    with pytest.raises(ValueError, match=complaint):
        draw_image(np.random.default_rng(0), 1, settings)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="label is 2, expected 0 or 1"):
        draw_image(np.random.default_rng(0), 2)
    with pytest.raises(ValueError, match="count must be at least 1, got 0"):
        generate(0, seed=0)
    with pytest.raises(ValueError, match="seed must be at least 0, got -1"):
        generate(1, seed=-1)
