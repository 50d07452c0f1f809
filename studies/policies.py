"""The cluster sketch with a policy of training: some layers exact, fixed draws, a budget that changes on the way.

A module knows its layer by its seed, `seed * 1009 + layer`, and counts its calls in training. This is for runs of
`studies.limits` in one go: the count is not part of a checkpoint, a micro-batch counts as a step, and the best weights
are tested with the last budget.
"""

from typing import Any, ClassVar, Literal

from torch import Tensor

from skeinformer.attention.base import Attention, Call, Trace
from skeinformer.attention.certificate import Info
from skeinformer.attention.cluster import Cluster, ClusterNoise
from skeinformer.attention.inputs import Inputs
from skeinformer.checks import check_count
from skeinformer.noise import LAYERS
from studies.mixed import exact_output


class PolicyModule(Attention):
    """A module that knows its layer and counts its calls in training."""

    method: "Policy"

    def __init__(self, method: "Policy", **arguments: Any) -> None:
        super().__init__(method, **arguments)
        self.calls = 0

    def seed_of_call(self, call: Call) -> int | None:
        """The seed of the module in training too, where draws are fixed."""
        if call.seed is None and self.method.draws == "fixed":
            return self.seed
        return super().seed_of_call(call)

    def attend(self, inputs: Inputs, noise: ClusterNoise) -> tuple[Tensor, Trace]:  # type: ignore[override]
        """Exact attention where the layer is exact, else the cluster sketch with the budget of this call."""
        self.calls += self.training
        if self.seed is not None and self.method.is_exact(self.seed % LAYERS):
            return exact_output(inputs), Trace()
        if self.method.later is not None and self.calls > self.method.after:
            return Cluster(budget=self.method.later).attend(inputs, noise)
        return self.method.attend(inputs, noise)


class Policy(Cluster):
    """The cluster sketch with some layers exact, with fixed draws, or with a budget that changes during training.

    draws: whether training draws again at every step, as it does by default, or as evaluation does. exact_layer: a
    layer, counted from 0, whose attention is exact. exact_until: the last of the first layers whose attention is exact.
    exact_from: the first of the last layers whose attention is exact. later: the budget from the call `after` of
    training on.
    """

    module: ClassVar[type[Attention] | None] = PolicyModule

    draws: Literal["fresh", "fixed"] = "fresh"
    exact_layer: int | None = None
    exact_until: int | None = None
    exact_from: int | None = None
    later: int | None = None
    after: int = 300

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"exact_layer": 0, "exact_until": 0, "exact_from": 0, "later": 1, "after": 1}.items():
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least)

    def info(self, inputs: Inputs, trace: Trace, error: Info) -> Any:
        """What the cluster sketch reports; the error alone where the layer is exact."""
        return error if trace.details is None else super().info(inputs, trace, error)

    def is_exact(self, layer: int) -> bool:
        """Whether the attention of this layer is exact."""
        return (
            layer == self.exact_layer
            or (self.exact_until is not None and layer <= self.exact_until)
            or (self.exact_from is not None and layer >= self.exact_from)
        )
