"""The transformer that Chen et al. (2022) train on the Long Range Arena, and a model without attention to beat.

Two layers, 64 wide, feed-forward 128, two heads of 32, learned positions, LayerNorm before each block, GELU, dropout
0.1, mean pooling over the real tokens, and a head 64 -> 128 -> classes. The attention of each layer is `build` of a
name in METHODS.

Tokens are (b, n) whole numbers, masks (b, n) booleans, True = real, or None where all are. Padding may lie anywhere;
what stands in it is never read, not even as an index.
"""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import PyTorchModelHubMixin
from torch import Tensor, nn
from torch.nn import functional as F

from skeinformer.attention import DEFAULT, METHODS, Attention, build
from skeinformer.checks import check_count, check_number
from skeinformer.distributed import Group, mean_over_tokens, shard, share_lengths
from skeinformer.kernels.choice import is_eager_cpu
from skeinformer.kernels.rows import masked_mean
from skeinformer.noise import Window, layer_seed

EMBEDDING_STANDARD_DEVIATION = 0.02
SIZES = ("vocab_size", "num_classes", "max_len", "num_layers", "dim", "num_heads", "feedforward_dim", "classifier_dim")
CARD = """---
{{ card_data }}
---

# A transformer with sketched attention, trained on a task of the Long Range Arena

A small model as [Chen et al. (2022)]({{ paper_url }}) train it, for research on attention. `config.json` has its sizes
and its method of the library skeinformer. `lra.model` in a checkout of skeinformer loads it by `from_pretrained`.

{{ results | default("Nothing was measured when this model was saved.", true) }}
"""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model and the attention in it; the defaults are the paper's."""

    vocab_size: int
    num_classes: int
    max_len: int  # of the longest sequence: each token has a learned position
    method: str = DEFAULT  # a name in METHODS
    budget: int | None = 256  # the sketch size d; None where an option sets the size
    options: Mapping[str, Any] = field(default_factory=dict)  # other options of the method
    num_layers: int = 2
    dim: int = 64
    num_heads: int = 2
    feedforward_dim: int = 128
    classifier_dim: int = 128  # the width of the classifier's hidden layer
    dropout: float = 0.1
    seed: int | None = 0  # of the attention's draws in evaluation, each layer with its own; None: new ones each call

    def __post_init__(self) -> None:
        for name in SIZES:
            check_count(name, getattr(self, name))
        if self.dim % self.num_heads:
            raise ValueError(
                f"dim={self.dim} is not a multiple of num_heads={self.num_heads}; each head has the same width"
            )
        if not 0 <= check_number("dropout", self.dropout, "at least 0 and below 1") < 1:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")


class Dropout(nn.Module):
    """In training, zero each number with probability `rate` (to 2^-16) and scale the others so that the mean stays.

    On a CPU the draws of `nn.Dropout` cost more than the layers around it; here a draw is 16 bits of a 64-bit number.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor, window: Window | None = None) -> Tensor:
        """(b, n, dim) -> (b, n, dim). window: which tokens of a sequence that is divided among ranks these are.

        All ranks then draw for the complete sequence, so that each token has the draw that it has in one process.
        """
        if not self.training or self.rate == 0:
            return x
        if window is None:
            return F.dropout(x, self.rate) if not is_eager_cpu(x) else x * self.factors(x.shape).to(x.dtype)
        whole = (x.shape[0], window.total, *x.shape[2:])
        factors = self.factors(whole) if is_eager_cpu(x) else F.dropout(x.new_ones(whole), self.rate)
        return x * factors[:, window.start : window.start + x.shape[1]].to(x.dtype)

    def factors(self, shape: Sequence[int]) -> Tensor:
        """Draw 0 for a number that is dropped, or the factor of one that stays."""
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


class HubModel(
    nn.Module,
    PyTorchModelHubMixin,
    model_card_template=CARD,
    library_name="skeinformer",
    paper_url="https://aclanthology.org/2022.naacl-main.381",
    license="apache-2.0",
    tags=["sketched-attention", "long-sequences"],
):
    """A module of a ModelConfig with `save_pretrained` and `from_pretrained`, which loads all weights or raises."""

    config: ModelConfig

    @classmethod
    def _from_pretrained(cls, **options: Any) -> Any:
        return super()._from_pretrained(**{**options, "strict": True})


class Encoder(HubModel):
    """Tokens and positions through all layers. Rows of padding are not zero: leave them out by the mask.

    With a `group` (`parallel.set_sequence_group`) all ranks give the same tokens, and each computes its share of them.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
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
        """Return the encoded tokens (b, n, dim) and their mask (b, n); with a group, of this rank's share."""
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
        """Return the mean over the real tokens of all ranks, (b, n) -> (b, dim); zeros where there is none."""
        x, mask = self.encoded(tokens, mask)
        return masked_mean(x, mask) if self.group is None else mean_over_tokens(x, mask, self.group)


