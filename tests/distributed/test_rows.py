"""Exact rows of keys that are divided among ranks: what they give to this rank's keys."""

import torch

from skeinformer.attention.sharded.rows import rows_backward
from skeinformer.kernels.fused import attend_with_normalizer
from tests.helpers import generator


def test_half_precision_holds_products_of_large_queries_and_values() -> None:
    """dK of 640 rows is in range for small gradients; in units of the gradients it is not: it was infinite."""
    draws, size = generator(0), 80.0
    queries = size * (1 + 0.05 * torch.randn(1, 1, 640, 32, generator=draws))
    key = torch.full((1, 1, 100, 32), -0.5)
    key[:, :, :2] = 0.5  # two keys to which all rows attend, with values far apart
    value = torch.randn(key.shape, generator=draws)
    value[:, :, 0], value[:, :, 1] = size, -size
    scale, gradient = 0.2, torch.full_like(queries, 1e-4)
    doubles = [x.double() for x in (queries, key, value)]
    output, normalizer = attend_with_normalizer(*doubles, None, scale)
    truth = rows_backward(gradient.double(), *doubles, None, output, normalizer, scale)
    rows = (output.float(), normalizer.float())
    found = rows_backward(gradient, queries, key.half(), value.half(), None, *rows, scale)
    assert 1 < float(truth[1].abs().max()) < torch.finfo(torch.float16).max
    for ours, theirs in zip(found[1:], truth[1:], strict=True):  # queries get nothing from keys that are alike
        assert float((ours.double() - theirs).norm()) < 1e-2 * float(theirs.norm())
