"""Work by several processes comes in order, whatever their number, and leaves no process behind."""

import os
import signal
import subprocess
import sys
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from skeinformer.lab.lra.workers import in_order
from tests.processes import children

ROOT = Path(__file__).parents[3]


def halves(indices: range, numerator: int) -> list[float]:
    return [numerator / (index - 50) for index in indices]


def numbers(indices: range) -> list[tuple[int, int]]:
    return [(index, os.getpid()) for index in indices]


@pytest.mark.parametrize(("workers", "count"), [(1, 0), (1, 32), (1, 200), (1, None), (2, 33), (3, None)])
def test_results_come_in_order(workers: int, count: int | None) -> None:
    found = list(islice(in_order(numbers, count, workers=workers), 300))
    assert [index for index, _ in found] == list(range(300 if count is None else count))
    assert (os.getpid() in {process for _, process in found}) == (workers == 1 and count != 0)


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_comes_after_what_stood_before_it(workers: int) -> None:
    results = in_order(partial(halves, numerator=2), 99, workers=workers, piece=10)
    assert len(list(islice(results, 50))) == 50
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert not children()


def test_workers_end_with_the_iterator() -> None:
    results = in_order(numbers, workers=2)
    process = next(results)[1]
    assert process in {child.pid for child in children()}
    results.close()
    assert not children()


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"piece": -1}])
def test_counts_are_checked(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        next(in_order(numbers, **wrong))


PARENT = """
from skeinformer.lab.lra.workers import in_order
from tests.lab.lra.test_workers import numbers

if __name__ == "__main__":
    for index, process in in_order(numbers, workers=2):
        if index == 64:
            print("working", flush=True)
"""


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(tmp_path / "parent.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"working\n"
        process.send_signal(signal.SIGKILL)
        assert process.stdout.read() == b""  # ends when the last process that holds the pipe is gone
