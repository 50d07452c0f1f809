"""The cluster sketch with exact parts put in: its output, and the gradients of Q, K and V, each exact or sketched.

Each part is what it is in a model that has nothing else of its kind, so that a difference in training is its own:

    R = R_a + [R_b - R_b]          the second of the pair carries no gradient

where R_a is the attention that gives the output and R_b is the other one, and the gradient of each goes only to those
of Q, K and V that take it. An attention costs a forward pass: this is for studies.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.attention.base import Trace
from skeinformer.attention.certificate import Info
from skeinformer.attention.cluster import Cluster, ClusterNoise
from skeinformer.attention.inputs import Inputs

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
        if torch.is_grad_enabled():
            for option, name in GRADIENTS.items():
                parts.setdefault(getattr(self, option), []).append(name)
        detached = inputs._replace(query=inputs.query.detach(), key=inputs.key.detach(), value=inputs.value.detach())
        output, trace = torch.zeros(()), Trace()
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
