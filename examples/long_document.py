"""Embed a long document with exact and with sketched attention: the cosine between the two, and the time.

    python examples/long_document.py [TEXT] [--model MODEL] [--tokens 4096] [--budget 256]

TEXT is a .txt or .parquet file, by default the Python language reference; MODEL a BERT-style model by name or folder,
by default MiniLM, an embedding model. It has 512 positions, which begin again after every 512 tokens; the embedding is
the mean of the last hidden states, as MiniLM was trained.
"""

import argparse
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer import huggingface
from skeinformer.lab.measure.pretrained import Pretrained, load_model, load_text, long_positions, up_to_tokens


def tokenize(pretrained: Pretrained, text: str, most: int) -> Tensor:
    """The document as a batch of one: its first tokens between the two special ones, (1, n)."""
    tokenizer = pretrained.tokenizer
    tokens = up_to_tokens(text, most - 2, tokenizer)
    return torch.cat([torch.tensor([tokenizer.cls_token_id]), tokens, torch.tensor([tokenizer.sep_token_id])])[None]


@torch.no_grad()
def embed(pretrained: Pretrained, tokens: Tensor) -> tuple[Tensor, float]:
    """The embedding of length 1, (1, width), and the seconds that it took."""
    start = time.perf_counter()
    states = pretrained.model(input_ids=tokens, position_ids=long_positions(pretrained, tokens.shape[1]))
    embedding = F.normalize(states.last_hidden_state.mean(1), dim=-1)
    return embedding, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="A long document, embedded by exact and by sketched attention.")
    parser.add_argument("text", nargs="?", help="a .txt or .parquet file; default: the Python language reference")
    parser.add_argument("--model", help="a BERT-style model, by name or folder; default: MiniLM")
    parser.add_argument("--tokens", type=int, default=4096, help="the most tokens to take")
    parser.add_argument("--budget", type=int, default=256, help="d")
    arguments = parser.parse_args()

    pretrained = load_model(arguments.model)
    tokens = tokenize(pretrained, load_text(arguments.text), arguments.tokens)
    exact, seconds = embed(pretrained, tokens)
    print(f"{tokens.shape[1]} tokens, d = {arguments.budget}\n")
    print(f"exact          {seconds:6.2f} s")
    # min_length=0 sketches short texts too; without it layers are exact where that is faster
    huggingface.register(budget=arguments.budget, num_pilots=min(32, arguments.budget), min_length=0)
    for name in ("skein", "skein-cluster"):
        pretrained.model.set_attn_implementation(name)
        embedding, seconds = embed(pretrained, tokens)
        cosine = F.cosine_similarity(embedding, exact)[0]
        print(f"{name:14} {seconds:6.2f} s, cosine with the exact embedding {cosine:.4f}")


if __name__ == "__main__":
    main()
