"""The attention layers of torch in a model: exact, sketched, or watched."""

import math
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn

from skeinformer.attention import Attention
from skeinformer.attention.exact import Softmax
from skeinformer.compare.layers import LayerCall
from skeinformer.nn.applied import make_layers_exact
from skeinformer.nn.attention import MultiheadAttention, build_attention
from skeinformer.nn.convert import attention_layers, convert


class TorchLayers:
    """Every `nn.MultiheadAttention` of a model, and those of `skeinformer.nn`. Call inside `arranged`."""

    def __init__(self, model: nn.Module, method: str, seed: int, options: dict[str, Any]) -> None:
        self.model = model
        self.method = method
        self.options = {**options, "seed": seed}
        self.left: dict[str, str] = {}

    def exact(self) -> None:
        """Layers of torch as torch computes them; layers built as ours by exact attention."""
        make_layers_exact(self.model)

    def sketched(self) -> None:
        """All layers that `convert` takes by the method."""
        self.left = dict(convert(self.model, self.method, min_length=0, **self.options).left)

    def watched(self, observe: Callable[[LayerCall], None]) -> None:
        """Exact, and `observe` is told each call of a layer that `sketched` would sketch."""
        self.sketched()
        for name, layer in attention_layers(self.model)[0].items():
            if name not in self.left:
                ours = cast(MultiheadAttention, layer)
                ours.attention = cast(Attention, Watched(name, ours, self.method, self.options, observe))


class Watched(nn.Module):
    """Exact attention of a layer that tells what it was called with."""

    def __init__(
        self,
        name: str,
        layer: MultiheadAttention,
        method: str,
        options: dict[str, Any],
        observe: Callable[[LayerCall], None],
    ) -> None:
        super().__init__()
        seed, scale = layer.attention.seed, options.get("scale")
        self.name = name or type(layer).__name__
        self.exact = Softmax(head_dim=layer.head_dim, scale=scale)
        self.scale = 1 / math.sqrt(layer.head_dim) if scale is None else scale
        self.observe = observe

        def make(d: int) -> Attention:
            sized = (
                {"budget": d} if "budget" in options else {}
            )  # else another option sets the size, or nothing has one
            return build_attention(layer, method, **{**options, **sized, "seed": seed})

        self.make = make

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, key_mask: Tensor | None, query_mask: Tensor | None
    ) -> Tensor:
        self.observe(LayerCall(self.name, query, key, value, key_mask, query_mask, self.scale, self.make))
        output: Tensor = self.exact(query, key, value, key_mask=key_mask, query_mask=query_mask)
        return output
