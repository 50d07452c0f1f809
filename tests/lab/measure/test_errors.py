"""Errors by hand, in float64, and gradients that leave nothing behind."""

import pytest
import torch

from skeinformer.comparison.measure import frobenius_error
from skeinformer.lab.measure.errors import (
    finite,
    input_gradients,
    mean_cosine,
    relative_error,
    row_error,
    spectral_error,
)


def test_relative_error_by_hand() -> None:
    exact = torch.zeros(1, 2, 2, 2)
    exact[0, 0] = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    approx = exact.clone()
    approx[0, 0, 1, 0] = 1.0
    torch.testing.assert_close(relative_error(approx, exact), torch.tensor([[0.2, 0.0]], dtype=torch.float64))
    mask = torch.tensor([[True, False]])
    torch.testing.assert_close(relative_error(approx, exact, mask), torch.zeros(1, 2, dtype=torch.float64))


def test_a_wrong_output_for_a_zero_one_is_infinitely_wrong() -> None:
    assert relative_error(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)).isinf().all()


@pytest.mark.parametrize("relative", [True, False])
def test_spectral_error_is_the_largest_singular_value(relative: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    exact, approx = (torch.randn(2, 3, 40, 5, generator=generator) for _ in range(2))
    mask = torch.rand(2, 40, generator=generator) < 0.8
    difference = (approx - exact).double() * mask[:, None, :, None]
    expected = torch.linalg.svdvals(difference)[..., 0]
    if relative:
        expected /= torch.linalg.svdvals(exact.double() * mask[:, None, :, None])[..., 0]
    torch.testing.assert_close(spectral_error(approx, exact, mask, relative=relative), expected)


def test_errors_carry_no_gradient_and_are_float64() -> None:
    x = torch.rand(1, 2, 4, 3, dtype=torch.bfloat16, requires_grad=True)
    for error in (relative_error(x, x.detach() + 1), spectral_error(x, x.detach() + 1)):
        assert error.dtype == torch.float64
        assert not error.requires_grad
        assert error.shape == (1, 2)


def test_row_error_and_cosine_by_hand() -> None:
    exact = torch.tensor([[3.0, 4.0], [0.0, 2.0]])[None, None]
    approx = torch.tensor([[3.0, 3.0], [2.0, 2.0]])[None, None]
    double = torch.float64
    torch.testing.assert_close(row_error(approx, exact), torch.tensor([[2 / 5]], dtype=double))
    cosines = [21 / (5 * 18**0.5), 2 / 8**0.5]
    torch.testing.assert_close(mean_cosine(approx, exact), torch.tensor([[sum(cosines) / 2]], dtype=double))
    torch.testing.assert_close(frobenius_error(approx, exact), torch.tensor([[5**0.5]], dtype=double))


def test_gradients_of_unused_inputs_are_zero_and_nothing_is_left_behind() -> None:
    x, y = torch.rand(3), torch.rand(3, requires_grad=True)
    upstream = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    with torch.no_grad():
        first, second = input_gradients(lambda a, b: a.square(), (x, y), upstream)
    torch.testing.assert_close(first, 2 * x * upstream.float())
    assert torch.equal(second, torch.zeros(3))
    assert y.grad is None


def test_a_number_that_json_cannot_hold_is_none() -> None:
    assert finite(torch.tensor(0.5)) == 0.5
    assert finite(torch.tensor(float("nan"))) is None
