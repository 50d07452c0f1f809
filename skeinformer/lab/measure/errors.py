"""Errors of an output beside exact attention, for each example and head, and gradients to be compared."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from skeinformer.comparison.measure import frobenius_error, real_rows


def relative_error(approx: Tensor, exact: Tensor, query_mask: Tensor | None = None) -> Tensor:
    """|approx - exact|_F / |exact|_F over the real rows: (b, h), float64.

    `query_mask` (b, n), True = real. Both zero gives 0.
    """
    norm = frobenius_error(torch.zeros_like(exact), exact, query_mask)
    return _quotient(frobenius_error(approx, exact, query_mask), norm)


def spectral_error(approx: Tensor, exact: Tensor, query_mask: Tensor | None = None, *, relative: bool = True) -> Tensor:
    """|approx - exact|_2, divided by |exact|_2 if `relative`: (b, h), float64.

    The loss of Chen et al. (2022), Section 5, which reports it undivided. The norm is the root of the largest
    eigenvalue of the p x p Gram matrix: O(n p^2), no decomposition of an n x p matrix.
    """
    approx, exact = real_rows(approx, query_mask), real_rows(exact, query_mask)
    error = _spectral_norm(approx - exact)
    return _quotient(error, _spectral_norm(exact)) if relative else error


def row_error(approx: Tensor, exact: Tensor) -> Tensor:
    """The largest row of approx - exact over the largest row of exact, in the Euclidean norm: (b, h), float64."""
    approx, exact = real_rows(approx, None), real_rows(exact, None)
    return _quotient((approx - exact).norm(dim=-1).amax(-1), exact.norm(dim=-1).amax(-1))


def mean_cosine(approx: Tensor, exact: Tensor) -> Tensor:
    """The mean over rows of the cosine between a row of approx and that row of exact: (b, h), float64."""
    return F.cosine_similarity(real_rows(approx, None), real_rows(exact, None), dim=-1).mean(-1)


def exact_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(p)) V in float64: what errors are measured against. Time O(n^2 p), memory O(n p)."""
    return F.scaled_dot_product_attention(query.double(), key.double(), value.double())


def input_gradients(run: Callable[..., Tensor], inputs: Sequence[Tensor], upstream: Tensor) -> tuple[Tensor, ...]:
    """Gradients of <run(*inputs), upstream> with respect to each input; zeros for one that is not used."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    with torch.enable_grad():
        output = run(*leaves)
    return torch.autograd.grad(output, leaves, upstream.to(output.dtype), materialize_grads=True)


def _spectral_norm(x: Tensor) -> Tensor:
    largest: Tensor = torch.linalg.eigvalsh(x.mT @ x)[..., -1]  # of (b, h, p, p)
    return largest.clamp(min=0).sqrt()


def finite(x: Tensor) -> float | None:
    """The number that `x` holds, or None where JSON has no such number."""
    return float(x) if torch.isfinite(x) else None


def _quotient(error: Tensor, norm: Tensor) -> Tensor:
    return (error / norm).masked_fill((error == 0) & (norm == 0), 0)
