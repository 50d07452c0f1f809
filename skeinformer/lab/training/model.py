"""The transformer that Chen et al. (2022) train on the Long Range Arena: an encoder, a classifier for one sequence and
one for a pair.

Two layers, 64 wide, feed-forward 128, two heads of 32, learned positions, LayerNorm before each block, GELU, dropout
0.1, mean pooling over the real tokens, and a head 64 -> 128 -> classes. The attention of each layer is `build` of a
name in METHODS.

Tokens are (b, n) whole numbers, masks (b, n) booleans, True = real, or None where all are. Padding may lie anywhere;
what stands in it is never read, not even as an index.

All three are saved by `save_pretrained(folder)` as config.json, model.safetensors and a card, and loaded by
`Classifier.from_pretrained(folder)`. This needs huggingface_hub, of the extra `train`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import ModelCard, PyTorchModelHubMixin
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.attention import METHODS, build
from skeinformer.distributed import Group, mean_over_tokens, shard, share_lengths
from skeinformer.kernels.choice import is_eager_cpu
from skeinformer.kernels.rows import masked_mean
from skeinformer.lab.training.config import ModelConfig, check_config
from skeinformer.lab.training.loading import check_tensors, hub_files, load_weights, read_config, saved_files
from skeinformer.noise import Window, layer_seed

__all__ = ["Classifier", "Encoder", "ModelConfig", "PairClassifier", "initialize"]

EMBEDDING_STANDARD_DEVIATION = 0.02
CARD = """---
{{ card_data }}
---

# {{ model_class }} with {{ method }} attention

A small transformer for tasks of the Long Range Arena, as [Chen et al. (2022)]({{ paper_url }}) train it. Its attention
is the method `{{ method }}` of the library skeinformer. `config.json` has its sizes and options.

## Measured

{{ results | default("Nothing was measured when this model was saved.", true) }}

## Use

It needs the extra `train`: `pip install 'skeinformer[train]'`.

    from skeinformer.lab.training.model import {{ model_class }}

    model = {{ model_class }}.from_pretrained("this folder or repository").eval()

Inputs are token ids of shape (batch, tokens), at most {{ max_len }} tokens, in the vocabulary of its task's store
(`skein data`), and a boolean mask, True = real.

## Limits

