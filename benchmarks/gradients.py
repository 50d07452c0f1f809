"""Two methods that show what limits training with a sketch, for `benchmarks.limits` and `benchmarks.finetune`.

`mixed` is the cluster sketch with exact parts put in: its output, and the gradients of Q, K and V, each exact or
sketched. Each part is what it is in a model that has nothing else of its kind, so that a difference in training is its
own:

    R = R_a + [R_b - R_b]          the second of the pair carries no gradient

where R_a is the attention that gives the output and R_b is the other one, and the gradient of each goes only to those
of Q, K and V that take it.

`policy` is the cluster sketch with some layers exact, fixed draws, or a budget that changes on the way. A module knows
its layer by its seed, `seed * 1009 + layer`, and counts its calls in training: this is for runs in one go. The count is
not part of a checkpoint, a micro-batch counts as a step, and the best weights are tested with the last budget.
"""

from typing import Any, ClassVar, Literal

from torch import Tensor, is_grad_enabled, zeros
from torch.nn import functional as F

from skeinformer.attention import METHODS as LIBRARY
from skeinformer.attention.base import Attention, Call, Trace
from skeinformer.attention.certificate import Info
from skeinformer.attention.cluster import Cluster, ClusterNoise
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.table import Entry
from skeinformer.checks import check_count
from skeinformer.cli.specs import resolve
from skeinformer.noise import LAYERS

Part = Literal["exact", "sketch"]
GRADIENTS = {"dq": "query", "dk": "key", "dv": "value"}  # options, and whose gradient they are


class Mixed(Cluster):
    """The cluster sketch with an exact output, or with exact gradients of queries, keys or values."""

    output: Part = "sketch"
    dq: Part = "sketch"
    dk: Part = "sketch"
    dv: Part = "sketch"

    def attend(self, inputs: Inputs, noise: ClusterNoise) -> tuple[Tensor, Trace]:
        """The output of one attention, and the gradients of one or both."""
        parts: dict[Part, list[str]] = {self.output: []}  # whose gradients each attention gives
        if is_grad_enabled():
            for option, name in GRADIENTS.items():
                parts.setdefault(getattr(self, option), []).append(name)
        detached = inputs._replace(query=inputs.query.detach(), key=inputs.key.detach(), value=inputs.value.detach())
        output, trace = zeros(()), Trace()
        for part, names in parts.items():
            own = detached._replace(**{name: getattr(inputs, name) for name in names})
            if part == "exact":
                result = exact_output(own)
            else:
                result, trace = super().attend(own, noise)
            output = result if part == self.output else output + (result - result.detach())
        return output, trace

    def info(self, inputs: Inputs, trace: Trace, error: Info) -> Any:
        """What the cluster sketch reports; the error alone where nothing is sketched."""
        return error if trace.details is None else super().info(inputs, trace, error)


def exact_output(inputs: Inputs) -> Tensor:
    """softmax(s Q K^T) V."""
    mask = None if inputs.key_mask is None else inputs.key_mask[..., None, :]  # (b, 1, 1, n_k)
    query, key, value = inputs.query, inputs.key, inputs.value
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=inputs.scale)


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


METHODS = {
    name: Entry(
        kind,
        label,
        summary,
        "none: a benchmark",
        "O(n^2 p)",  # not marked as quadratic, which would keep it out of a model
        exact_from=LIBRARY["cluster"].exact_from,
        random=True,
        in_table_1=False,
    )
    for name, kind, label, summary in (
        ("mixed", Mixed, "Mixed", "the cluster sketch with exact parts put in"),
        ("policy", Policy, "Policy", "the cluster sketch with a policy of training"),
    )
}


def add_methods() -> None:
    """Add `mixed` and `policy` to the methods that this process knows by name."""
    for name in METHODS:
        resolve("benchmarks.gradients", name)
