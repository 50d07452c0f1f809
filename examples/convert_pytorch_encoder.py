"""A plain PyTorch encoder, converted and converted back: how far its output moves at each budget, and its time.

python examples/convert_pytorch_encoder.py [LENGTH]     (tokens in a sequence; default 2048)
"""

import sys

import torch
from torch import Tensor, nn

import skeinformer
from skeinformer.comparison.measure import interleaved, ratio

WIDTH, HEADS, LAYERS = 64, 2, 2
CONTENDERS = [("vmean", 1), ("skeinformer", 64), ("skeinformer", 256), ("cluster", 64)]


def make_model() -> nn.TransformerEncoder:
    """Random weights, the projections of queries and keys enlarged: attention that is not flat."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, LAYERS).eval()
    for block in model.layers:
        attention = block.get_submodule("self_attn")
        assert isinstance(attention, nn.MultiheadAttention)
        attention.in_proj_weight.data[: 2 * WIDTH] *= 2
    return model


@torch.no_grad()
def main() -> None:
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 2048
    torch.manual_seed(0)
    model = make_model()
    x = torch.randn(2, length, WIDTH)
    padding = torch.arange(length) >= torch.tensor([[length], [length // 2]])  # (2, n), True = padding

    def run() -> Tensor:
        output: Tensor = model(x, src_key_padding_mask=padding)
        return output[~padding]

    exact = run()
    print(skeinformer.convert(model, budget=64))
    print(f"\nn = {length}; error of the encoder's output |R - E| / |E|, time as a share of the exact model's\n")
    for method, budget in CONTENDERS:
        skeinformer.convert(model, method, budget=budget, min_length=0)
        error = (run() - exact).norm() / exact.norm()

        def run_exact() -> None:
            skeinformer.restore(model)
            run()

        def run_sketched(method: str = method, budget: int = budget) -> None:
            skeinformer.convert(model, method, budget=budget, min_length=0)
            run()

        seconds = interleaved({"exact": run_exact, "sketched": run_sketched}, rounds=3)
        share = ratio(seconds["sketched"], seconds["exact"]).median
        print(f"{method:12} d = {budget:4}   error {error:.3f}   time {share:.2f}")
    skeinformer.restore(model)
    assert torch.equal(run(), exact)


if __name__ == "__main__":
    main()
