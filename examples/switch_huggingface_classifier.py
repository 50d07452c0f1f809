"""Switch a Hugging Face classifier to sketched attention, and look at what that changes.

    python examples/switch_huggingface_classifier.py [--model MODEL | --tiny] [--tokens 2048] [--budget 128]

MODEL is a BERT-style model by name or folder, by default MiniLM, which transformers downloads; --tiny is a small one of
random weights. A head that is not trained only shows how far the probabilities move. The texts are pieces of the Python
language reference, one of them half as long as the others: padding is left out as before.
"""

import argparse
import time
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, BertConfig

from skeinformer import huggingface

MODEL = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = 4


def pretrained(name: str, count: int) -> tuple[Any, Tensor]:
    """The classifier, and the first `count` tokens of the text."""
    text = "\n\n".join(topics.values())
    tokenizer = AutoTokenizer.from_pretrained(name)
    tokens = tokenizer(text, add_special_tokens=False, truncation=True, max_length=count, return_tensors="pt")
    return AutoModelForSequenceClassification.from_pretrained(name), tokens["input_ids"][0]


def tiny(count: int) -> tuple[Any, Tensor]:
    """A small classifier of random weights, and `count` random tokens."""
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    classifier: Any = AutoModelForSequenceClassification
    return classifier.from_config(config), torch.randint(1000, (count,))


@torch.no_grad()
def classify(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, float]:
    """The probabilities of the classes, (texts, 2), and the seconds of a pass."""
    model(**inputs)  # the first pass is slower
    start = time.perf_counter()
    found: Tensor = model(**inputs).logits.softmax(-1)
    return found, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face classifier with exact and with sketched attention.")
    parser.add_argument("--model", default=MODEL, help="a BERT-style model, by name or folder; default: MiniLM")
    parser.add_argument("--tiny", action="store_true", help="a small model of random weights")
    parser.add_argument("--tokens", type=int, default=2048, help="n, the length of a text")
    parser.add_argument("--budget", type=int, default=128, help="d")
    arguments = parser.parse_args()
    n = arguments.tokens

    torch.manual_seed(0)
    model, stream = tiny(TEXTS * n) if arguments.tiny else pretrained(arguments.model, TEXTS * n)
    if len(stream) < TEXTS * n:
        parser.error(f"the text has {len(stream)} tokens, {TEXTS * n} are needed; give a smaller --tokens")
    mask = torch.ones(TEXTS, n, dtype=torch.long)
    mask[-1, n // 2 :] = 0
    inputs = {"input_ids": stream.view(TEXTS, n), "attention_mask": mask}
    huggingface.extend_positions(model, n)  # MiniLM's 512 begin again after every 512
    model.eval()

    exact, seconds = classify(model, inputs)
    print(f"{TEXTS} texts of {n} tokens, d = {arguments.budget}\n")
    print(f"exact          {1000 * seconds:6.0f} ms")
    # min_length=0 sketches short texts too; without it layers are exact where that is faster
    for method in ("cluster", "skeinformer"):
        huggingface.sketch(model, method, budget=arguments.budget, num_pilots=min(32, arguments.budget), min_length=0)
        with huggingface.watch() as layers:
            found, seconds = classify(model, inputs)
        done = ", ".join(f"{count // 2} layers {what}" for what, count in layers.items())  # two passes
        change = (found - exact).abs().max()
        print(f"{method:14} {1000 * seconds:6.0f} ms, probabilities moved by at most {change:.3f}; {done}")


if __name__ == "__main__":
    main()
