"""Sketched attention in Hugging Face models: `attn_implementation="skein"`.

    from skeinformer import huggingface

    model = AutoModel.from_pretrained(name, attn_implementation="skein")        # by the default policy
    huggingface.register(budget=64)                                             # sets the default policy
    huggingface.sketch(model, "skeinformer", budget=256)                        # gives one model its own policy

A layer is sketched where it is bidirectional and its mask only says which keys are padding. Any other layer takes
transformers' exact kernel, `sdpa`, with the mask that it would have there. What neither can compute is a ValueError.
"""

from importlib.util import find_spec

if find_spec("transformers") is None:
    message = "skeinformer.huggingface needs transformers, of the extra `hf`: pip install 'skeinformer[hf]'"
    raise ModuleNotFoundError(message, name="transformers")

import copy
import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from skeinformer.attention.table import ADAPTIVE
from skeinformer.kernels.choice import built_once, forbid_double_backward, suppress_sdpa_mode
from skeinformer.models.hf_rules import NAME, check_call, four_dimensions, layer_number, make_mask, read_layer
from skeinformer.models.policy import CAUSAL, Call, Policy, notify_observer
from skeinformer.models.positions import configurations, extend_positions, outermost_models

__all__ = ["extend_positions", "register", "sketch", "watch"]

FIELD = "skeinformer"  # the field of a configuration that holds the policy of its model
_BEFORE = "_attention_before_sketch"  # attribute of a model: its attention before `sketch`
_default = Policy(ADAPTIVE)
_counters: list[Counter[str]] = []
# by the identity of a configuration: it, and how many calls were causal, -inf after one that was not
_causal_calls: dict[int, tuple[ref[Any], float]] = {}


def register(method: str | None = None, **options: Any) -> Policy:
    """Set the default policy: it is used by every model with `attn_implementation="skein"` but those given to `sketch`.

    Models that are already in use follow it too. `register()` sets the defaults again.

    Args:
        method: A name of METHODS. Methods with parameters, with shared keys or with quadratic time are refused. Without
            it each head gets the cheapest sketch that keeps `tolerance=`.
        **options: As in `Policy.create`. With a group every layer must be sketched (docs/distributed.md).

    Returns:
        The policy.

    Raises:
        TypeError, ValueError: An unknown method or option, or a wrong value.

    Example:
        >>> huggingface.register(budget=64, min_length=0)
        >>> model.set_attn_implementation("skein")
    """
    global _default
    _default = Policy.create(method, **options)
    _causal_calls.clear()
    return _default


def sketch(model: nn.Module, method: str | None = None, **options: Any) -> Policy:
    """Give one model a policy of its own, in place, and set its attention to "skein". `skeinformer.restore` undoes it.

    The policy is a plain dict in the model's configuration, so that `save_pretrained` writes it, and
    `from_pretrained(folder, attn_implementation="skein")` loads the model with it.

    Args:
        model: A model of transformers, or a module that holds such models, as a SentenceTransformer.
        method, **options: As for `register`, but no group.

    Returns:
        The policy.

    Raises:
        TypeError, ValueError: As `register`, or no model of transformers that chooses its attention by name.

    Example:
        >>> huggingface.sketch(model, "cluster", quality="accurate")
        >>> model.save_pretrained("sketched")
    """
    if "group" in options:
        raise TypeError("sketch takes no group, which no configuration can hold; use register(group=...)")
    policy = Policy.create(method, **options)
    settings = json.loads(json.dumps(policy.fields()))  # raises before anything changes
    parts = outermost_models(model)
    for part in parts.values():
        if not part._can_set_attn_implementation():
            raise ValueError(f"{type(part).__name__} does not choose its attention by name; try skeinformer.sketched()")
    for part in parts.values():
        if not hasattr(part.config, FIELD):
            vars(part).setdefault(_BEFORE, implementations(part.config))
        copies: dict[int, Any] = {}
        for module in part.modules():  # another model may have been built from the same configurations
            configs = {name: x for name, x in vars(module).items() if isinstance(x, PreTrainedConfig)}
            vars(module).update(copy.deepcopy(configs, copies))
        for config in configurations(part):
            setattr(config, FIELD, copy.deepcopy(settings))
        part.set_attn_implementation(NAME)
    return policy


