"""The cluster sketch with exact parts put in: its output, and the gradients of Q, K and V, each exact or sketched.

Each part is what it is in a model that has nothing else of its kind, so that a difference in training is its own:

    R = R_a + [R_b - R_b] + [R_c - R_c]          the second of each pair carries no gradient

where R_a is the attention that gives the output, R_b and R_c are the others, and the gradient of each goes only to
those of Q, K and V that take it. An attention costs a forward pass: this is for studies.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.base import Attention, Trace
from skeinformer.attention.cluster import Cluster, ClusterNoise, ClusterOptions, Quality
from skeinformer.attention.inputs import Inputs
from skeinformer.attention.queries import Gradient
from skeinformer.noise import Rand

Output = Literal["exact", "sketch"]
GradientPart = Literal["exact", "keys", "queries"]
GRADIENTS = {"dq": "query", "dk": "key", "dv": "value"}  # options, and whose gradient they are


class MixedOptions(NamedTuple):
    """The output, and the gradients of queries, keys and values: exact, or those of the cluster sketch."""

    budget: int | None = None
    quality: Quality = "fast"
    num_pilots: int | None = None
    output: Output = "sketch"
    dq: GradientPart = "keys"
    dk: GradientPart = "keys"
    dv: GradientPart = "keys"


class Mixed(Attention):
    """The cluster sketch with an exact output, or with exact gradients of queries, keys or values."""

    Options = MixedOptions

    @staticmethod
    def complete(options: MixedOptions) -> MixedOptions:
        full = Cluster.complete(_cluster_options(options, "keys"))
        return options._replace(budget=full.budget, num_pilots=full.num_pilots)

    @staticmethod
    def draw(query: Tensor, key: Tensor, rand: Rand, options: MixedOptions) -> ClusterNoise:
        return ClusterNoise(*Cluster.draw(query, key, rand, _cluster_options(options, "keys")))

    @staticmethod
    def compute(inputs: Inputs, noise: ClusterNoise, options: MixedOptions) -> tuple[Tensor, Trace]:
        of_output: GradientPart = "exact" if options.output == "exact" else "keys"
        live: dict[GradientPart, list[str]] = {of_output: []}  # to whom the gradient of each attention goes
        if torch.is_grad_enabled():
            for option, name in GRADIENTS.items():
                live.setdefault(getattr(options, option), []).append(name)
        held = inputs._replace(query=inputs.query.detach(), key=inputs.key.detach(), value=inputs.value.detach())
        output, trace = torch.zeros(()), Trace()
        for part, names in live.items():
            alone = held._replace(**{name: getattr(inputs, name) for name in names})
            if part == "exact":
                found = exact_output(alone)
            else:
                found, trace = Cluster.compute(alone, noise, _cluster_options(options, part))
            output = found if part == of_output else output + (found - found.detach())
        return output, trace


def _cluster_options(options: MixedOptions, gradient: Gradient) -> ClusterOptions:
    return ClusterOptions(options.budget, options.quality, options.num_pilots, gradient=gradient)


def exact_output(inputs: Inputs) -> Tensor:
    """softmax(s Q K^T) V."""
    mask = None if inputs.key_mask is None else inputs.key_mask[..., None, :]  # (b, 1, 1, n_k)
    return F.scaled_dot_product_attention(inputs.query, inputs.key, inputs.value, attn_mask=mask)
