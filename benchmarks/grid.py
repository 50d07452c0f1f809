"""Near pixels of images in one and in two dimensions: `python -m benchmarks.grid --runs FOLDER --data FOLDER`.

The classifiers of Image and Pathfinder were trained with exact attention (`python -m lra run --methods softmax --seeds
0 --out FOLDER`). Here their queries see some pixels exactly, and means of 16 clusters in place of all others. Near are
blocks of consecutive pixels and both neighbours, as `window=` has them, or squares of pixels and their eight
neighbours. The table has the mean relative error of the heads on 32 test images; the window has nearly as many keys as
the squares.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
import tyro
from torch import Tensor
from torch.nn.functional import one_hot

from lra.data.batches import collate
from lra.data.store import open_store
from lra.model import Classifier
from skeinformer import cluster_attention
from skeinformer.attention import Attention
from skeinformer.attention.cluster import MASS_FLOOR
from skeinformer.kernels.near import LEAST_SHARE

SIDES = {"image": (1, 2, 3, 4), "pathfinder": (1, 2, 3)}  # of the squares
Inputs = tuple[Tensor, Tensor, Tensor]


def window_mask(n: int, w: int) -> Tensor:
    """Return which tokens see each other with blocks of w consecutive tokens, (n, n)."""
    block = torch.arange(n) // w
    return (block[:, None] - block).abs() <= 1


def square_mask(n: int, r: int) -> Tensor:
    """Return which pixels of a square image see each other with squares of r x r pixels, (n, n)."""
    pixel, side = torch.arange(n), math.isqrt(n)
    row, column = pixel // side // r, pixel % side // r
    return ((row[:, None] - row).abs() <= 1) & ((column[:, None] - column).abs() <= 1)


def similar_window(near: Tensor) -> Tensor:
    """Return the mask of the window whose queries see nearly as many keys as with another mask."""
    masks = [window_mask(len(near), w) for w in range(1, len(near) // 3 + 1)]
    return min(masks, key=lambda mask: abs(int(mask.sum()) - int(near.sum())))


def attend(q: Tensor, k: Tensor, v: Tensor, near: Tensor, budget: int = 16, seed: int = 0) -> Tensor:
    """Compute the cluster sketch with any mask of near keys, (n, n), from dense matrices: (b, h, n, p_v)."""
    scale, generator = q.shape[-1] ** -0.5, torch.Generator().manual_seed(seed)
    _, info = cluster_attention(q, k, v, budget=budget, return_info=True, generator=generator)

    def of_pilots(x: Tensor) -> Tensor:
        return x.gather(2, info.pilots[..., None].expand(-1, -1, -1, x.shape[-1]))

    exact = (scale * q @ k.mT).softmax(-1)
    weight = of_pilots(exact).mean(-2) + MASS_FLOOR
    member = one_hot(info.assignment, budget) * weight[..., None]  # (b, h, n, d)
    total = member.sum(-2, keepdim=True)
    share = member / total
    # of the keys that are far from a query: their share of each cluster, and their means, (b, h, n, d, p)
    far = (~near).to(q.dtype)
    far_share = far @ share
    far_k, far_v = (
        torch.einsum("ij,bhjc,bhjp->bhicp", far, share, x) / far_share.clamp(min=LEAST_SHARE)[..., None] for x in (k, v)
    )
    far_weight = info.log_weight[..., None, :] + far_share.log()
    far_scores = torch.einsum("bhip,bhicp->bhic", scale * q, far_k) + far_weight
    scores = [far_scores.masked_fill(far_share <= LEAST_SHARE, -torch.inf)]
    scores += [(scale * q @ k.mT).masked_fill(~near, -torch.inf)]
    to_far, to_near = torch.split(torch.cat(scores, -1).softmax(-1), [budget, len(near)], -1)
    output: Tensor = torch.einsum("bhic,bhicp->bhip", to_far, far_v) + to_near @ v
    # the linear term with the factor that fits what it misses of the pilots' rows, and these rows
    covariance = (k * weight[..., None]).mT @ v - (share.mT @ k * total.mT).mT @ (share.mT @ v)
    term = scale * (q - of_pilots(q).mean(-2, keepdim=True)) @ covariance
    missed, fitted = of_pilots(exact @ v - output), of_pilots(term)
    factor = (missed * fitted).sum((-2, -1), keepdim=True) / fitted.square().sum((-2, -1), keepdim=True)
    rows = info.pilots[..., None].expand(-1, -1, -1, v.shape[-1])
    output += factor.clamp(0, 1) * term
    return output.scatter(2, rows, of_pilots(exact @ v))


def head_errors(layers: list[Inputs], near: Tensor) -> Tensor:
    """Return the relative errors of all heads of all images, a row for each layer."""
    errors = []
    for q, k, v in layers:
        exact = (q.shape[-1] ** -0.5 * q @ k.mT).softmax(-1) @ v
        errors.append(((attend(q, k, v, near) - exact).norm(dim=(-2, -1)) / exact.norm(dim=(-2, -1))).flatten())
    return torch.stack(errors)


def layer_inputs(model: Classifier, tokens: Tensor) -> list[Inputs]:
    """Return queries, keys and values of each layer in float64."""
    found: list[Inputs] = []
    for module in model.modules():
        if isinstance(module, Attention):
            module.register_forward_pre_hook(lambda _, inputs: found.append(inputs[:3]))
    model(tokens)
    return [(q.double(), k.double(), v.double()) for q, k, v in found]


@torch.no_grad()
def main(runs: Path, data: Path, images: int = 32, out: Path | None = None) -> None:
    """Compare masks of near keys.

    Args:
        runs: The folder of `skein lra --out`, with runs of Image and Pathfinder with exact attention and seed 0.
        data: The folder of their data.
        images: Number of test images.
        out: Where to add records, JSON lines.
    """
    print(f"{'task':12} {'near keys':28} {'of a query':>10} {'mean error':>11} {'of each layer':>16}")
    for task, sides in SIDES.items():
        model = Classifier.from_pretrained(runs / f"cpu-{task}-softmax-seed0" / "model")
        split = open_store(data / task).split("test")
        batch = collate(split, np.arange(images), [model.config.max_len])
        layers, n = layer_inputs(model, batch.tokens[0]), model.config.max_len
        masks = {"none": torch.zeros(n, n, dtype=torch.bool)}
        for r in sides:
            masks[f"squares of {r} x {r}"] = square_mask(n, r)
            window = similar_window(square_mask(n, r))
            masks[f"window of {int(window[0].sum()) // 2}"] = window
        for name, near in masks.items():
            errors, keys = head_errors(layers, near), float(near.sum() / n)
            by_layer = " ".join(f"{x:7.4f}" for x in errors.mean(1))
            print(f"{task:12} {name:28} {keys:10.1f} {errors.mean():11.4f} {by_layer:>16}", flush=True)
            if out is not None:
                record = {"kind": "grid", "task": task, "near": name, "keys": round(keys, 2), "images": images}
                record |= {"error": round(float(errors.mean()), 5), "by_layer": errors.mean(1).tolist()}
                with out.open("a") as file:
                    file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    tyro.cli(main)
