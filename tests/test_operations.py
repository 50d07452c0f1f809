"""A guard of speed without a clock: how many operations and multiply-adds one call takes, on a CPU as users have it."""

from typing import NamedTuple

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from skeinformer.cli.flops import count_multiply_adds
from skeinformer.cli.specs import parse

N, HEADS, WIDTH = 1024, 4, 32


class Most(NamedTuple):
    """What a call may take; where it takes less by now, the smaller numbers belong here."""

    calls: tuple[int, int]  # operations in a call in evaluation, with its seed; and in a training step
    work: tuple[int, int]  # multiply-adds of one head, in the same order


MOST = {
    "cluster": Most((458, 415), (7_095_296, 15_535_104)),
    "cluster:quality=accurate": Most((482, 439), (32_572_416, 67_505_152)),
    "cluster_window": Most((702, 1092), (18_621_440, 58_501_120)),
    "skeinformer": Most((316, 184), (50_438_144, 134_488_064)),
}


def count_calls(name: str, training: bool) -> int:
    """Count operations that no other one calls, by the profiler: a dispatch mode gets the steps of other devices."""
    module = parse(name).build(WIDTH, N, 0).train(training)
    q, k, v = (torch.randn(1, HEADS, N, WIDTH, requires_grad=training) for _ in range(3))

    def call() -> None:
        output = module(q, k, v)
        if training:
            output.backward(torch.ones_like(output))

    call()
    with profile(activities=[ProfilerActivity.CPU]) as record:
        call()
    events = [event for event in record.events() if event.name.startswith("aten::")]
    return sum(event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::") for event in events)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MOST)
def test_a_call_takes_no_more_than_it_did(name: str, training: bool) -> None:
    assert count_calls(name, training) <= 1.02 * MOST[name].calls[training]
    assert sum(count_multiply_adds(parse(name), N, backward=training).values()) <= 1.02 * MOST[name].work[training]
