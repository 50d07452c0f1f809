"""The frontier of error and time, and where ours are beaten."""

from itertools import permutations

import pytest

from skeinformer.lab.records import Record
from skeinformer.lab.report.frontier import (
    EXACT_POINT,
    Point,
    approximations,
    frontier,
    frontier_markdown,
    gaps,
    lost,
    verdict,
)

VMEAN = Point("V-mean", None, 0.01, 0.5)
SMALL, LARGE = Point("Cluster sketch", 32, 0.1, 0.2, True), Point("Cluster sketch", 128, 0.2, 0.1, True)
SLOW = Point("Slow", 64, 0.15, 0.3)  # beaten by SMALL


def test_the_frontier_holds_what_nothing_beats_in_any_order() -> None:
    for field in permutations([LARGE, VMEAN, SLOW, SMALL]):
        assert frontier(field) == [VMEAN, SMALL, LARGE, EXACT_POINT]


def test_the_definition_of_the_frontier() -> None:
    field = [Point("a", d, (d * 7 % 11 + 1) / 12, (d * 5 % 13 + 1) / 14) for d in range(1, 60)]
    kept = frontier(field)
    assert kept[-1] == EXACT_POINT
    for point in field:
        beaten = any(other.beats(point) for other in (*field, EXACT_POINT))
        assert (point in kept) != beaten or any(other[2:4] == point[2:4] for other in kept)


def test_nothing_slower_than_the_exact_kernel_is_on_it() -> None:
    assert frontier([Point("a", 8, 1.5, 0.1), Point("b", 8, 1.0, 0.1)]) == [EXACT_POINT]


def test_a_point_does_not_beat_its_equal() -> None:
    equal = SMALL._replace(label="Other", ours=False)
    assert not equal.beats(SMALL)
    assert lost([SMALL, equal]) == {}


def test_ours_win_everywhere() -> None:
    field = [VMEAN, SLOW, SMALL, LARGE]
    assert lost(field) == {}
    assert gaps(field) == []
    assert verdict(field) == (
        "No other method beats the cluster sketch at any of its 2 sizes, and from the time of its fastest, 0.100, to "
        "that of the exact kernel none has a smaller error."
    )


def test_where_ours_are_beaten_is_said() -> None:
    rival = Point("WildCat", 64, 0.08, 0.15)
    best = Point("WildCat", 512, 0.6, 0.02)
    field = [VMEAN, SMALL, LARGE, rival, best]
    assert lost(field) == {SMALL: rival}
    assert gaps(field) == [(rival, 0.2), (best, 1.0)]
    assert verdict(field) == (
        "Sizes of the cluster sketch that another method beats: 1 of 2; by WildCat, d = 64 (error 0.150 in 0.0800): "
        "Cluster sketch, d = 32 (error 0.200 in 0.100); from 0.0800 to 0.200 WildCat, d = 64 has the least error; from "
        "0.600 to 1.00 WildCat, d = 512 has the least error."
    )


def test_a_rival_that_is_better_where_ours_end_beats_no_size() -> None:
    best = Point("WildCat", 512, 0.6, 0.02)
    assert verdict([SMALL, LARGE, best]) == (
        "Sizes of the cluster sketch that another method beats: none of 2; from 0.600 to 1.00 WildCat, d = 512 has the "
        "least error."
    )


def test_ours_beaten_by_ours_is_no_loss() -> None:
    accurate = Point("Cluster sketch, quality accurate", 32, 0.09, 0.1, True)
    assert frontier([SMALL, accurate]) == [accurate, EXACT_POINT]
    assert lost([SMALL, accurate]) == {}


def test_ours_slower_than_the_exact_kernel_are_beaten_by_it() -> None:
    assert lost([SMALL._replace(time=1.2)]) == {SMALL._replace(time=1.2): EXACT_POINT}


def test_without_ours_there_is_no_verdict() -> None:
    assert verdict([VMEAN, SLOW]) == ""
    assert frontier_markdown([VMEAN]).splitlines() == [
        "| time / SDPA | method | relative spectral error |",
        "| --- | ---: | ---: |",
        "| 0.0100 | V-mean | 0.500 |",
        "| 1.00 | exact (SDPA) | 0 |",
    ]


@pytest.mark.parametrize(("direction", "time"), [("forward", 0.25), ("both", 0.5)])
def test_points_are_the_approximations_with_error_and_time(direction: str, time: float) -> None:
    row: Record = {
        "method": "cluster",
        "label": "Cluster sketch",
        "budget": 8,
        "forward_ratio": 0.25,
        "both_ratio": 0.5,
        "spectral_relative": 0.1,
    }
    others: list[Record] = [
        {**row, "method": "softmax"},
        {**row, "method": "softmax_dropout"},
        {**row, f"{direction}_ratio": None},
        {**row, "spectral_relative": None},
        {**row, "method": "vmean", "label": "V-mean", "budget": None},
    ]
    assert approximations([row, *others], direction) == [
        Point("Cluster sketch", 8, time, 0.1, True, "cluster"),
        Point("V-mean", None, time, 0.1, False, "vmean"),
    ]
