"""A model that calls F.scaled_dot_product_attention itself, sketched: nothing in it changes.

    python examples/custom_model.py                # 4096 tokens
    python examples/custom_model.py --size 32      # an image of 32 x 32 patches: 1024 tokens

Prints what was sketched with its measured error, what that does to the output, and the time of both.
"""

import argparse
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import skeinformer

WIDTH, HEADS = 128, 4


class Block(nn.Module):
    """A transformer block as people write it by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)  # (b, h, n, p)
        heads = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(heads.transpose(1, 2).reshape(b, n, WIDTH))
        output: Tensor = x + self.mlp(self.norms[1](x))
        return output


def timed(model: nn.Module, x: Tensor) -> tuple[Tensor, float]:
    """The output, and the seconds of a second pass."""
    model(x)  # the first pass is slower
    start = time.perf_counter()
    output: Tensor = model(x)
    return output, time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="A model that calls SDPA itself, exact and sketched.")
    parser.add_argument("--size", type=int, default=64, help="the side of an image in patches: n is its square")
    parser.add_argument("--budget", type=int, default=64, help="d")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4))).eval()
    x = torch.randn(1, arguments.size**2, WIDTH)

    exact, exact_seconds = timed(model, x)
    with skeinformer.sketched("cluster", budget=arguments.budget):  # short calls stay exact; min_length=0 sketches all
        found, seconds = timed(model, x)
    with skeinformer.sketched("cluster", budget=arguments.budget, certify=True) as report:
        model(x)
    print(report)
    print(f"error of the output {float((found - exact).norm() / exact.norm()):.3f}")
    print(f"exact {1000 * exact_seconds:.0f} ms, in the scope {1000 * seconds:.0f} ms")


if __name__ == "__main__":
    main()
