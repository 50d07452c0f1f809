"""Encoders of torch around attention layers of ours: what stays exact and short, torch computes as it always does.

In evaluation torch runs an `nn.TransformerEncoderLayer` as one call, and `nn.TransformerEncoder` packs padded input
into nested tensors. Both go around the attention layer. Torch asks two flags first, `self_attn._qkv_same_embed_dim` and
`use_nested_tensor`, and what is converted says no. The classes here say yes for one call, in one thread, where that
call stays exact and torch's own way takes less time. All other conditions are torch's, and torch checks them. It
overlooks some: it reads the weights of parts that may have been replaced, and knows of autocast on a GPU only. There
we keep saying no, so that short calls and long ones are by the same parts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

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
            now.packed if src.is_nested else faster_whole(src) and layer.left_to_torch(src) and of_torch(self, src)
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
        return layer.self_attn.left_to_torch(src) and of_torch(layer, src)
    return not holds_ours(layer)


def of_torch(layer: TransformerEncoderLayer, src: Tensor) -> bool:
    """Whether the weights of a layer are all there is to know of it: its parts are torch's, and nothing is cast.

    Torch's one call reads the weights and runs no part: not an adapter, another norm, or a dropout left in training.
    """
    parts = layer._modules
    for name, kind in PARTS.items():
        part = parts.get(name)
        if part is None or type(part) is not kind or "forward" in part.__dict__:
            return False
        if part._parameters.get("weight") is None or part._parameters.get("bias") is None:
            return False
    if any((drop := parts.get(name)) is None or drop.training for name in DROPOUTS):
        return False
    attention, activation = layer.self_attn, layer.activation
    if "forward" in attention.__dict__ or type(attention.out_proj) not in PROJECTIONS:
        return False
    known = 1 if activation is F.relu or type(activation) is nn.ReLU else 0
    if activation is F.gelu or (type(activation) is nn.GELU and activation.approximate == "none"):
        known = 2
    if known != layer.activation_relu_or_gelu:  # torch set it when the layer was made
        return False
    return not torch.is_autocast_enabled(src.device.type)


def holds_ours(module: nn.Module) -> bool:
    """Whether a layer of ours is in a module."""
    return any(isinstance(part, MultiheadAttention) for part in module.modules())


PARTS = {"linear1": nn.Linear, "linear2": nn.Linear, "norm1": nn.LayerNorm, "norm2": nn.LayerNorm}
PROJECTIONS = (NonDynamicallyQuantizableLinear, nn.Linear)
DROPOUTS = ("dropout", "dropout1", "dropout2")
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
        if "_use_nested_tensor_before" in module.__dict__:
            module.use_nested_tensor = module.__dict__.pop("_use_nested_tensor_before")
