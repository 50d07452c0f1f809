"""Learned positions for longer texts than a model was trained on: `extend_positions`."""

from typing import Any

import torch
from torch import nn

from skeinformer.huggingface.applied import implementations, outermost
from skeinformer.registry import check_count

TABLES = ("position_embeddings", "position_embedding", "embed_positions", "wpe")  # what models call the table
MAXIMUM = "max_position_embeddings"


def extend_positions(model: Any, length: int, *, tokenizer: Any = None) -> None:
    """Let a model with learned positions take at least `length` tokens, in place: after the last one they begin again.

    Token i of a model that was trained on 512 has the position i mod 512 (RoBERTa's and MPNet's begin after the padding
    index). All tokens attend to all, which no pretraining has seen: this is a way to run a short model on a long text,
    and whether the result is useful is to be measured. Nothing changes for texts that were short enough before.

    model: of transformers, a SentenceTransformer or a pipeline, which then no longer cut texts of that length off;
    beside a bare model its `tokenizer` may be given. The configuration has the number too, so that the model is saved
    and loaded with it. Call it before an optimizer is made, and before the model is compiled.
    """
    check_count("length", length)
    whole = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(whole, nn.Module):
        raise TypeError(
            f"expected a model of transformers, a SentenceTransformer or a pipeline, got {type(model).__name__}"
        )
    parts = [part for _, part in outermost(whole)]
    if not parts:
        raise ValueError(f"{type(whole).__name__} holds no model of transformers")
    found = [(part, position_tables(part)) for part in parts]
    for part, tables in found:  # all are looked at before any is changed
        for parent, name in tables:
            check_table(part, parent, name)
    for part, tables in found:
        for parent, name in tables:
            extend_table(part, parent, name, length)
    longest = min(num_positions(getattr(parent, name)) for _, tables in found for parent, name in tables)
    lengthen_tokenizers(model, whole, tokenizer, length, longest)


def position_tables(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The modules with a table of learned positions of tokens, and its name there; a ValueError if there is none."""
    longest = {getattr(config, MAXIMUM, None) for config, _ in implementations(model)}
    found = []
    for parent in model.modules():
        for name in TABLES:
            table = getattr(parent, name, None)
            if isinstance(table, nn.Embedding) and not {table.num_embeddings, num_positions(table)}.isdisjoint(longest):
                found.append((parent, name))
    if found:
        return found
    kind = type(model).__name__
    if any(name.rpartition(".")[2] in TABLES for name, _ in model.named_parameters()):
        raise ValueError(
            f"the positions of {kind} are not of tokens; models of images take interpolate_pos_encoding=True"
        )
    raise ValueError(
        f"{kind} has no table of learned positions: rotary and relative positions go on for any length, and nothing is "
        "needed. Where texts are cut off, set max_seq_length of the SentenceTransformer, or model_max_length of the "
        "tokenizer"
    )


def first_position(table: nn.Embedding) -> int:
    """The row of the first token: RoBERTa's and MPNet's is the one after the padding index, BART's the third."""
    offset: int | None = getattr(table, "offset", None)
    if offset is not None:
        return offset
    return 0 if table.padding_idx is None else table.padding_idx + 1


def num_positions(table: nn.Embedding) -> int:
    """The longest text that has a position of its own for every token."""
    return table.num_embeddings - first_position(table)


def check_table(model: nn.Module, parent: nn.Module, name: str) -> None:
    """Raise a ValueError unless we know how to make the table longer."""
    table, kind = getattr(parent, name), type(model).__name__
    if "Sinusoidal" in type(table).__name__:
        raise ValueError(f"the positions of {kind} are not learned; use model.resize_position_embeddings")
    numbers = parent._buffers.get("position_ids")
    if numbers is not None and not torch.equal(numbers.flatten().cpu(), torch.arange(table.num_embeddings)):
        raise ValueError(f"{type(parent).__name__} of {kind} counts positions in a way that we do not know")


def extend_table(model: nn.Module, parent: nn.Module, name: str, length: int) -> None:
    """Make one table longer, what goes by its length beside it, and the configuration that has it."""
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
    for config, _ in implementations(model):
        if getattr(config, MAXIMUM, None) in (rows, positions):
            setattr(config, MAXIMUM, getattr(config, MAXIMUM) + length - positions)


def lengthen_tokenizers(model: Any, whole: nn.Module, tokenizer: Any, length: int, longest: int) -> None:
    """Let texts of `length` tokens pass uncut, and none that is too long, by tokenizers and SentenceTransformers."""
    holders = [(part, "max_seq_length") for part in (whole, *whole.children())]
    tokenizers = [tokenizer, *(getattr(holder, "tokenizer", None) for holder in (model, *whole.modules()))]
    for holder, name in [*holders, *((one, "model_max_length") for one in tokenizers)]:
        now = getattr(holder, name, None)
        if isinstance(now, int) and not length <= now <= longest:
            setattr(holder, name, length if now < length else longest)