class Classifier(HubModel):
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


class PairClassifier(HubModel):
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
    """Make the head: width -> classifier_dim -> classes."""
    head = nn.Sequential(
        nn.Linear(width, config.classifier_dim), nn.GELU(), nn.Linear(config.classifier_dim, config.num_classes)
    )
    return head.apply(initialize)


def initialize(module: nn.Module) -> None:
    """Set embeddings to N(0, 0.02^2), weights by Glorot and Bengio (2010), biases to 0; a method keeps its own."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=EMBEDDING_STANDARD_DEVIATION)
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)


class BagOfTokens(nn.Module):
    """Logits from how often each token occurs, without their order: what a model must beat to have read anything.

    An MLP with two hidden layers on the counts and on their shares of the length; for a pair, of both sequences.
    """

    def __init__(self, vocab_size: int, num_classes: int, sequences: int = 1, width: int = 128) -> None:
        super().__init__()
        self.vocab_size, self.sequences = vocab_size, sequences
        self.mlp = nn.Sequential(
            nn.Linear(2 * sequences * vocab_size, width),
            nn.GELU(),
            nn.Linear(width, width),
            nn.GELU(),
            nn.Linear(width, num_classes),
        ).apply(initialize)

    def forward(self, *arguments: Tensor | None) -> Tensor:
        """All sequences (b, n), then all masks -> (b, classes)."""
        features = []
        for tokens, mask in zip(arguments[: self.sequences], arguments[self.sequences :], strict=True):
            assert tokens is not None
            real = torch.ones_like(tokens) if mask is None else mask.long()
            counts = tokens.new_zeros(len(tokens), self.vocab_size).scatter_add(1, tokens, real).float()
            features += [counts / 8, counts / counts.sum(1, keepdim=True).clamp(min=1) * 8]
        logits: Tensor = self.mlp(torch.cat(features, 1))
        return logits


def attention_errors(model: nn.Module, arguments: Sequence[Tensor | None]) -> dict[str, float]:
    """Return `error_layer_0` and so on: each layer's estimate of its attention's relative error on these sequences.

    Empty for a model without attention. The model is in evaluation, without gradients.
    """
    modules = [module for module in model.modules() if isinstance(module, Attention)]
    errors: dict[int, list[Tensor]] = {index: [] for index in range(len(modules))}
    handles = []
    for index, module in enumerate(modules):

        def certify(module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Any], where: int = index) -> None:
            assert isinstance(module, Attention)
            _, info = module.certify(*args, **kwargs)
            errors[where].append(info.error[torch.isfinite(info.error)])

        handles.append(module.register_forward_pre_hook(certify, with_kwargs=True))
    try:
        model(*arguments)
    finally:
        for handle in handles:
            handle.remove()
    means = {index: torch.cat(values).mean() for index, values in errors.items() if values}
    return {f"error_layer_{index}": float(mean) for index, mean in means.items() if torch.isfinite(mean)}


def save_model(model: nn.Module, folder: Path, record: Mapping[str, Any]) -> None:
    """Save a model with a card that says what its run measured; one without attention is not saved."""
    if isinstance(model, HubModel):
        part = folder.with_name(f".{folder.name}.part")
        for old in (part, folder):
            shutil.rmtree(old, ignore_errors=True)
        shown = ("task", "data", "recipe", "overrides", "method", "seed", "best_step", "test_accuracy", "majority")
        results = "\n".join(f"- {name.replace('_', ' ')}: {record[name]}" for name in shown if record[name] != "")
        model.save_pretrained(part, model_card_kwargs={"results": results})
        part.rename(folder)
