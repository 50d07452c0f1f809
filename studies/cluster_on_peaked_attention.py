"""Where sampled columns beat clusters: pretrained attention made more peaked.

    python -m studies.cluster_on_peaked_attention [TEXT]     (a .txt or .parquet file; default: the Python reference)

Queries of MiniLM are multiplied by 1, 2 and 4; n = 2048, relative spectral error, mean over 12 heads. The last column
is made up: 64 groups of neighbours, each attends to itself alone.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro

from skeinformer import build
from skeinformer.lab.measure.errors import exact_attention, spectral_error
from skeinformer.lab.measure.pretrained import pretrained_qkv
from studies.command import start

CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "V-mean": ("vmean", {}),
    "Skeinformer, d = 256, 256 pilots": ("skeinformer", {"budget": 256}),
    "cluster, d = 16, 16 pilots": ("cluster", {"budget": 16}),
    "cluster, d = 128, 64 pilots": ("cluster", {"budget": 128, "quality": "accurate"}),
}
LAYERS, FACTORS, N = (1, 3), (1, 2, 4), 2048
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Peaked:
    """Where do sampled columns beat clusters? Attention of MiniLM, made more peaked."""

    text: tyro.conf.Positional[Path | None] = None
    """A .txt or .parquet file. Default: the Python language reference."""


def inputs(text: Path | None) -> Iterator[tuple[str, QKV]]:
    """Queries, keys and values by name, (1, 12, n, 32) each."""
    for layer in LAYERS:
        query, key, value = pretrained_qkv(N, layer=layer, text=text)
        for factor in FACTORS:
            yield f"layer {layer}, q x {factor}", (factor * query, key, value)
    yield "64 groups", groups(64)


def groups(count: int) -> QKV:
    """Keys near one of `count` directions, and queries that score their own by 20 more than the others."""
    generator = torch.Generator().manual_seed(0)
    directions = F.normalize(torch.randn(1, 12, count, 32, generator=generator), dim=-1)
    own = directions[:, :, torch.arange(N) * count // N]
    noise, value = torch.randn(2, 1, 12, N, 32, generator=generator)
    return 20 * 32**0.5 * own, own + 0.02 * noise, 2 * own + value


@torch.no_grad()
def run(options: Peaked) -> None:
    """Print the table, a row for each contender."""
    rows: dict[str, list[str]] = {name: [] for name in CONTENDERS}
    headings = []
    for heading, qkv in inputs(options.text):
        headings.append(heading)
        exact = exact_attention(*qkv)
        for name, (method, given) in CONTENDERS.items():
            module = build(method, head_dim=32, seed=0, **given).eval()
            rows[name].append(f"{spectral_error(module(*qkv), exact).mean().item():.3f}")
    print(f"| | {' | '.join(headings)} |")
    print("|---" * (len(headings) + 1) + "|")
    for name, cells in rows.items():
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    sys.exit(start(Peaked, run))