def implementations(config: Any) -> Any:
    """Return the attention that a configuration names: one name, or a dict of those of its parts if they differ."""
    name, children = config._attn_implementation, {part: getattr(config, part, None) for part in config.sub_configs}
    parts = {part: implementations(child) for part, child in children.items() if child is not None}
    return name if all(other == name for other in parts.values()) else {"": name, **parts}


def restore_models(model: nn.Module) -> list[str]:
    """Undo `sketch` in all models of transformers in `model`, by name; one loaded with its policy gets "sdpa"."""
    restored = []
    for name, part in outermost_models(model, required=False).items():
        if not any(hasattr(config, FIELD) for config in configurations(part)):
            continue
        before = vars(part).pop(_BEFORE, "sdpa")
        if part.config._attn_implementation == NAME:
            part.set_attn_implementation(before)
        for config in configurations(part):
            vars(config).pop(FIELD, None)
        restored.append(name)
    return restored


@contextmanager
def watch() -> Iterator[Counter[str]]:
    """Count what the layers of all models do inside the block: "sketched", or the reason why one stayed exact.

    Gradient checkpointing counts a layer twice; a compiled model is not counted.

    Example:
        >>> with huggingface.watch() as counts:
        ...     model(tokens)
        >>> counts
        Counter({'sketched': 6})
    """
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        _counters[:] = [other for other in _counters if other is not counter]


def attend(
    module: nn.Module,
    query: Tensor,  # (b, h, n, p)
    key: Tensor,  # (b, h_kv, n_k, p)
    value: Tensor,  # (b, h_kv, n_k, p_v)
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute a layer's attention, (b, n, h, p_v), as transformers calls it. No weights are formed: they are None."""
    check_call(query, key, attention_mask, kwargs)
    settings = getattr(getattr(module, "config", None), FIELD, None)
    policy = _default if settings is None else read_policy(settings)
    call = Call(query, key, value, None, None, scaling, dropout, module.training, layer_number(module))
    call, reason = read_layer(policy, module, call, attention_mask, {"is_causal": is_causal, **kwargs})
    observed = notify_observer(call, reason, module)
    if not observed and not torch.compiler.is_compiling():
        for counter in _counters:
            counter[reason or "sketched"] += 1
        warn_of_causal(module, reason)
    if reason is None and not observed:
        return policy.attend(call).transpose(1, 2).contiguous(), None
    if policy.group is not None:
        why = f"has a group, and this layer would be exact ({reason or 'it is measured'}) on its own process's tokens"
        raise ValueError(f"attn_implementation={NAME!r} {why}; register without a group for this model")
    with suppress_sdpa_mode():
        mask = four_dimensions(attention_mask)  # transformers' kernel takes no mask of two dimensions
        options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        output: Tensor = sdpa_attention_forward(module, query, key, value, mask, **options)[0]
    return forbid_double_backward(output), None


@built_once
def read_policy(settings: Any) -> Policy:
    try:
        if not isinstance(settings, dict):
            raise TypeError(f"expected an object, got {type(settings).__name__}")
        return Policy.create(**copy.deepcopy(settings))
    except (TypeError, ValueError) as error:
        raise ValueError(f"field {FIELD!r} of the model's configuration holds no policy: {error}") from error


def warn_of_causal(module: nn.Module, reason: str | None) -> None:
    """Warn once for a model if as many calls as it has layers were all causal."""
    config = getattr(module, "config", None)
    if config is None or getattr(config, "is_encoder_decoder", False):
        return
    owner, before = _causal_calls.get(id(config), (ref(config), 0.0))
    before = before if owner() is config else 0.0  # another object had this identity
    calls = before + 1 if reason == CAUSAL else -math.inf
    _causal_calls[id(config)] = (ref(config), calls)
    if calls == (layers := getattr(config, "num_hidden_layers", 1)):
        why = f"sketches nothing in this model: its {layers} layers are causal, and stay exact; use 'sdpa' here"
        warnings.warn(f"attn_implementation={NAME!r} {why}", stacklevel=4)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
