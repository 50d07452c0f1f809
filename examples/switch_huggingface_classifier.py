"""Switch a Hugging Face classifier to sketched attention, and look at what that changes.

    python examples/switch_huggingface_classifier.py [--tiny] [--tokens 2048] [--budget 128]

The model is BertForSequenceClassification with the weights of MiniLM where they are installed, else (or with --tiny) a
small one of random weights; its head is not trained, so that the probabilities only show how far they move. The texts
are pieces of the Python language reference, one of them half as long as the others: padding is left out as before.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

from skeinformer import huggingface
from skeinformer.lab.measure.pretrained import first_tokens, load_model, load_text, long_positions, minilm_folder

TEXTS = 4


def make_model(tiny: bool) -> tuple[Any, Tensor | None]:
    """The classifier; and the tokens of the text where there is a tokenizer."""
    torch.manual_seed(0)
    if not tiny:
        try:
            return BertForSequenceClassification.from_pretrained(minilm_folder()), None
        except FileNotFoundError as error:
            print(f"{error}\nusing a tiny model of random weights instead\n")
    config = BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128
    )
    classifier: Any = BertForSequenceClassification
    return classifier(config), torch.randint(1000, (10**6,))


@torch.no_grad()
def classify(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, float]:
    """The probabilities of the classes, (texts, 2), and the seconds of a pass."""
    model(**inputs)  # the first pass is slower
    start = time.perf_counter()
    found: Tensor = model(**inputs).logits.softmax(-1)
    return found, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description="A Hugging Face classifier with exact and with sketched attention.")
    parser.add_argument("--tiny", action="store_true", help="a small model of random weights")
    parser.add_argument("--tokens", type=int, default=2048, help="n, the length of a text")
    parser.add_argument("--budget", type=int, default=128, help="d")
    arguments = parser.parse_args()
    n = arguments.tokens

    model, stream = make_model(arguments.tiny)
    positions = torch.arange(n)[None] % 512  # BERT has 512 positions; they begin again
    if stream is None:
        pretrained = load_model()
        stream = first_tokens(load_text(), TEXTS * n, pretrained.tokenizer)
        positions = long_positions(pretrained, n)
    mask = torch.ones(TEXTS, n, dtype=torch.long)
    mask[-1, n // 2 :] = 0
    inputs = {"input_ids": stream[: TEXTS * n].view(TEXTS, n), "attention_mask": mask, "position_ids": positions}
    model.eval()

    exact, seconds = classify(model, inputs)
    print(f"{TEXTS} texts of {n} tokens, d = {arguments.budget}\n")
    print(f"exact          {1000 * seconds:6.0f} ms")
    # min_length=0 sketches short texts too; without it layers are exact where that is faster
    huggingface.register(budget=arguments.budget, num_pilots=min(32, arguments.budget), min_length=0)
    for name in ("skein", "skein-cluster"):
        model.set_attn_implementation(name)
        with huggingface.watch() as layers:
            found, seconds = classify(model, inputs)
        done = ", ".join(f"{count // 2} layers {what}" for what, count in layers.items())  # two passes
        change = (found - exact).abs().max()
        print(f"{name:14} {1000 * seconds:6.0f} ms, probabilities moved by at most {change:.3f}; {done}")


if __name__ == "__main__":
    main()
