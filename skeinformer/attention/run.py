"""The frame around the mathematics of a method, in one process or with a share of the tokens."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from skeinformer.attention.inputs import Inputs, Noise, clear_padding
from skeinformer.kernels.choice import no_autocast
from skeinformer.kernels.inside import inside

T = TypeVar("T")


def run(attend: Callable[[Inputs, Any], tuple[Tensor, T]], inputs: Inputs, noise: Noise) -> tuple[Tensor, T]:
    """The output with zeros in the rows of padded queries, and the method's trace."""
    with inside(), no_autocast(inputs.query.device):
        output, trace = attend(inputs, noise)
    return clear_padding(output, inputs.query_mask), trace


def run_alone(
    as_operation: Callable[[Inputs, Any], Tensor | None],
    attend: Callable[[Inputs, Any], tuple[Tensor, Any]],
    inputs: Inputs,
    noise: Noise,
) -> Tensor:
    """`run` without the trace: by one operation, where a graph is compiled that had better have one."""
    output = as_operation(inputs, noise)
    return run(attend, inputs, noise)[0] if output is None else clear_padding(output, inputs.query_mask)
