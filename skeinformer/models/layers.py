"""`torch.nn.MultiheadAttention` with sketched attention: its arguments, parameters, state_dict and call."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.attention import METHODS, Attention, build
from skeinformer.attention.table import DEFAULT
from skeinformer.distributed.handshake import broadcast_errors
from skeinformer.kernels.choice import is_eager_cpu
from skeinformer.models.policy import Call, MinLength, Policy, exact_attention, notify_observer


class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose heads attend by a method of METHODS.

    The result is (output, None): no weights are formed, so that `attn_mask`, `is_causal=True` and `need_weights=True`
    are errors, and a sketch ignores `dropout`. In self-attention, where query and key are the same object,
    `key_padding_mask` masks queries too: their rows are zero before the output projection. docs/drop-in.md has all that
    differs from torch.

    Args:
        embed_dim to dtype: As in torch.
        method: A name of METHODS. One with parameters for each position (linformer) needs `max_len=`, and adds them.
        min_length: Shorter calls are exact, unless the method has parameters; "auto": those that gain no time.
        **options: Those of `skeinformer.build`: budget, seed (0 by default), scale, group and the method's own.

    Raises:
        ValueError, TypeError: A method that a layer cannot have, an unknown option or a wrong value.

    Example:
        >>> layer = MultiheadAttention(64, 4, batch_first=True, budget=64)
        >>> output, _ = layer(x, x, x, key_padding_mask=padding)
    """

    attention: Attention
    policy: Policy
    index: int  # among the attention layers of a converted model: it draws by `layer_seed(seed, index)`

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
        min_length: MinLength = "auto",
        **options: Any,
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        self.policy = Policy.for_layer(method, min_length=min_length, **options)
        self.attention = build_attention(self, self.policy)
        self.index = 0

    @property
    def method(self) -> str:
        return self.policy.method

    # In evaluation torch's encoder layers compute attention themselves where this is True. Torch's own code that makes
    # and resets the weights needs the true value, and runs without `attention`.
    @property
    def _qkv_same_embed_dim(self) -> bool:
        return "attention" not in self._modules and bool(self.__dict__["_qkv_same_embed_dim"])

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, same: bool) -> None:
        self.__dict__["_qkv_same_embed_dim"] = same

    def _reset_parameters(self) -> None:
        attention = self._modules.pop("attention", None)
        super()._reset_parameters()
        if attention is not None:
            self._modules["attention"] = attention

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
        """Attend: (b, n, embed_dim) with `batch_first`, else (n, b, embed_dim); also (n, embed_dim).

        Args:
            query, key, value: As in torch.
            key_padding_mask: (b, n_k), boolean, True = padding, or floats 0 and -inf; (n_k,) without a batch.
            need_weights, attn_mask, average_attn_weights, is_causal: Only with the values that ask for nothing.

        Returns:
            The output and None.

        Raises:
            ValueError: Weights, a causal mask or an `attn_mask` are asked for, or a shape is wrong.
        """
        group = self.attention.group
        with nullcontext() if group is None else broadcast_errors(group):  # other ranks wait in the handshake
            if need_weights or attn_mask is not None or is_causal:
                argument = "is_causal=True" if attn_mask is None else "attn_mask"
                argument = "need_weights=True" if need_weights else argument
                why = "is not possible with sketched attention, which forms no weights and masks only padding"
                raise ValueError(f"{argument} {why}. Leave it out, or this layer out of convert by filter=...")
            sizes = (("query", query, self.embed_dim), ("key", key, self.kdim), ("value", value, self.vdim))
            for name, x, width in sizes:
                check_input(name, x, width, query.dim())
            key_mask = real_keys(key_padding_mask, key, batch_first=self.batch_first)
        query_mask = key_mask if query is key else None
        # the sizes alone decide, before anything is projected
        tokens = 1 if self.batch_first and query.dim() == 3 else 0
        n, n_k = query.shape[tokens], key.shape[tokens] + (self.bias_k is not None) + self.add_zero_attn
        reason = self.policy.reason_for_sizes(n, n_k, self.head_dim, self.training, query.device.type, self.attention)
        q, k, v = (self._heads(x) for x in self._project(query, key, value, together=reason is not None))
        k, v, key_mask = self._append_keys(k, v, key_mask)
        options = {**METHODS[self.policy.method].options, **({"dropout": self.dropout} if self.dropout else {})}
        options |= dict(self.policy.options)
        scale, dropout = options.get("scale"), options.get("dropout", 0.0) if self.training else 0.0
        call = Call(q, k, v, key_mask, query_mask, scale, dropout, self.training, self.index)
        exact = notify_observer(call, reason, self) or reason is not None
        output = exact_attention(call) if exact else self.policy.attend(call, self.attention)  # (b, h, n, p)
        output = output.transpose(1, 2) if self.batch_first else output.permute(2, 0, 1, 3)
        if query.dim() == 2:
            output = output.reshape(*query.shape[:-1], self.num_heads, self.head_dim)
        return F.linear(output.flatten(-2), self.out_proj.weight, self.out_proj.bias), None

    def _project(self, *inputs: Tensor, together: bool) -> Sequence[Tensor]:
        # one product leaves its three parts interleaved in memory: the kernel reads them so, but sketches gather rows
        if together and self.in_proj_weight is not None and all(x is inputs[0] for x in inputs):
            return F.linear(inputs[0], self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = apart if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, weight, bias) for x, weight, bias in zip(inputs, weights, biases, strict=True)]

    def _heads(self, x: Tensor) -> Tensor:
        x = x.view(*x.shape[:-1], self.num_heads, self.head_dim)  # (b, n, h, p), (n, b, h, p) or (n, h, p)
        if x.dim() == 3:
            return x.transpose(0, 1)[None]  # (1, h, n, p)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)  # (b, h, n, p)

    def _append_keys(self, k: Tensor, v: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """Append the learned key and value of `add_bias_kv` and the zeros of `add_zero_attn`, which are no padding."""
        added = [] if self.bias_k is None or self.bias_v is None else [(self.bias_k, self.bias_v)]
        if self.add_zero_attn:
            added.append((k.new_zeros(1, 1, self.embed_dim), v.new_zeros(1, 1, self.embed_dim)))
        for pair in added:
            key, value = (x.view(1, self.num_heads, 1, self.head_dim).expand(k.shape[0], -1, -1, -1) for x in pair)
            k, v = torch.cat([k, key.to(k.dtype)], -2), torch.cat([v, value.to(v.dtype)], -2)
            key_mask = None if key_mask is None else F.pad(key_mask, (0, 1), value=True)
        return k, v, key_mask

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}, batch_first={self.batch_first}, method={self.method!r}"


