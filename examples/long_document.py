"""Embed a long document with exact and with sketched attention: the cosine between the two, and the time.

    python examples/long_document.py [TEXT] [--model MODEL] [--tokens 4096] [--budget 256]

TEXT is a text file, by default the Python language reference; MODEL a BERT-style model by name or folder, by default
MiniLM, an embedding model, which transformers downloads. It has 512 positions, which begin again after every 512
tokens; the embedding is the mean of the last hidden states, as MiniLM was trained.
"""

import argparse
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from skeinformer import huggingface

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@torch.no_grad()
def embed(model: Any, tokens: Tensor) -> tuple[Tensor, float]:
    """The embedding of length 1, (1, width), and the seconds that it took."""
    start = time.perf_counter()
    states = model(input_ids=tokens)
    embedding = F.normalize(states.last_hidden_state.mean(1), dim=-1)
    return embedding, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="A long document, embedded by exact and by sketched attention.")
    parser.add_argument("text", nargs="?", type=Path, help="a text file; default: the Python language reference")
    parser.add_argument("--model", default=MODEL, help="a BERT-style model, by name or folder; default: MiniLM")
    parser.add_argument("--tokens", type=int, default=4096, help="the most tokens to take")
    parser.add_argument("--budget", type=int, default=256, help="d")
    arguments = parser.parse_args()

    model = AutoModel.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    text = "\n\n".join(topics.values()) if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    tokens = tokenizer(text, truncation=True, max_length=arguments.tokens, return_tensors="pt")["input_ids"]  # (1, n)
    huggingface.extend_positions(model, arguments.tokens)  # MiniLM's 512 begin again after every 512
    exact, seconds = embed(model, tokens)
    print(f"{tokens.shape[1]} tokens, d = {arguments.budget}\n")
    print(f"exact          {seconds:6.2f} s")
    # min_length=0 sketches short texts too; without it layers are exact where that is faster
    for method in ("cluster", "skeinformer"):
        huggingface.sketch(model, method, budget=arguments.budget, num_pilots=min(32, arguments.budget), min_length=0)
        embedding, seconds = embed(model, tokens)
        cosine = F.cosine_similarity(embedding, exact)[0]
        print(f"{method:14} {seconds:6.2f} s, cosine with the exact embedding {cosine:.4f}")


if __name__ == "__main__":
    main()
