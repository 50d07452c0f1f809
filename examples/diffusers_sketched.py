"""A U-Net of diffusers with cross-attention to a text, sketched: nothing in it changes.

    pip install diffusers
    python examples/diffusers_sketched.py                # latents of 64 x 64: 4096 tokens, random weights
    python examples/diffusers_sketched.py --size 32

With a pipeline it is the same two lines:

    with skeinformer.sketched("cluster", budget=64) as report:
        image = pipeline(prompt).images[0]

Prints what was sketched and what stayed exact, and what that does to the output of one step.
"""

import argparse
from typing import Any

import torch

import skeinformer


def make_unet(size: int) -> Any:
    """A small U-Net of random weights, of the kind that Stable Diffusion has."""
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=size,
        layers_per_block=1,
        block_out_channels=(64, 128),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=64,
        attention_head_dim=4,
        norm_num_groups=16,
    ).eval()


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description="A U-Net of diffusers, exact and sketched.")
    parser.add_argument("--size", type=int, default=64, help="the side of the latents: n is its square")
    parser.add_argument("--budget", type=int, default=64, help="d")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    unet, size = make_unet(arguments.size), arguments.size
    latents, text = torch.randn(1, 4, size, size), torch.randn(1, 77, 64)
    step = torch.tensor([500])

    exact = unet(latents, step, text).sample
    with skeinformer.sketched("cluster", budget=arguments.budget, certify=True) as report:
        found = unet(latents, step, text).sample
    print(report)
    print(f"error of the output {float((found - exact).norm() / exact.norm()):.3f}")


if __name__ == "__main__":
    main()
