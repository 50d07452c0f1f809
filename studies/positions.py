"""Are embeddings of texts beyond a model's longest sequence of any use? `python -m studies.positions TEXTS`.

Each of some passages is cut into two halves of `length` tokens. An embedding is the mean of the last hidden states. For
each first half the second halves of all passages are ranked by their cosine with it, and its own is to be found. Halves
are embedded by their first 512 tokens alone, as the model does by itself; by the mean over pieces of 512; and whole,
with `huggingface.extend_positions`, by exact attention and by the cluster sketch.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from torch import Tensor
from torch.nn import functional as F

from skeinformer import huggingface
from skeinformer.lab.measure.pretrained import Pretrained, load_model, load_texts, up_to_tokens
from skeinformer.lab.progress import each
from skeinformer.lab.threads import use_threads
from studies.command import start

Embed = Callable[[Tensor], Tensor]  # of the tokens of a half, (n,): (width,)


@dataclass(frozen=True)
class Positions:
    """Find the second half of a passage by the first, embedded in parts or whole."""

    texts: tyro.conf.Positional[Path | None] = None
    """A .parquet file with a column `text`, or a .txt file. Default: the Python language reference."""
    passages: int = 40
    """Number of passages, taken from the texts in turn."""
    length: int = 4096
    """Tokens of a half."""
    budget: int | None = None
    """Budget d of the cluster sketch. Default: the method's own."""
    model: str | None = None
    """A BERT-style model, by name or folder. Default: the packaged MiniLM."""
    threads: int | None = None
    """Threads of torch. Default: torch's own choice."""


def passages_of(options: Positions, tokenizer: Any) -> Tensor:
    """The tokens of all halves, (passages, 2, length), from pieces of the texts that do not overlap."""
    texts = load_texts(options.texts)
    each, size = -(-options.passages // len(texts)), 2 * options.length
    found: list[Tensor] = []
    for text in texts:
        tokens = up_to_tokens(text, each * size, tokenizer)
        found += [piece.view(2, -1) for piece in torch.split(tokens, size) if len(piece) == size]
    if len(found) < options.passages:
        raise ValueError(f"the texts have {len(found)} passages of {size} tokens, {options.passages} are needed")
    return torch.stack(found[: options.passages])


@torch.no_grad()
def embed(pretrained: Pretrained, tokens: Tensor) -> Tensor:
    """The mean of the last hidden states of (b, n) tokens, without special ones: (b, width)."""
    model: Any = pretrained.model
    states: Tensor = model(input_ids=tokens, attention_mask=torch.ones_like(tokens)).last_hidden_state
    return states.mean(1)


def ranks(halves: Tensor, embed: Embed, label: str) -> Tensor:
    """The rank of each passage's second half, from 1, among all second halves by their cosine with the first."""
    found = [torch.stack([embed(half) for half in pair]) for pair in each(Console(stderr=True), halves.unbind(), label)]
    first, second = F.normalize(torch.stack(found), dim=-1).unbind(1)  # (passages, width)
    cosine = first @ second.T
    return 1 + (cosine > cosine.diagonal()[:, None]).sum(1)


def run(options: Positions) -> None:
    """Print the table, a row for each way."""
    use_threads(options.threads)
    pretrained = load_model(options.model)
    pretrained = pretrained._replace(model=copy.deepcopy(pretrained.model))  # another caller may have it as it is
    chunk = pretrained.chunk
    halves = passages_of(options, pretrained.tokenizer)
    rows = {
        f"the first {chunk} tokens": ranks(halves, lambda x: embed(pretrained, x[None, :chunk])[0], "cut off"),
        f"the mean over pieces of {chunk}": ranks(
            halves,
            lambda x: torch.stack([embed(pretrained, y[None])[0] for y in torch.split(x, chunk)]).mean(0),
            "pieces",
        ),
    }
    huggingface.extend_positions(pretrained.model, options.length)
    rows["whole, exact"] = ranks(halves, lambda x: embed(pretrained, x[None])[0], "whole, exact")
    huggingface.sketch(pretrained.model, budget=options.budget)
    rows["whole, sketched"] = ranks(halves, lambda x: embed(pretrained, x[None])[0], "whole, sketched")
    print(f"{options.passages} passages, halves of {options.length} tokens\n")
    print("\n| embedded | found first | mean of 1 / rank |", "|---|---|---|", sep="\n")
    for name, found in rows.items():
        print(f"| {name} | {float((found == 1).double().mean()):.3f} | {float((1 / found.double()).mean()):.3f} |")


if __name__ == "__main__":
    sys.exit(start(Positions, run))
