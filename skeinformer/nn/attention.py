"""`torch.nn.MultiheadAttention` with sketched attention: its arguments, parameters, state_dict and call.

`MultiheadAttention(64, 4, budget=64)` goes where `torch.nn.MultiheadAttention(64, 4)` went, also
inside `nn.TransformerEncoderLayer`, and weights load across in both directions. `skeinformer.nn.convert` puts it into a
model that exists.
"""

import warnings
from collections.abc import Sequence
from threading import local
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.attention import METHODS, Attention, build
from skeinformer.attention.methods import DEFAULT
from skeinformer.kernels.choice import at_hand, recorded, watched
from skeinformer.nn.decision import AUTO, MinLength, check_min_length, why_exact
from skeinformer.nn.functional import asked_sizes, exact_with_masks
from skeinformer.registry import check_count, check_flag, lookup


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose heads attend by a method of METHODS.

    Positional arguments are torch's. `method` and its options go to `build`: budget, num_pilots, seed and so on, with
    the method's own defaults; a method with parameters for each position (linformer) also needs max_len, and adds
    parameters. Without a seed of yours evaluation is deterministic (`seed=0`); training draws anew at every call.
    A call with fewer queries or keys than `min_length` is computed exactly; "auto" are those that a sketch would not
    make faster, by `skeinformer.nn.worth_sketching`, and none for a method with parameters. So is a call with no more
    keys than the budget, by methods that are exact there. With `group=` tokens are divided among its ranks, each rank
    passes its share, and every call is computed by the method (docs/distributed.md).

    What differs from torch:
      - `need_weights` is False unless given, and the result is (output, None): no weights are formed.
      - In self-attention `key_padding_mask` masks queries too: their rows are zero before the output projection, so
        they come out as its bias. In cross-attention it masks keys only. Which of the two a call is, `self_attention`
        says; None, the default, goes by `query is key`, the same object.
      - Keys that are all padding give zero, where torch gives NaN.
      - `dropout` acts on attention weights, which a sketch does not form: it is ignored, with one warning, by every
        method but "softmax" and "softmax_dropout". Calls that are computed exactly have it.
      - `attn_mask`, `is_causal=True` and `need_weights=True` are errors.
    """

    attention: Attention
    self_attention: bool | None
    min_length: MinLength = AUTO

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        method: str = DEFAULT,
        self_attention: bool | None = None,
        min_length: MinLength = AUTO,
        **options: Any,
    ) -> None:
        check_count("embed_dim", embed_dim)
        check_count("num_heads", num_heads)
        if embed_dim % num_heads:
            raise ValueError(
                f"embed_dim={embed_dim} is not a multiple of num_heads={num_heads}; heads share it equally"
            )
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.notice = DropoutNotice()
        self.configure(method, self_attention=self_attention, min_length=min_length, **options)

    def configure(
        self,
        method: str,
        *,
        self_attention: bool | None = None,
        min_length: MinLength | None = None,
        **options: Any,
    ) -> None:
        """Attend by another method, or with other options.

        The weights stay, and so do `self_attention` and `min_length` if None.
        """
        check_self_attention(self_attention)
        if min_length is not None:
            check_min_length(min_length)
        self.attention = build_attention(self, method, **options)
        self.method = method
        self.self_attention = getattr(self, "self_attention", None) if self_attention is None else self_attention
        self.min_length = self.min_length if min_length is None else min_length

    # torch's encoder layers compute attention themselves in evaluation ("fast path", nested tensors) and never call a
    # module that says yes here; ours (encoder.py) lets it, for one call. What is true of the weights stays in the
    # object's dictionary, and decides their making
    @property
    def _qkv_same_embed_dim(self) -> bool:
        same = bool(self.__dict__["_qkv_same_embed_dim"])
        return same and ("attention" not in self._modules or (not watched() and now.layer is self))

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, same: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = same

    def _reset_parameters(self) -> None:
        """As torch does, number by number."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for added in (self.bias_k, self.bias_v):
            if added is not None:
                nn.init.xavier_normal_(added)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """(output, None) for (b, n, embed_dim) if `batch_first`, else (n, b, embed_dim); (n, embed_dim) too.

        key_padding_mask: (b, n_k), boolean, True = padding, or a float mask of 0 and -inf; (n_k,) without a batch.
        """
        if query.is_nested and now.layer is self:  # torch has packed what stays exact
            return cast(tuple[Tensor, None], super().forward(query, key, value, need_weights=False))
        refuse(need_weights, attn_mask, is_causal)
        check_input("query", query, self.embed_dim, query.dim())
        for name, x, width in (("key", key, self.kdim), ("value", value, self.vdim)):
            if x is not query or width != self.embed_dim:
                check_input(name, x, width, query.dim())
        key_mask = real_keys(key_padding_mask, key, batch_first=self.batch_first)
        query_mask = key_mask if self._is_self_attention(query, key) else None
        exact = self.why_exact(query, key, value) is not None
        q, k, v = (self._heads(x) for x in self._project(query, key, value, together=exact))
        k, v, key_mask = self._append_keys(k, v, key_mask)
        output = self._attend(q, k, v, key_mask, query_mask, exact)  # (b, h, n, p)
        output = output.transpose(1, 2) if self.batch_first else output.permute(2, 0, 1, 3)
        if query.dim() == 2:
            output = output.reshape(*query.shape[:-1], self.num_heads, self.head_dim)
        return F.linear(output.flatten(-2), self.out_proj.weight, self.out_proj.bias), None

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, query_mask: Tensor | None, exact: bool
    ) -> Tensor:
        """(b, h, n, p), by the method or exactly."""
        dropout = self.dropout if self.training else 0.0
        if exact:
            scale = getattr(self.attention.options, "scale", None)
            return exact_with_masks(q, k, v, key_mask, query_mask, dropout, scale)
        if dropout > 0 and not drops_weights(self.method):
            self.notice.give(dropout, self.method)
        output: Tensor = self.attention(q, k, v, key_mask=key_mask, query_mask=query_mask)
        return output

    def why_exact(self, query: Tensor, key: Tensor, value: Tensor) -> str | None:
        """Why a call with these inputs is computed exactly, or None where the method computes it."""
        attention = self.attention
        if not isinstance(attention, Attention) or has_parameters(attention):
            return None  # a method with parameters would never be trained
        if attention.group is not None:
            return None  # other ranks hold tokens too
        gradients = self.training or (torch.is_grad_enabled() and recorded(query, key, value, *self._of_projections()))
        tokens = 1 if self.batch_first and query.dim() == 3 else 0
        n, n_k = query.shape[tokens], key.shape[tokens] + (self.bias_k is not None) + self.add_zero_attn
        budget, num_pilots, gradient = asked_sizes(attention)
        sizes = (n, n_k, budget, num_pilots, self.head_dim)
        return why_exact(self.min_length, *sizes, gradients, self.method, query.device.type, gradient)

    def _of_projections(self) -> list[Tensor]:
        """The parameters that queries, keys and values are made with."""
        weights = (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        return [x for x in (*weights, self.in_proj_bias, self.bias_k, self.bias_v) if x is not None]

    def left_to_torch(self, src: Tensor) -> bool:
        """Whether torch would compute self-attention of src as this layer does: exactly, by the same scale and keys."""
        if self.why_exact(src, src, src) is None or adds_keys(self):
            return False
        return getattr(self.attention.options, "scale", None) is None

    def _is_self_attention(self, query: Tensor, key: Tensor) -> bool:
        if self.self_attention and query.shape[:-1] != key.shape[:-1]:
            raise ValueError(
                f"query has shape {tuple(query.shape)} and key {tuple(key.shape)}, but this layer has "
                "self_attention=True, where both are the same sequence"
            )
        return query is key if self.self_attention is None else self.self_attention

    def _project(self, *inputs: Tensor, together: bool) -> Sequence[Tensor]:
        """Each of query, key and value by its weights, (..., embed_dim).

        together: where they are one tensor, by one product; the three then lie beside each other in memory, which the
        fused kernel does not mind, and sketches that gather rows do.
        """
        if together and self.in_proj_weight is not None and all(x is inputs[0] for x in inputs):
            return F.linear(inputs[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        if self.in_proj_weight is not None:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]

    def _heads(self, x: Tensor) -> Tensor:
        x = x.view(*x.shape[:-1], self.num_heads, self.head_dim)  # (b, n, h, p), (n, b, h, p) or (n, h, p)
        if x.dim() == 3:
            return x.transpose(0, 1)[None]  # (1, h, n, p)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)  # (b, h, n, p)

    def _append_keys(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys and values with the learned one of `add_bias_kv` and the zero of `add_zero_attn`, both real."""
        added = [] if self.bias_k is None or self.bias_v is None else [(self.bias_k, self.bias_v)]
        if self.add_zero_attn:
            added.append((k.new_zeros(1, 1, self.embed_dim), v.new_zeros(1, 1, self.embed_dim)))
        for key, value in added:
            size = (1, self.num_heads, 1, self.head_dim)
            k = torch.cat([k, key.view(size).to(k.dtype).expand(k.shape[0], -1, -1, -1)], -2)
            v = torch.cat([v, value.view(size).to(v.dtype).expand(v.shape[0], -1, -1, -1)], -2)
            key_mask = None if key_mask is None else F.pad(key_mask, (0, 1), value=True)
        return k, v, key_mask

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}, method={self.method!r}"


class Now(local):
    """What torch may compute itself in the call that is running, in this thread."""

    def __init__(self) -> None:
        self.layer: MultiheadAttention | None = None
        """Whose encoder layer it may run as one call."""
        self.encoder: nn.TransformerEncoder | None = None
        """Which encoder may pack its input."""
        self.packed = False
        """Whether nested tensors are what it has packed."""


now = Now()


class DropoutNotice:
    """One warning for all layers that hold it; a copy of a layer holds the same."""

    def __init__(self) -> None:
        self.given = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "DropoutNotice":
        return self

    def give(self, dropout: float, method: str) -> None:
        if self.given or torch.compiler.is_compiling():  # a compiled graph cannot hold a warning
            return
        self.given = True
        warnings.warn(
            f"dropout={dropout:g} is ignored: it acts on attention weights, and {method!r} computes none. Set the "
            "layer's dropout to 0, or use method='softmax'",
            stacklevel=3,
        )


def build_attention(layer: nn.MultiheadAttention, method: str, **options: Any) -> Attention:
    """The attention of one layer, with its device, dtype and mode, or an error that says why it cannot have it."""
    entry = lookup("attention", method, METHODS)
    if not entry.cross_attention and adds_keys(layer):
        raise ValueError(
            f"{method!r} is a pattern over the positions of one sequence, and the keys that add_bias_kv and "
            "add_zero_attn add have no position; build without them, or choose a method that takes cross-attention"
        )
    if options.get("group") is not None and adds_keys(layer):
        raise ValueError(
            "add_bias_kv and add_zero_attn add keys that are not tokens, and with a group every rank would add them; "
            "build without them"
        )
    if drops_weights(method):
        options = {"dropout": layer.dropout, **options}
    if options.get("conv_kernel") is not None:
        options = {"num_heads": layer.num_heads, **options}
    if entry.shares_keys:
        raise ValueError(
            f"{method!r} needs the same vectors as queries and as keys, but this layer projects them by different "
            "weights; choose another method"
        )
    return place(build(method, **{"head_dim": layer.head_dim, "seed": 0, **options}), layer)


def drops_weights(method: str) -> bool:
    """Whether the method applies dropout to attention weights, as torch does; the others form no weights to drop."""
    return "dropout" in METHODS[method].option_names()


def place(attention: Attention, layer: nn.MultiheadAttention) -> Attention:
    """The attention with the device, dtype and mode of the layer."""
    weight = layer.out_proj.weight
    return attention.to(device=weight.device, dtype=weight.dtype).train(layer.training)


def check_self_attention(value: object) -> None:
    """Raise a TypeError unless `value` is True, False or None."""
    if value is not None:
        check_flag("self_attention", value)


def adds_keys(layer: nn.MultiheadAttention) -> bool:
    """Whether the layer attends to keys beside those it is given."""
    return layer.bias_k is not None or layer.add_zero_attn


def has_parameters(module: nn.Module) -> bool:
    """Whether a module, or a part of it, has any."""
    return bool(module._parameters or module._modules) and next(module.parameters(), None) is not None


def refuse(need_weights: bool, attn_mask: Tensor | None, is_causal: bool) -> None:
    """Raise for what a sketch cannot give."""
    if not need_weights and attn_mask is None and not is_causal:
        return
    what = {
        "need_weights=True": (need_weights, "it computes no matrix of weights. Call with need_weights=False"),
        "attn_mask": (attn_mask is not None, "only padding can be masked. Give it as key_padding_mask"),
        "is_causal=True": (is_causal, "every query sees every key that is not padding. Leave is_causal out"),
    }
    for argument, (asked, why) in what.items():
        if asked:
            raise ValueError(
                f"{argument} is not possible with sketched attention: {why}, or leave this layer as it was "
                "(skeinformer.convert with filter=...)"
            )


def check_input(name: str, x: Tensor, width: int, dims: int) -> None:
    """Raise unless x is (.., .., width), or (.., width) without a batch, with as many dimensions as the query."""
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; build the nn.TransformerEncoder around this layer with "
            "enable_nested_tensor=False, or call skeinformer.nn.convert on the whole encoder"
        )
    if x.dim() not in (2, 3) or x.dim() != dims or x.shape[-1] != width:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, expected 3 dimensions, or 2 without a batch, the same number for "
            f"query, key and value, and a last dimension of {width}"
        )


def real_keys(padding: Tensor | None, key: Tensor, *, batch_first: bool) -> Tensor | None:
    """torch's key_padding_mask as ours: (b, n_k), True = real."""
    if padding is None:
        return None
    expected = tuple(key.shape[:-1]) if key.dim() == 2 or batch_first else (key.shape[1], key.shape[0])
    if not isinstance(padding, Tensor) or not (padding.dtype == torch.bool or padding.is_floating_point()):
        kind = padding.dtype if isinstance(padding, Tensor) else type(padding).__name__
        raise TypeError(f"key_padding_mask is {kind}, expected a boolean tensor, True = padding, or floats 0 and -inf")
    if tuple(padding.shape) != expected:
        raise ValueError(f"key_padding_mask has shape {tuple(padding.shape)}, expected {expected}")
    if padding.dtype == torch.bool:
        real = ~padding
    else:
        real = padding == 0
        message = (
            "key_padding_mask has numbers other than 0 and -inf, which torch would add to the scores; give a boolean"
        )
        allowed = (real | (padding == -torch.inf)).all()
        if not at_hand(padding):
            torch._assert_async(allowed, message)  # compiles, and a GPU need not be waited for
        elif not allowed:
            raise ValueError(f"{message} mask, True = padding")
    return real[None] if key.dim() == 2 else real
