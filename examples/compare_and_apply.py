"""The whole way for a Hugging Face model: measure on your text, let each layer have what it can take, save, load.

    python examples/compare_and_apply.py [TEXT] [--model MODEL] [--tokens 4096] [--tolerance 0.3] [--out sketched]

TEXT is a text file, by default the Python language reference; MODEL a model by name or folder, by default MiniLM, an
embedding model, which transformers downloads. What is saved is loaded as any model is, after an import of
`skeinformer.huggingface`:

    from skeinformer import huggingface
    model = AutoModel.from_pretrained("sketched")
"""

import argparse
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

import skeinformer
from skeinformer import huggingface

MODEL = "sentence-transformers/all-MiniLM-L6-v2"


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face model, each layer by the sketch that it can take.")
    parser.add_argument("text", nargs="?", type=Path, help="a text file; default: the Python language reference")
    parser.add_argument("--model", default=MODEL, help="a model by name or folder; default: MiniLM")
    parser.add_argument("--tokens", type=int, default=4096, help="n, the most tokens to take")
    parser.add_argument("--tolerance", type=float, default=0.3, help="the largest relative error of a head")
    parser.add_argument("--out", type=Path, default=Path("sketched"), help="the folder to save the model in")
    arguments = parser.parse_args()

    model = AutoModel.from_pretrained(arguments.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    huggingface.extend_positions(model, arguments.tokens, tokenizer=tokenizer)  # MiniLM's 512 begin again
    text = "\n\n".join(topics.values()) if arguments.text is None else arguments.text.read_text(encoding="utf-8")
    inputs = tokenizer(text, truncation=True, max_length=arguments.tokens, return_tensors="pt")

    # for each layer the least time such that the error of every head is at most the tolerance, or exact attention
    result = skeinformer.compare(model, inputs, search=True, tolerance=arguments.tolerance, show=False)
    result.print(heads=False)
    exact = model(**inputs).last_hidden_state
    print()
    print(skeinformer.apply(model, result))

    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    loaded = AutoModel.from_pretrained(arguments.out).eval()
    with huggingface.watch() as layers:
        found = loaded(**inputs).last_hidden_state
    cosine = F.cosine_similarity(found.mean(1), exact.mean(1))[0]
    print(f"\nloaded from {arguments.out.name}: {dict(layers)}")
    print(f"cosine with the exact embedding {cosine:.4f}")


if __name__ == "__main__":
    main()