def build_attention(layer: nn.MultiheadAttention, policy: Policy) -> Attention:
    if reason := unsuitable_keys(layer, policy):
        raise ValueError(f"this layer cannot attend by {policy.method!r}: {reason}; choose another method")
    options = {**dict(policy.options), "budget": policy.budget, "seed": policy.seed, "group": policy.group}
    if options.get("conv_kernel") is not None:
        options.setdefault("num_heads", layer.num_heads)
    attention = build(policy.method, head_dim=layer.head_dim, **options)
    attention.seed = None  # it was checked; the policy gives every call its seed
    return place(attention, layer)


def unsuitable_keys(layer: nn.MultiheadAttention, policy: Policy) -> str | None:
    """Return why a policy cannot take the keys that `add_bias_kv` and `add_zero_attn` add, or None."""
    if layer.bias_k is None and not layer.add_zero_attn:
        return None
    if not policy.cross_attention:
        return f"add_bias_kv or add_zero_attn adds keys, and {policy.method} is a pattern over one sequence"
    return None if policy.group is None else "add_bias_kv and add_zero_attn add keys, which a group cannot divide"


def place(attention: Attention, layer: nn.MultiheadAttention) -> Attention:
    weight = layer.out_proj.weight
    return attention.to(device=weight.device, dtype=weight.dtype).train(layer.training)


def check_input(name: str, x: Tensor, width: int, dims: int) -> None:
    """Raise unless x is (.., .., width), or (.., width) without a batch, with as many dimensions as the query."""
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; set enable_nested_tensor=False in the encoder, or convert all of it"
        )
    if x.dim() not in (2, 3) or x.dim() != dims or x.shape[-1] != width:
        expected = f"{dims if dims in (2, 3) else '2 or 3'} dimensions, the last of {width}"
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {expected}, as many as the query")


def real_keys(padding: Tensor | None, key: Tensor, *, batch_first: bool) -> Tensor | None:
    """Convert torch's key_padding_mask to (b, n_k), True = real."""
    if padding is None:
        return None
    expected = tuple(key.shape[:-1]) if key.dim() == 2 or batch_first else (key.shape[1], key.shape[0])
    if padding.dtype != torch.bool and not padding.is_floating_point():
        raise TypeError(f"key_padding_mask is {padding.dtype}, expected a boolean tensor, or floats 0 and -inf")
    if tuple(padding.shape) != expected:
        raise ValueError(f"key_padding_mask has shape {tuple(padding.shape)}, expected {expected}")
    real = ~padding if padding.dtype == torch.bool else padding == 0
    message = "key_padding_mask has numbers other than 0 and -inf; give a boolean mask, True = padding"
    allowed = (real | (padding == -torch.inf)).all() if padding.is_floating_point() else None
    if allowed is not None and not is_eager_cpu(padding):
        torch._assert_async(allowed, message)  # compiles, and need not wait for a GPU
    elif allowed is not None and not allowed:
        raise ValueError(message)
    return real[None] if key.dim() == 2 else real
