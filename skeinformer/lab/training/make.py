"""The model that a run trains, its saved form, and what a trivial model knows."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from skeinformer.attention import Attention
from skeinformer.lab.contender import Contender
from skeinformer.lab.files import remove_any
from skeinformer.lab.lra.store import Meta
from skeinformer.lab.records import Record
from skeinformer.lab.training.job import BAG_OF_TOKENS
from skeinformer.lab.training.model import Classifier, ModelConfig, PairClassifier, initialize
from skeinformer.lab.training.recipes import Recipe


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


def make_model(method: Contender, recipe: Recipe, meta: Meta, seed: int) -> nn.Module:
    """A new model for the store that `meta` describes."""
    if method.method == BAG_OF_TOKENS:
        return BagOfTokens(meta.vocab_size, meta.num_classes, meta.sequences)
    budget, options = method.settings(recipe.budget)
    config = ModelConfig(
        vocab_size=meta.vocab_size,
        num_classes=meta.num_classes,
        max_len=recipe.max_len,
        method=method.method,
        budget=budget,
        options=options,
        num_layers=recipe.num_layers,
        dim=recipe.dim,
        num_heads=recipe.num_heads,
        feedforward_dim=recipe.feedforward_dim,
        classifier_dim=recipe.classifier_dim,
        dropout=recipe.dropout,
        seed=seed,
    )
    return PairClassifier(config) if meta.sequences == 2 else Classifier(config)


def attention_errors(model: nn.Module, arguments: Sequence[Tensor | None]) -> Record:
    """`error_layer_0` and so on: each layer's own estimate of its attention's relative error on these sequences.

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
    means = {index: torch.cat(found).mean() for index, found in errors.items() if found}
    return {f"error_layer_{index}": float(mean) for index, mean in means.items() if torch.isfinite(mean)}


def save_trained(model: nn.Module, folder: Path, record: Record) -> None:
    """`model.save_pretrained` with a card that states what this run measured, whole or not at all.

    A trivial model is not saved.
    """
    if not isinstance(model, Classifier | PairClassifier):
        return
    part = folder.with_name(f".{folder.name}.part")
    for old in (part, folder):
        remove_any(old)
    part.mkdir()  # fails where somebody has put a link
    model.save_pretrained(part, model_card_kwargs={"results": results_text(record)})
    part.rename(folder)


def results_text(record: Record) -> str:
    """What a card says of a run, as a list."""
    changed = f" with {record['overrides']}" if record["overrides"] else ""
    lines = [
        f"Task: {record['task']} of the Long Range Arena ({record['data']}).",
        f"Training: recipe `{record['recipe']}`{changed}, seed {record['seed']}. These are the weights of step"
        f" {record['best_step']:,} of {record['steps']:,}, the best by validation.",
        f"Test: accuracy {record['test_accuracy']:.4f} on {record['test_examples']:,} examples, loss"
        f" {record['test_loss']:.4f}. Always guessing the most frequent label has {record['majority']:.4f}.",
    ]
    errors = [f"{value:.3f}" for name, value in record.items() if name.startswith("error_layer_")]
    if errors:
        lines.append(f"Relative error of the attention, as it estimates it, by layer: {', '.join(errors)}.")
    return "\n".join(f"- {line}" for line in lines)
