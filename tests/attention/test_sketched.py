"""D^-1 A S S^T V and D^-1 S S^T A V against the transcription with the dense S, for every family of sketches."""

from typing import Any

import pytest
import torch
from torch import Tensor

from skeinformer import SKETCHES, build
from skeinformer.attention import Attention
from skeinformer.attention.sketched import Sketched
from tests import reference
from tests.helpers import draw, exact, generator, gradients, over_heads, random_mask, tensors

SIDES = ["columns", "rows"]
SCALE = 0.5


def dense_sketch(module: Attention, noise: Any, n: int, mask: Tensor | None, b: int, h: int) -> Tensor:
    """S, (b, h, n, d), drawn by the family with the noise of the module."""
    assert isinstance(module.method, Sketched)
    family, options = module.method.family_and_options()
    if mask is not None and "log_probability" in options:
        options["log_probability"] = torch.where(mask, 0.0, -torch.inf)[:, None]
    return family.build(noise, n, module.method.budget, dtype=torch.float64, **options).dense().expand(b, h, -1, -1)


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients(sketch: str, side: str, masked: bool) -> None:
    q, k, v = tensors(2, 2, 5, 6, p_v=3, peak=2)
    key_mask, query_mask = (random_mask(2, 6, seed=1), random_mask(2, 5, seed=2)) if masked else (None, None)
    module = build("sketched", head_dim=4, budget=4, sketch=sketch, side=side, scale=SCALE)
    noise = draw(module, q, k, seed=3)
    S = dense_sketch(module, noise, *((6, key_mask) if side == "columns" else (5, query_mask)), 2, 2)
    transcription = reference.sketched_columns if side == "columns" else reference.sketched_rows
    expected = over_heads(
        lambda Q, K, V, keys, queries, at: transcription(Q, K, V, S[at], SCALE, keys, queries),
        q,
        k,
        v,
        key_mask,
        query_mask,
    )
    output = module(q, k, v, key_mask=key_mask, query_mask=query_mask, noise=noise)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-11)
    for ours, theirs in zip(gradients(output, (q, k, v)), gradients(expected, (q, k, v)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("budget", [9, 30])
def test_sampling_without_replacement_is_exact_at_full_budget(side: str, budget: int) -> None:
    q, k, v = tensors(2, 2, 9, peak=3)
    mask = random_mask(2, 9)
    module = build("sketched", head_dim=4, budget=budget, sketch="subsampling_without", side=side)
    output = module(q, k, v, key_mask=mask, query_mask=mask, generator=generator())
    torch.testing.assert_close(output, exact(q, k, v, mask, mask), rtol=1e-10, atol=1e-11)


def test_options_of_the_sketch_are_passed_on() -> None:
    q, k, v = tensors(1, 1, 9)
    module = build("sketched", head_dim=4, budget=5, sketch="sparse_embedding", num_nonzeros=2)
    assert draw(module, q, k)[0].shape == (1, 1, 9, 2)
    with pytest.raises(
        TypeError, match="sketch='sparse_embedding' has no option 'nonzeros'; did you mean 'num_nonzeros'"
    ):
        build("sketched", head_dim=4, sketch="sparse_embedding", nonzeros=2)
    with pytest.raises(TypeError, match="num_nonzeros must be an integer"):
        build("sketched", head_dim=4, sketch="sparse_embedding", num_nonzeros="2")(q, k, v)
    with pytest.raises(ValueError, match="unknown sketch 'gausian'; did you mean 'gaussian'"):
        build("sketched", head_dim=4, sketch="gausian")
    with pytest.raises(ValueError, match="side='row' is not known; did you mean 'rows'"):
        build("sketched", head_dim=4, side="row")
    with pytest.raises(TypeError, match="has no option 'log_probability'"):
        build("sketched", head_dim=4, sketch="subsampling", log_probability=torch.zeros(9))
