"""The dense sketch of the study of near pixels is that of the package where near keys are a window."""

import pytest
import torch
from torch.testing import assert_close

from benchmarks.grid import attend, similar_window, square_mask, window_mask
from skeinformer import cluster_attention


@pytest.mark.parametrize("w", [0, 4, 21])
def test_a_window_is_that_of_the_package(w: int) -> None:
    q, k, v = (torch.randn(2, 2, 64, 8, dtype=torch.float64) for _ in range(3))
    near = window_mask(64, w) if w else torch.zeros(64, 64, dtype=torch.bool)
    output = cluster_attention(q, k, v, window=w, generator=torch.Generator().manual_seed(5))
    assert_close(attend(q, k, v, near, seed=5), output)


def test_near_everything_is_exact() -> None:
    q, k, v = (torch.randn(1, 2, 36, 8, dtype=torch.float64) for _ in range(3))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert_close(attend(q, k, v, square_mask(36, 3)), exact)


def test_squares_have_eight_neighbours() -> None:
    near = square_mask(81, 1)
    assert near[40].nonzero().flatten().tolist() == [30, 31, 32, 39, 40, 41, 48, 49, 50]
    assert near[0].nonzero().flatten().tolist() == [0, 1, 9, 10]


def test_a_similar_window_has_as_many_keys() -> None:
    near = square_mask(144, 2)
    assert abs(similar_window(near).sum() / near.sum() - 1) < 0.1
