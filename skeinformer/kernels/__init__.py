"""How attention is computed: the fused kernel and its gradient, moves of rows, and the steps of a sketch."""

from types import ModuleType

from torch import Tensor

from skeinformer.kernels import loops, plain
from skeinformer.kernels.choice import is_eager_cpu


def steps_for(x: Tensor) -> ModuleType:
    """Return the module with the steps of a sketch for the device of x: `loops` on a CPU, else `plain`."""
    return loops if is_eager_cpu(x) else plain
