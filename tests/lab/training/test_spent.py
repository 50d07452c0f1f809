"""Time of training and of compilation are told apart, by a clock that only the test moves."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from skeinformer.lab.training import spent as module
from skeinformer.lab.training.spent import spent


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(wall=0.0, processor=0.0)
    readers = SimpleNamespace(perf_counter=lambda: found.wall, process_time=lambda: found.processor)
    monkeypatch.setattr(module, "time", readers)
    return found


def test_compilation_is_counted_apart(clock: SimpleNamespace) -> None:
    def slow_backend(graph: torch.fx.GraphModule, inputs: object) -> Callable[..., object]:
        clock.wall, clock.processor = clock.wall + 100, clock.processor + 40
        return graph.forward

    @torch.compile(backend=slow_backend, dynamic=False)
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with spent(compiled=True) as found:
        for n in (2, 2, 3):  # a new shape is compiled anew
            double(torch.ones(n))
            clock.wall, clock.processor = clock.wall + 1, clock.processor + 0.5
    assert (found.seconds, found.cpu_seconds, found.compile_seconds) == (3, 1.5, 200)
    double(torch.ones(4))  # the block has ended
    assert found.compile_seconds == 200


def test_without_compilation_all_time_is_the_blocks(clock: SimpleNamespace) -> None:
    with spent() as found:
        clock.wall, clock.processor = 5.0, 4.0
    assert (found.seconds, found.cpu_seconds, found.compile_seconds) == (5, 4, 0)
