"""Where sampled columns beat clusters: pretrained attention made more peaked. Takes a text file.

    python examples/cluster_on_peaked_attention.py TEXT

Queries of MiniLM are multiplied by 1, 2 and 4; n = 2048, relative spectral error, mean over 12 heads.
"""

import sys
from typing import Any

import torch

from skeinformer import build
from skeinformer.lab.measure import exact_attention, spectral_error
from skeinformer.lab.pretrained import pretrained_qkv

CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "V-mean": ("vmean", {}),
    "Skeinformer, d = 256, 256 pilots": ("skeinformer", {"budget": 256}),
    "cluster, d = 32, 16 pilots": ("cluster", {"budget": 32}),
    "cluster, d = 128, 64 pilots": ("cluster", {"budget": 128, "quality": "accurate"}),
}
LAYERS, FACTORS = (1, 3), (1, 2, 4)


@torch.no_grad()
def main() -> None:
    rows: dict[str, list[str]] = {name: [] for name in CONTENDERS}
    for layer in LAYERS:
        query, key, value = pretrained_qkv(2048, layer=layer, text=sys.argv[1])
        for factor in FACTORS:
            exact = exact_attention(factor * query, key, value)
            for name, (method, options) in CONTENDERS.items():
                module = build(method, head_dim=query.shape[-1], seed=0, **options).eval()
                rows[name].append(f"{spectral_error(module(factor * query, key, value), exact).mean().item():.3f}")
    print(f"| | {' | '.join(f'layer {layer}, q x {factor}' for layer in LAYERS for factor in FACTORS)} |")
    print("|---" * (len(LAYERS) * len(FACTORS) + 1) + "|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
