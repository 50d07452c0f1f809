"""The cluster sketch with a policy of training: some layers exact, fixed draws, a budget that changes on the way.

A module knows its layer by its seed, `seed * 1009 + layer`, and counts the calls of training. This is for runs of
`studies.limits` in one go: the count is not part of a checkpoint, a micro-batch counts as a step, and the best weights
are tested with the last budget.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.cluster import Cluster, ClusterNoise, ClusterOptions
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.queries import Gradient
from skeinformer.noise import LAYERS, Rand
from skeinformer.registry import check_count
from studies.mixed import exact_output

Draws = Literal["fresh", "fixed"]


class PolicyOptions(NamedTuple):
    """What is done otherwise than in the cluster sketch; nothing, unless said."""

    budget: int | None = None
    gradient: Gradient = "keys"
    draws: Draws = "fresh"
    """Whether training draws anew at every step, as it does by default, or as evaluation does."""
    exact_layer: int | None = None
    """A layer, counted from 0, whose attention is exact."""
    exact_until: int | None = None
    """The last of the first layers whose attention is exact."""
    exact_from: int | None = None
    """The first of the last layers whose attention is exact."""
    later: int | None = None
    """The budget from the call `after` of training on."""
    after: int = 300
    """Calls of training with the first budget."""


class Policy(Attention):
    """The cluster sketch with some layers exact, with fixed draws, or with a budget that changes during training."""

    Options = PolicyOptions

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.calls = 0

    @staticmethod
    def complete(options: PolicyOptions) -> PolicyOptions:
        least = {"exact_layer": 0, "exact_until": 0, "exact_from": 0, "later": 1, "after": 1}
        for name, lowest in least.items():
            if getattr(options, name) is not None:
                check_count(name, getattr(options, name), lowest)
        return options._replace(budget=Cluster.complete(ClusterOptions(options.budget)).budget)

    @staticmethod
    def draw(query: Tensor, key: Tensor, rand: Rand, options: PolicyOptions) -> ClusterNoise:
        return ClusterNoise(*Cluster.draw(query, key, rand, ClusterOptions(options.budget)))

    def seed_in_force(self) -> int | None:
        return self.seed if self.options.draws == "fixed" else super().seed_in_force()

    def attend(self, inputs: Inputs, noise: ClusterNoise) -> tuple[Tensor, Trace]:
        self.calls += self.training
        if self.seed is not None and is_exact(self.seed % LAYERS, self.options):
            return exact_output(inputs), Trace()
        return Cluster.compute(inputs, noise, Cluster.complete(self.cluster_options()))

    def cluster_options(self) -> ClusterOptions:
        """Those in force at this point of training."""
        options: PolicyOptions = self.options
        is_later = options.later is not None and self.calls > options.after
        return ClusterOptions(options.later if is_later else options.budget, gradient=options.gradient)


def is_exact(layer: int, options: PolicyOptions) -> bool:
    """Whether the attention of this layer is."""
    return (
        layer == options.exact_layer
        or (options.exact_until is not None and layer <= options.exact_until)
        or (options.exact_from is not None and layer >= options.exact_from)
    )