Such models are trained from scratch on one task, for research on attention. They are of no use for other tasks.
"""


class Dropout(nn.Module):
    """In training, zero each number with probability `rate` (to 2^-16) and scale the others so that the mean stays.

    On a CPU the draws of `nn.Dropout` cost more than the layers around it; here a draw is 16 bits of a 64-bit number.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, window: Window | None = None) -> Tensor:
        """(b, n, dim) -> (b, n, dim). window: which tokens of a sequence that is divided among ranks these are.

        All ranks then draw for the whole, so that each token has the draw that it has in one process.
        """
        if not self.training or self.rate == 0:
            return x
        if window is None:
            return F.dropout(x, self.rate) if not is_eager_cpu(x) else x * self.factors(x.shape).to(x.dtype)
        whole = (x.shape[0], window.total, *x.shape[2:])
        factors = self.factors(whole) if is_eager_cpu(x) else F.dropout(x.new_ones(whole), self.rate)
        return x * factors[:, window.start : window.start + x.shape[1]].to(x.dtype)

    def factors(self, shape: Sequence[int]) -> Tensor:
        """0, or what scales a number that stays."""
        size, dropped = math.prod(shape), min(round(self.rate * 2**16), 2**16 - 1)
        words = torch.empty(-(-size // 4), dtype=torch.int64).random_(torch.iinfo(torch.int64).min, None)
        draws = words.view(torch.int16)[:size].view(*shape)  # uniform from -2^15 to 2^15 - 1
        return (draws >= dropped - 2**15) * (2**16 / (2**16 - dropped))

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


class SelfAttention(nn.Module):
    """Multi-head self-attention by a method of METHODS: projections to heads, the method, a projection back.

    Where the method shares queries and keys (Reformer) there is no projection of keys.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention = build(
            config.method,
            head_dim=config.dim // config.num_heads,
            max_len=config.max_len,
            budget=config.budget,
            seed=layer_seed(config.seed, layer),
            **config.options,
        )
        self.query = nn.Linear(config.dim, config.dim)
        self.key = None if METHODS[config.method].shares_keys else nn.Linear(config.dim, config.dim)
        self.value = nn.Linear(config.dim, config.dim)
        self.output = nn.Linear(config.dim, config.dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """(b, n, dim) -> (b, n, dim)."""
        query, value = self._heads(self.query(x)), self._heads(self.value(x))
        key = query if self.key is None else self._heads(self.key(x))
        output: Tensor = self.attention(query, key, value, key_mask=mask, query_mask=mask)
        x = self.output(output.transpose(1, 2).flatten(2))  # (b, n, h p)
        return x

    def _heads(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        return x.view(b, n, self.num_heads, width // self.num_heads).transpose(1, 2)  # (b, h, n, p)


class Layer(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x)), with dropout on what is added."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = SelfAttention(config, layer)
        self.feedforward_norm = nn.LayerNorm(config.dim)
        self.feedforward = nn.Sequential(
            nn.Linear(config.dim, config.feedforward_dim),
            nn.GELU(),
            Dropout(config.dropout),
            nn.Linear(config.feedforward_dim, config.dim),
        )
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None, window: Window | None = None) -> Tensor:
        """(b, n, dim) -> (b, n, dim)."""
        x = x + self.dropout(self.attention(self.attention_norm(x), mask), window)
        widen, activation, dropout, narrow = self.feedforward
        hidden = dropout(activation(widen(self.feedforward_norm(x))), window)
        x = x + self.dropout(narrow(hidden), window)
        return x


class Saved(
    nn.Module,
    PyTorchModelHubMixin,
    model_card_template=CARD,
    library_name="skeinformer",
    paper_url="https://aclanthology.org/2022.naacl-main.381",
    license="apache-2.0",
    tags=["sketched-attention", "long-sequences"],
):
    """A module that is made from a ModelConfig, saved with it and loaded from it."""

    config: ModelConfig

    @classmethod
    def from_pretrained(  # type: ignore[override]
        cls, name_or_folder: str | Path, *, map_location: str = "cpu", **download: Any
    ) -> Self:
        """The model of a folder, or of a repository, which is downloaded as `download` says (revision, token, ...).

        All weights or an error: a part of them would be a model with random numbers in it. Files are checked against
        each other before the model is built (`loading.read_config`); a pickle is not loaded.
        """
        found = saved_files(Path(name_or_folder)) or hub_files(str(name_or_folder), **download)
        config = read_config(*found)
        try:
            with torch.device("meta"):  # names and shapes only
                expected = cls(config).state_dict()
        except (TypeError, ValueError) as error:  # a method or an option that does not exist
            raise ValueError(f"{found.config}: {error}") from None
        check_tensors(expected, found.weights)
        model = cls(config)
        load_weights(model, found.weights)
        return model.to(map_location).eval()

    def generate_model_card(self, *args: Any, **kwargs: Any) -> ModelCard:
        """The card; `results` is what it says under "Measured"."""
        names = {"model_class": type(self).__name__, "method": self.config.method, "max_len": self.config.max_len}
        return super().generate_model_card(*args, **names, **kwargs)


class Encoder(Saved):
    """Tokens and positions through all layers. Rows of padding are not zero: leave them out by the mask.

    With a `group` (`ranks.divide`), whose ranks all give the same tokens, each rank goes on with its share of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        check_config(config)
        self.config = config
        self.max_len = config.max_len
        self.group: Group | None = None
        self.tokens = nn.Embedding(config.vocab_size, config.dim)
        self.positions = nn.Parameter(torch.empty(config.max_len, config.dim))
        self.dropout = Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config, layer) for layer in range(config.num_layers))
        self.norm = nn.LayerNorm(config.dim)
        self.apply(initialize)
        nn.init.normal_(self.positions, std=EMBEDDING_STANDARD_DEVIATION)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(b, n) -> (b, n, dim), with a group of this rank's share."""
        return self.encoded(tokens, mask)[0]

    def encoded(self, tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The encoded tokens, and their mask: (b, n) -> (b, n, dim), (b, n); with a group, of this rank's share."""
        if tokens.dim() != 2 or not 0 < tokens.shape[1] <= self.max_len:
            raise ValueError(
                f"tokens have shape {tuple(tokens.shape)}, expected (batch, n) with n from 1 to max_len={self.max_len}"
            )
        if mask is not None:
            tokens = tokens.masked_fill(~mask, 0)
        window, start = None, 0
        if self.group is not None:
            lengths = share_lengths(tokens.shape[1], self.group.size)
            window = Window(start := sum(lengths[: self.group.rank]), tokens.shape[1])
            share, mask = shard(tokens, mask, group=self.group)
            assert share is not None
            tokens = share
        x = self.dropout(self.tokens(tokens) + self.positions[start : start + tokens.shape[1]], window)
        for layer in self.layers:
            x = layer(x, mask, window)
        return self.norm(x), mask

    def pooled(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """The mean over the real tokens, (b, n) -> (b, dim), those of all ranks; zeros where there is none."""
        x, mask = self.encoded(tokens, mask)
        return masked_mean(x, mask) if self.group is None else mean_over_tokens(x, mask, self.group)


class Classifier(Saved):
    """Logits for one sequence: encoder, mean over real tokens, head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.head = make_head(config.dim, config)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """(b, n) -> (b, classes)."""
        logits: Tensor = self.head(self.encoder.pooled(tokens, mask))
        return logits


class PairClassifier(Saved):
    """Logits for two sequences: one encoder for both, the head on [x, y, x * y, x - y] of their means (Retrieval)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.head = make_head(4 * config.dim, config)

    def forward(
        self, tokens: Tensor, other_tokens: Tensor, mask: Tensor | None = None, other_mask: Tensor | None = None
    ) -> Tensor:
        """(b, n), (b, n') -> (b, classes)."""
        x, y = self.encoder.pooled(tokens, mask), self.encoder.pooled(other_tokens, other_mask)  # (b, dim)
        logits: Tensor = self.head(torch.cat([x, y, x * y, x - y], -1))
        return logits


def make_head(width: int, config: ModelConfig) -> nn.Module:
    """width -> classifier_dim -> classes."""
    head = nn.Sequential(
        nn.Linear(width, config.classifier_dim), nn.GELU(), nn.Linear(config.classifier_dim, config.num_classes)
    )
    return head.apply(initialize)


def initialize(module: nn.Module) -> None:
    """Embeddings N(0, 0.02^2), weights by Glorot and Bengio (2010), biases 0. A method keeps its own parameters."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STANDARD_DEVIATION)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
