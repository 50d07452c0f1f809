"""Learned positions for longer texts than a model was trained on: `extend_positions`."""

from itertools import product
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from skeinformer.checks import check_count

TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")  # attribute names in models
MAXIMUM = "max_position_embeddings"


def extend_positions(model: Any, length: int, *, tokenizer: Any = None) -> None:
    """Let a model with learned positions take at least `length` tokens, in place: positions begin again after the last.

    Token i of a model that was trained on 512 tokens has the position i mod 512. No pretraining has seen that: measure
    whether the result is useful. The configuration changes too. Call it before making an optimizer and compiling.

    Args:
        model: A model of transformers, or a SentenceTransformer or pipeline, which then no longer cuts off such texts.
        length: The number of tokens.
        tokenizer: The tokenizer of a bare model, whose `model_max_length` grows too.

    Raises:
        TypeError, ValueError: `model` is none of these, or has no table of learned positions of a known kind.

    Example:
        >>> extend_positions(model, 2048, tokenizer=tokenizer)
    """
    check_count("length", length)
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        expected = "a model of transformers, a SentenceTransformer or a pipeline"
        raise TypeError(f"expected {expected}, got {type(model).__name__}")
    tables = [(part, parent, name) for part in outermost_models(module).values() for parent, name in find_tables(part)]
    for part, parent, name in tables:
        extend_table(part, parent, name, length)
    longest = min(num_positions(getattr(parent, name)) for _, parent, name in tables)
    lengthen_tokenizers(model, module, tokenizer, length, longest)


def outermost_models(model: nn.Module, required: bool = True) -> dict[str, PreTrainedModel]:
    """Return the models of transformers in `model` that are not part of another one, by name."""
    models: dict[str, PreTrainedModel] = {}
    parts: set[nn.Module] = set()  # modules of the models so far, which come before their parts
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel) and module not in parts:
            models[name] = module
            parts.update(module.modules())
    if required and not models:
        raise ValueError(f"{type(model).__name__} holds no model of transformers")
    return models


def configurations(model: nn.Module) -> list[Any]:
    """Return every configuration in `model` once, those of parts included."""
    by_identity: dict[int, Any] = {}
    remaining: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    while remaining:
        config = remaining.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in by_identity:
            by_identity[id(config)] = config
            remaining += [getattr(config, name, None) for name in config.sub_configs]
    return list(by_identity.values())


def find_tables(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return each module that has a table of learned positions of tokens, and the table's name in it."""
    longest = {getattr(config, MAXIMUM, None) for config in configurations(model)}
    tables, kind = [], type(model).__name__
    for parent, name in product(model.modules(), TABLES):
        table = getattr(parent, name, None)
        if isinstance(table, nn.Embedding) and not {table.num_embeddings, num_positions(table)}.isdisjoint(longest):
            tables.append((parent, name))
    for parent, name in tables:  # all are checked before any is changed
        table, numbers = getattr(parent, name), parent._buffers.get("position_ids")
        if "Sinusoidal" in type(table).__name__:
            raise ValueError(f"the positions of {kind} are not learned; use model.resize_position_embeddings")
        if numbers is not None and not torch.equal(numbers.flatten().cpu(), torch.arange(table.num_embeddings)):
            raise ValueError(f"{type(parent).__name__} of {kind} counts positions in an unknown way")
    if tables:
        return tables
    if any(name.rpartition(".")[2] in TABLES for name, _ in model.named_parameters()):
        raise ValueError(f"{kind} has no positions of tokens; models of images take interpolate_pos_encoding=True")
    raise ValueError(f"{kind} has no table of learned positions: rotary and relative ones need nothing at any length")


def first_position(table: nn.Embedding) -> int:
    """Return the row of the first token: in RoBERTa and MPNet the one after the padding index, in BART the third."""
    offset: int | None = getattr(table, "offset", None)
    after_padding = 0 if table.padding_idx is None else table.padding_idx + 1
    return after_padding if offset is None else offset


def num_positions(table: nn.Embedding) -> int:
    return table.num_embeddings - first_position(table)


def extend_table(model: nn.Module, parent: nn.Module, name: str, length: int) -> None:
    """Lengthen one table, the buffers of its length, and the configurations that have its length."""
    table: nn.Embedding = getattr(parent, name)
    first, positions, rows = first_position(table), num_positions(table), table.num_embeddings
    if positions >= length:
        return
    source = torch.cat([torch.arange(first), first + torch.arange(length) % positions]).to(table.weight.device)
    table.weight = nn.Parameter(table.weight.detach()[source], requires_grad=table.weight.requires_grad)
    table.num_embeddings = len(source)
    for other in ("position_ids", "token_type_ids"):
        buffer = parent._buffers.get(other)
        if buffer is not None and buffer.shape == (1, rows):
            numbers = torch.arange(len(source), device=buffer.device, dtype=buffer.dtype)
            parent._buffers[other] = (numbers if other == "position_ids" else torch.zeros_like(numbers))[None]
    for config in configurations(model):
        if getattr(config, MAXIMUM, None) in (rows, positions):
            setattr(config, MAXIMUM, getattr(config, MAXIMUM) + length - positions)


def lengthen_tokenizers(model: Any, module: nn.Module, tokenizer: Any, length: int, longest: int) -> None:
    """Let tokenizers and SentenceTransformers pass texts of `length` tokens uncut, and none longer than `longest`."""
    holders = [(part, "max_seq_length") for part in (module, *module.children())]
    tokenizers = [tokenizer, *(getattr(holder, "tokenizer", None) for holder in (model, *module.modules()))]
    for holder, name in [*holders, *((one, "model_max_length") for one in tokenizers)]:
        current = getattr(holder, name, None)
        if isinstance(current, int) and not length <= current <= longest:
            setattr(holder, name, length if current < length else longest)
