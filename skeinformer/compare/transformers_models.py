"""The attention layers of Hugging Face models in a model: exact, sketched, or watched."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from skeinformer.attention import METHODS, Attention
from skeinformer.compare.layers import LayerCall
from skeinformer.huggingface.applied import implementations, outermost
from skeinformer.huggingface.interface import attention_forward, exact_forward, masks_of, sizes_of_call
from skeinformer.huggingface.rules import padding_mask, refuse_call, why_layer_is_exact
from skeinformer.huggingface.settings import LayerSettings
from skeinformer.huggingface.stack import layer_number
from skeinformer.nn.functional import hashable, left_out
from skeinformer.registry import lookup

SKETCHED, WATCHED = "skein-compared", "skein-watched"


class TransformersLayers:
    """The layers that `attn_implementation` decides. Call inside `registered`."""

    def __init__(self, model: nn.Module, method: str, seed: int, options: dict[str, Any]) -> None:
        lookup("attention", method, METHODS)
        if reason := left_out(method):
            raise ValueError(f"{method!r} cannot stand in for the attention of a model of transformers: {reason}")
        self.models = [part for _, part in outermost(model)]
        self.names = {module: name for name, module in model.named_modules()}
        self.before = implementations(model)
        kept = tuple((name, hashable(x)) for name, x in sorted(options.items()) if name != "budget")
        self.settings = LayerSettings(method, options.get("budget"), seed, min_length=0, options=kept)
        self.left: dict[str, str] = {}

    def exact(self) -> None:
        """As the models were, or by transformers' own kernel if they were sketched."""
        for config, name in self.before:
            config._attn_implementation_internal = "sdpa" if str(name).startswith("skein") else name

    def sketched(self) -> None:
        """All layers that can be, by the method."""
        AttentionInterface.register(SKETCHED, partial(attention_forward, self.settings))
        self._set(SKETCHED)

    def watched(self, observe: Callable[[LayerCall], None]) -> None:
        """Exact, and `observe` is told each call of a layer that `sketched` would sketch."""
        AttentionInterface.register(WATCHED, partial(self._watch, observe))
        self._set(WATCHED)

    def _set(self, name: str) -> None:
        AttentionMaskInterface.register(name, padding_mask)
        for model in self.models:
            model.set_attn_implementation(name)

    def _watch(
        self,
        observe: Callable[[LayerCall], None],
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        for option in self.settings.option_names & kwargs.keys():
            raise ValueError(f"the model is called with {option!r}, an option of the method; give it to compare itself")
        refuse_call(self.settings, query, key, attention_mask, kwargs)
        name, sizes = self.names.get(module, type(module).__name__), sizes_of_call(self.settings, ())
        reason = why_layer_is_exact(self.settings, sizes, module, query, key, attention_mask, is_causal, kwargs)
        if reason is not None:
            self.left[name] = reason
        else:
            masks = masks_of(module, query, key, attention_mask)
            layer, p = layer_number(module), query.shape[-1]

            def make(d: int) -> Attention:
                sized = self.settings if self.settings.budget is None else replace(self.settings, budget=d)
                return sized.build((), p, scaling, layer).eval()

            scale = 1 / math.sqrt(p) if scaling is None else scaling
            observe(LayerCall(name, query, key, value, masks["key_mask"], masks["query_mask"], scale, make))
        rest = {"scaling": scaling, "dropout": dropout, "is_causal": is_causal, **kwargs}
        return exact_forward(module, query, key, value, attention_mask, rest), None


@contextmanager
def registered() -> Iterator[None]:
    """Afterwards our two names are gone."""
    try:
        yield
    finally:
        for name in (SKETCHED, WATCHED):
            for table in (AttentionInterface, AttentionMaskInterface):
                table._global_mapping.pop(name, None)
