"""The calls of `scaled_dot_product_attention` that a model makes itself: exact, sketched, or watched.

The calls of one forward pass are its layers, named `call 0`, `call 1` and so on in their order.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Literal

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from skeinformer.attention import METHODS, Attention
from skeinformer.compare.layers import LayerCall
from skeinformer.kernels.inside import is_inside
from skeinformer.nn.functional import OF_THE_CALL, Settings, decide, exactly, hashable, left_out, sketch_call
from skeinformer.nn.scope import arguments, without
from skeinformer.nn.shapes import as_torch, to_four
from skeinformer.noise import layer_seed
from skeinformer.registry import lookup


class SdpaCalls(TorchFunctionMode):
    """What a model calls while it is entered. `exact`, `sketched` and `watched` also begin to count anew."""

    def __init__(self, method: str, seed: int, options: dict[str, Any]) -> None:
        super().__init__()
        lookup("attention", method, METHODS)
        own = {name: x for name, x in sorted(options.items()) if name not in ("budget", *OF_THE_CALL)}
        given = tuple((name, hashable(x)) for name, x in own.items())
        self.settings: Settings | None = None
        if left_out(method) is None:
            self.settings = Settings(method, options.get("budget"), 0, seed, given)
        self.refusal = f"{method} cannot stand in for a call: {left_out(method)}"
        self.left: dict[str, str] = {}
        self.exact()

    def exact(self) -> None:
        """As torch computes them."""
        self._begin("exact")

    def sketched(self) -> None:
        """All calls that can be, by the method."""
        self._begin("sketched")

    def watched(self, observe: Callable[[LayerCall], None]) -> None:
        """Exact, and `observe` is told each call that `sketched` would sketch."""
        self._begin("watched")
        self.observe = observe

    def _begin(self, state: Literal["exact", "sketched", "watched"]) -> None:
        self.state, self.numbers = state, count()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is not F.scaled_dot_product_attention or is_inside() or self.state == "exact":
            return func(*args, **kwargs)
        call, number = arguments(args, kwargs), next(self.numbers)
        reason, mask = self._decide(call)
        query, key, value, scale = (call[name] for name in ("query", "key", "value", "scale"))
        if reason is None and self.state == "sketched":
            assert self.settings is not None
            output = sketch_call(self.settings, number, to_four(query, key, value, mask), scale).output
            return as_torch(output, query, key, value, call["attn_mask"])
        if self.state == "watched":
            if reason is not None:
                self.left[f"call {number}"] = reason
            else:
                self._tell(number, call, mask)
        return exactly(**call)

    def _decide(self, call: dict[str, Any]) -> tuple[str | None, Tensor | None]:
        """Why a call stays exact, or None; and its mask of padding."""
        return (self.refusal, None) if self.settings is None else decide(self.settings, **without(call, "scale"))

    def _tell(self, number: int, call: dict[str, Any], mask: Tensor | None) -> None:
        settings, scale = self.settings, call["scale"]
        assert settings is not None
        query, key, value, key_mask = to_four(call["query"], call["key"], call["value"], mask)
        p = query.shape[-1]

        def make(d: int) -> Attention:
            sized = settings if settings.budget is None else replace(settings, budget=d)
            return sized.build(p, scale, layer_seed(settings.seed, number))

        query_mask = None if METHODS[settings.method].cross_attention else key_mask
        own = 1 / math.sqrt(p) if scale is None else scale
        self.observe(LayerCall(f"call {number}", query, key, value, key_mask, query_mask, own, make))
