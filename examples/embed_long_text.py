"""Embed a text of two million tokens, divided among processes: the memory of each falls with their number.

    torchrun --nproc-per-node 4 examples/embed_long_text.py [TEXT] [--tokens 2000000]
    python examples/embed_long_text.py --tokens 500000           # one process

TEXT is any file, by default the sources of Python's standard library; a token is a byte. The model is a small encoder
of torch with random weights: put your own in its place. All that knows of other processes is marked (*).
"""

import argparse
import math
import os
import resource
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer
from skeinformer.distributed import mean_over_tokens, shard

WIDTH, HEADS, LAYERS = 32, 2, 2


class Model(nn.Module):
    """Bytes and their positions through an encoder, token by token but for its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """(1, n), (1, n) -> (1, n, width)."""
        hidden: Tensor = self.layers(self.tokens(tokens.int()) + waves(positions))
        return hidden


def waves(positions: Tensor) -> Tensor:
    """Sines and cosines of the positions: (1, n) -> (1, n, width)."""
    rates = torch.exp(torch.arange(0, WIDTH, 2) * (-math.log(1e7) / WIDTH))
    angles = positions[..., None] * rates  # (1, n, width / 2)
    return torch.cat([angles.sin(), angles.cos()], -1)


def read(path: Path | None, count: int) -> Tensor:
    """The first `count` bytes of a file, or of the standard library: (1, n)."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")) if path is None else [path]
    text = bytearray()
    for each in paths:
        if len(text) < count:
            with each.open("rb") as file:
                text += file.read(count - len(text))
    return torch.frombuffer(text, dtype=torch.uint8)[None]


def peak_mib() -> float:
    """The most memory that this process has had."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="A long text, embedded by several processes.")
    parser.add_argument("text", nargs="?", type=Path, help="a file; default: the sources of the standard library")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="the most tokens to take")
    parser.add_argument("--budget", type=int, default=64, help="d, the clusters of each head")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    if "RANK" not in os.environ:  # not under torchrun: a group of one
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")  # (*)
    group = dist.group.WORLD

    torch.manual_seed(0)  # the same weights on all ranks
    model = Model().eval()
    skeinformer.convert(model, "cluster", budget=arguments.budget, seed=0, group=group)  # (*)

    whole = read(arguments.text, arguments.tokens)
    places = torch.arange(whole.shape[1], dtype=torch.int32)[None]
    tokens, positions = (shard(x, group=group) for x in (whole, places))  # (*) this rank's, (1, n / R)
    before, start = peak_mib(), time.perf_counter()
    hidden = model(tokens, positions)
    embedding = F.normalize(mean_over_tokens(hidden, None, group), dim=-1)  # (*) the mean over all ranks
    seconds = time.perf_counter() - start

    used: list[tuple[int, float, float]] = [(0, 0.0, 0.0)] * dist.get_world_size()
    dist.all_gather_object(used, (tokens.shape[1], before, peak_mib()))
    if dist.get_rank() == 0:
        print(f"{whole.shape[1]:,} tokens, d = {arguments.budget}, processes: {len(used)}, {seconds:.1f} s")
        print("embedding", " ".join(f"{x:.4f}" for x in embedding[0, :4].tolist()), "...")
        for rank, (count, least, most) in enumerate(used):
            print(f"rank {rank}: {count:,} tokens, peak {most:.0f} MiB, of which {least:.0f} before the model ran")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
