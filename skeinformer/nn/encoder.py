"""Encoders of torch around attention layers of ours: what stays exact and short, torch computes as it always does.

In evaluation torch runs an `nn.TransformerEncoderLayer` as one call, and `nn.TransformerEncoder` packs padded input
into nested tensors. Both go around the attention layer. Torch asks two flags first, `self_attn._qkv_same_embed_dim` and
`use_nested_tensor`, and what is converted says no. The classes here say yes for one call, in one thread, where that
call stays exact and torch's own way takes less time. All other conditions are torch's, and torch checks them.
"""

from typing import Any

from torch import Tensor, nn

from skeinformer.kernels.choice import at_hand, recorded, watched
from skeinformer.nn.attention import MultiheadAttention, now, real_keys
from skeinformer.nn.decision import faster_packed, faster_whole


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """What `convert` makes of an encoder layer of torch: one call of torch's in evaluation, for short sequences."""

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As torch's."""
        told: tuple[Any, ...] = (src, src_mask, src_key_padding_mask, is_causal)
        if watched() or self.training or is_causal or not (src_mask is src_key_padding_mask is None):
            return super().forward(*told)
        layer = self.self_attn
        if not isinstance(layer, MultiheadAttention) or not (
            now.packed if src.is_nested else faster_whole(src) and layer.left_to_torch(src)
        ):
            return super().forward(*told)
        before, now.layer = now.layer, layer
        try:
            return super().forward(*told)
        finally:
            now.layer = before


class TransformerEncoder(nn.TransformerEncoder):
    """What `convert` makes of an encoder of torch: nested tensors in evaluation, for short batches of much padding."""

    # what the encoder was told stays in the object's dictionary
    @property
    def use_nested_tensor(self) -> bool:
        """Whether torch may pack the input of the call that is running."""
        return bool(self.__dict__["use_nested_tensor"]) and not watched() and now.encoder is self

    @use_nested_tensor.setter
    def use_nested_tensor(self, use: bool) -> None:
        self.__dict__["use_nested_tensor"] = use

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """As torch's."""
        told: tuple[Any, ...] = (src, mask, src_key_padding_mask, is_causal)
        if watched() or not self._packs(*told):
            return super().forward(*told)
        before = now.encoder, now.packed
        now.encoder, now.packed = self, True
        try:
            return super().forward(*told)
        finally:
            now.encoder, now.packed = before

    def _packs(self, src: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool | None) -> bool:
        """Whether packing takes less time, and every layer of ours would be exact."""
        if self.training or not self.__dict__["use_nested_tensor"] or mask is not None or is_causal:
            return False
        if padding is None or src.is_nested or src.dim() != 3 or not at_hand(padding):
            return False
        real = real_keys(padding, src, batch_first=True)
        if real is None or not faster_packed(src, real) or recorded(*self.layers.parameters()):
            return False
        return all(takes_nested(layer, src) for layer in self.layers)


def takes_nested(layer: nn.Module, src: Tensor) -> bool:
    """Whether torch may give nested tensors to a layer of an encoder: nobody looks in, and it would be exact on src."""
    if layer.training or any(part._forward_hooks or part._forward_pre_hooks for part in layer.modules()):
        return False
    if isinstance(layer, TransformerEncoderLayer) and isinstance(layer.self_attn, MultiheadAttention):
        return layer.self_attn.left_to_torch(src)
    return not holds_ours(layer)


def holds_ours(module: nn.Module) -> bool:
    """Whether a layer of ours is in a module."""
    return any(isinstance(part, MultiheadAttention) for part in module.modules())


OURS = {nn.TransformerEncoderLayer: TransformerEncoderLayer, nn.TransformerEncoder: TransformerEncoder}
TORCHS = {ours: kind for kind, ours in OURS.items()}


def change_encoders(model: nn.Module) -> None:
    """Let the encoders around layers of ours go by the classes of this file.

    A subclass of torch's encoder keeps its class, and is kept from packing at all.
    """
    for module in model.modules():
        kind = type(module)
        if kind in TORCHS or not isinstance(module, tuple(OURS)) or not holds_ours(module):
            continue
        if kind in OURS:
            module.__class__ = OURS[kind]
        elif isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
            module.__dict__["_use_nested_tensor_before"] = module.use_nested_tensor
            module.use_nested_tensor = False


def restore_encoders(model: nn.Module) -> None:
    """Undo it."""
    for module in model.modules():
        if type(module) in TORCHS:
            module.__class__ = TORCHS[type(module)]
        elif "_use_nested_tensor_before" in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop("_use_nested_tensor_before")
