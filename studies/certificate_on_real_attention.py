"""How honest is the error estimate? Estimate over truth on the queries, keys and values of a pretrained MiniLM.

python -m studies.certificate_on_real_attention [TEXT]     (a .txt or .parquet file; default: the Python reference)
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from rich.progress import track

from skeinformer import skein_attention
from skeinformer.compare.measure import relative_error
from skeinformer.lab.measure.pretrained import pretrained_qkv
from studies.command import start

LENGTHS, LAYERS, BUDGET, DRAWS = (1024, 4096), (0, 1, 3, 5), 128, 6


@dataclass(frozen=True)
class Certificate:
    """How honest is the error estimate of `skein_attention`, on the attention of MiniLM?"""

    text: tyro.conf.Positional[Path | None] = None
    """A .txt or .parquet file. Default: the Python language reference."""


def measure(n: int, layer: int, text: Path | None) -> str:
    """One row of the table: errors, and the ratio of estimate to truth over draws and heads."""
    query, key, value = pretrained_qkv(n, layer=layer, text=text)
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double())
    mean = relative_error(value.double().mean(-2, keepdim=True).expand_as(exact), exact)  # (1, h)
    truths, ratios, scores = [], [], []
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        output, info = skein_attention(query, key, value, budget=BUDGET, generator=generator, return_info=True)
        truth = relative_error(output.double(), exact)
        truths.append(truth)
        ratios.append(info.error / truth)
        scores.append((info.error - truth) / info.error_se)
    ratio = torch.cat(ratios)  # (draws, h)
    by_head = ratio.median(0).values
    return (
        f"| {n} | {layer} | {mean.mean():.3f} | {torch.cat(truths).mean():.3f} | {ratio.median():.3f} "
        f"| {by_head.min():.2f} to {by_head.max():.2f} | {torch.cat(scores).square().mean().sqrt():.2f} |"
    )


def run(options: Certificate) -> None:
    """Print the table, a row for each length and layer."""
    inputs = [(n, layer) for n in LENGTHS for layer in LAYERS]
    rows = [measure(n, layer, options.text) for n, layer in track(inputs, description="measuring")]
    print(f"d = {BUDGET}, {BUDGET} pilots, {DRAWS} draws; z is (estimate - truth) / standard error\n")
    print("| n | layer | error of V-mean | error of Skeinformer | median estimate / truth | medians by head | rms z |")
    print("|---|---|---|---|---|---|---|", *rows, sep="\n")


if __name__ == "__main__":
    sys.exit(start(Certificate, run))
