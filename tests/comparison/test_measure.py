"""Time and error are what their definitions say."""

import pytest

from skeinformer.comparison import measure
from skeinformer.comparison.measure import interleaved, quartiles, ratio


def test_interleaved_rotates_and_does_not_count_the_warm_up() -> None:
    calls: list[str] = []
    seen: list[tuple[int, int]] = []
    fns = {name: lambda name=name: calls.append(name) for name in "abc"}
    seconds = interleaved(fns, 4, warmup=1, on_round=lambda number, so_far: seen.append((number, len(so_far["a"]))))
    assert "".join(calls) == "cab" + "abc" + "bca" + "cab" + "abc"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 4, "b": 4, "c": 4}
    assert all(time >= 0 for times in seconds.values() for time in times)
    assert seen == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_interleaved_measures_with_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(measure.time, "perf_counter", lambda: now)
    seconds = interleaved({"slow": lambda: work(2.0), "fast": lambda: work(0.5)}, 3)
    assert seconds == {"slow": [2.0] * 3, "fast": [0.5] * 3}
    seconds = interleaved({"slow": lambda: work(2.0)}, 2, warmup=0, setup={"slow": lambda: work(10.0)})
    assert seconds == {"slow": [2.0] * 2}  # what prepares a call is not timed
    assert now == 4 * 2.5 + 2 * 12.0


def test_ratio_is_taken_round_by_round() -> None:
    # the third round ran on a machine ten times slower: no ratio shows it
    assert ratio([1.0, 2.0, 30.0], [2.0, 4.0, 60.0]) == (0.5, 0.5, 0.5)
    assert ratio([1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 5) == (3.0, 2.0, 4.0)
    assert quartiles([4.0]) == (4.0, 4.0, 4.0)
    with pytest.raises(ValueError, match="2 times but 1 of the reference"):
        ratio([1.0, 2.0], [1.0])
