"""How near are the gradients of sketched attention to those of exact attention, on pretrained Q, K, V?

    python -m studies.cluster_gradients [TEXT]     (a .txt or .parquet file; default: the Python reference)

prints relative Frobenius errors of the gradients for Q, K and V of a random linear function of the output, means over
heads, n = 4096. Needs the `lab` extra.
"""

import sys
from typing import Any

import torch
import torch.nn.functional as F

from skeinformer import build
from skeinformer.compare.measure import input_gradients, relative_error
from skeinformer.lab.measure.pretrained import pretrained_qkv

CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "V-mean": ("vmean", {}),
    "Skeinformer, d = 256, 256 pilots": ("skeinformer", {"budget": 256}),
    "cluster, d = 16, 16 pilots, no linear term": ("cluster", {"budget": 16, "first_order": False}),
    "cluster, d = 16, 16 pilots": ("cluster", {"budget": 16}),
    "cluster, d = 128, 64 pilots": ("cluster", {"budget": 128, "quality": "accurate"}),
}
INPUTS = [(0, "initialized"), (0, "pretrained"), (2, "pretrained"), (5, "pretrained")]


def main(text: str | None) -> None:
    rows: dict[str, list[str]] = {name: [] for name in CONTENDERS}
    for layer, weights in INPUTS:
        inputs = pretrained_qkv(4096, layer=layer, weights=weights, text=text)
        upstream = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(0))
        truth = input_gradients(F.scaled_dot_product_attention, inputs, upstream)
        for name, (method, options) in CONTENDERS.items():
            module = build(method, head_dim=inputs[0].shape[-1], seed=0, **options).eval()
            found = input_gradients(module, inputs, upstream)
            errors = [relative_error(a, b).mean().item() for a, b in zip(found, truth, strict=True)]
            rows[name].append(", ".join(f"{error:.3f}" for error in errors))
    print(f"| | {' | '.join(f'layer {layer}, {weights}' for layer, weights in INPUTS)} |")
    print("|---" * (len(INPUTS) + 1) + "|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
