"""Defects found in other implementations of sketched attention: one test for each, which would catch it here."""

import ast
import math
from pathlib import Path

import pytest
import torch

from skeinformer import METHODS, build, skein_attention
from tests.helpers import (
    PADDING_IS_DRAWN,
    ROWS_ARE_LEARNED,
    SELF_ATTENTION,
    SHARED_QK,
    SKETCHED,
    VARIANTS,
    copies,
    dense_exact,
    draw,
    exact,
    generator,
    gradients,
    inputs_for,
    lengths_mask,
    map_inputs,
    map_noise,
    tensors,
)

TESTS = Path(__file__).parent.parent


def test_sample_size_shrinks_to_the_shortest_sequence_in_the_batch() -> None:
    """A 2-token batch mate must not reduce the columns and pilots of the others, nor change their output."""
    q, k, v = tensors(3, 2, 20)
    mask = lengths_mask([20, 2, 11], 20)
    module = build("skeinformer", head_dim=4, budget=8)
    noise = draw(module, q, k)
    output, info = skein_attention(q, k, v, key_mask=mask, query_mask=mask, budget=8, noise=noise, return_info=True)
    assert (info.columns >= 0).sum(-1).tolist() == [[8, 8], [2, 2], [8, 8]]
    assert (info.pilots >= 0).sum(-1).tolist() == [[8, 8], [2, 2], [8, 8]]
    alone = module(q[:1], k[:1], v[:1], noise=tuple(u[:1] for u in noise))
    torch.testing.assert_close(output[:1], alone, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", METHODS)
def test_a_sequence_of_one_token_crashes(name: str) -> None:
    """Alone, and as one row of a batch; its output is its value (on average, where rows are not normalized)."""
    q, k, v = inputs_for(name, 2, 2, 6)
    mask = lengths_mask([6, 1], 6)
    module = VARIANTS[name].build(budget=4).eval()
    output = module(q, k, v, key_mask=mask, query_mask=mask, generator=generator())
    assert output.isfinite().all()
    one = map_inputs(lambda x: x[:, :, :1], (q, k, v))
    alone = module(*one, generator=generator())
    assert alone.shape == (2, 2, 1, 4)
    if METHODS[name].exact != "no, unbiased" and name not in ROWS_ARE_LEARNED:
        torch.testing.assert_close(output[1, :, 0], v[1, :, 0])
        torch.testing.assert_close(alone, one[2])


def test_pilots_assume_that_padding_is_a_suffix() -> None:
    """With left padding, or padding between tokens, pilots and columns are real tokens, and all can be drawn."""
    mask = torch.zeros(400, 9, dtype=torch.bool)
    mask[:200, 5:] = True
    mask[200:, [0, 3, 8]] = True
    q, k, v = (copies(x, 400) for x in tensors(1, 1, 9))
    _, info = skein_attention(
        q, k, v, key_mask=mask, query_mask=mask, budget=2, generator=generator(), return_info=True
    )
    for selected in (info.pilots, info.columns):
        assert set(selected[:200].unique().tolist()) == {5, 6, 7, 8}
        assert set(selected[200:].unique().tolist()) == {0, 3, 8}


def test_a_token_of_zeros_is_taken_for_padding() -> None:
    """A black pixel is not padding: without a mask, tokens whose q, k and v are 0 are real keys and real queries."""
    q, k, v = (x.detach() for x in tensors(1, 1, 6))
    for x in (q, k, v):
        x[:, :, [1, 4]] = 0
    output, info = skein_attention(q, k, v, budget=6, generator=generator(), return_info=True)
    torch.testing.assert_close(output, exact(q, k, v), rtol=1e-12, atol=1e-12)
    assert sorted(info.columns[0, 0].tolist()) == list(range(6))
    torch.testing.assert_close(output[0, 0, 1], v[0, 0].mean(0), rtol=1e-12, atol=1e-12)
    vmean = build("vmean", head_dim=4)(q, k, v)
    torch.testing.assert_close(vmean[0, 0, 0], v[0, 0].sum(0) / 6, rtol=1e-12, atol=1e-12)


def test_the_same_pilots_for_all_heads_and_examples() -> None:
    q, k, v = tensors(4, 4, 200)
    _, info = skein_attention(q, k, v, budget=10, generator=generator(), return_info=True)
    for selected in (info.pilots, info.columns):
        sets = {tuple(sorted(row)) for row in selected.flatten(0, 1).tolist()}
        assert len(sets) == 16


@pytest.mark.parametrize("num_pilots", [1, 5, 64])
def test_the_gradient_of_a_duplicated_pilot_is_counted_once_per_copy(num_pilots: int) -> None:
    """Five rows and up to 64 pilots: every row is a pilot at most once, and its gradient that of exact attention."""
    q, k, v = tensors(1, 1, 5)
    output, info = skein_attention(q, k, v, budget=2, num_pilots=num_pilots, generator=generator(), return_info=True)
    pilots = info.pilots[0, 0][info.pilots[0, 0] >= 0]
    assert len(pilots) == len(pilots.unique()) == min(num_pilots, 5)
    rows = torch.zeros_like(output)
    rows[:, :, pilots] = 1
    ours = gradients(output * rows, (q, k, v))
    theirs = gradients(exact(q, k, v) * rows, (q, k, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shift", [100.0, 1e4])
def test_exp_without_subtracting_the_maximum_overflows(dtype: torch.dtype, shift: float) -> None:
    """exp(100) is beyond float32. Adding one vector to all keys adds a constant to each row of logits: no change."""
    q, k, v = (x.detach() for x in tensors(1, 2, 30, p=8, dtype=dtype))
    q[..., 0] = 1
    k[..., 0] = 0
    shifted = k.clone()
    shifted[..., 0] = shift * math.sqrt(8)
    for name in METHODS:
        inputs = (shifted, shifted, v) if name in SHARED_QK else (q, shifted, v)
        output = VARIANTS[name].build(head_dim=8, budget=30)(*inputs, generator=generator())
        assert output.isfinite().all()
    exactly = build("skeinformer", head_dim=8, budget=30)
    tolerance = 0.1 if dtype == torch.float16 or shift == 1e4 else 0.05
    torch.testing.assert_close(
        exactly(q, shifted, v).double(), dense_exact(q, k, v), rtol=tolerance, atol=tolerance, check_dtype=False
    )


@pytest.mark.parametrize("name", METHODS)
def test_float32_is_forced(name: str) -> None:
    """float64 in, float64 accuracy out: a change of 1e-12, which float32 cannot see, shows in full."""
    q, k, v = map_inputs(torch.detach, inputs_for(name, 1, 2, 12))
    module = VARIANTS[name].build(budget=12).eval()
    noise = draw(module, q, k)
    output = module(q, k, v, noise=noise)
    assert output.dtype == torch.float64
    nudged = module(q, k, v * (1 + 1e-12), noise=noise)
    torch.testing.assert_close(nudged, output * (1 + 1e-12), rtol=1e-14, atol=1e-15)
    assert not torch.equal(nudged, output)


@pytest.mark.parametrize("columns", ["importance", "uniform"])
@pytest.mark.parametrize("masked", [False, True])
def test_without_row_normalization_the_weights_are_missing(columns: str, masked: bool) -> None:
    """D^-1 A S S^T V carries the weights 1/(d p_i): on V = 1 it averages to 1, where 0.26 was found elsewhere."""
    draws = 4000
    q, k, v = (copies(x, draws) for x in tensors(1, 1, 40, peak=2))
    mask = lengths_mask([25], 40).expand(draws, -1) if masked else None
    module = build("skeinformer_no_norm", head_dim=4, budget=10, columns=columns)
    output = module(q, k, torch.ones_like(v), key_mask=mask, generator=generator(1))[:, 0, :, 0]  # (draws, 40)
    standard_error = output.std(0) / math.sqrt(draws)
    assert standard_error.max() < 0.05
    assert ((output.mean(0) - 1).abs() <= 4 * standard_error).all()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1)])
def test_squeeze_breaks_one_example_or_one_head(name: str, shape: tuple[int, int]) -> None:
    q, k, v = inputs_for(name, 3, 3, 8)
    b, h = shape
    module = VARIANTS[name].build(budget=4)
    noise = draw(module, q, k)
    whole = module(q, k, v, noise=noise)
    inputs = map_inputs(lambda x: x[:b, :h], (q, k, v))
    part = module(*inputs, noise=None if noise is None else tuple(u[:b, :h] for u in noise))
    assert part.shape == (b, h, 8, 4)
    torch.testing.assert_close(part, whole[:b, :h], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", sorted(set(METHODS) - PADDING_IS_DRAWN))
def test_the_mask_is_ignored(name: str) -> None:
    """Masking out the second half of the keys is attending to the first half alone; of tokens, being half as many."""
    q, k, v = inputs_for(name, 2, 2, 10)
    mask = lengths_mask([5, 5], 10)
    module = VARIANTS[name].build(budget=5).eval()
    noise = draw(module, q, k)
    half = map_noise(noise, lambda u: u[:, :, :5])
    if name in SELF_ATTENTION:
        output = module(q, k, v, key_mask=mask, query_mask=mask, noise=noise)
        masked, unmasked = output[:, :, :5], module(q, k, v, noise=noise)[:, :, :5]
        alone = module(*map_inputs(lambda x: x[:, :, :5], (q, k, v)), noise=half)
    else:
        if noise is not None and name not in SKETCHED:  # the first numbers are those of the queries
            half = tuple(u[:, :, :5] if u.shape[2] == 10 and i else u for i, u in enumerate(noise))
        masked, unmasked = module(q, k, v, key_mask=mask, noise=noise), module(q, k, v, noise=noise)
        alone = module(q, k[:, :, :5], v[:, :, :5], noise=half)
    torch.testing.assert_close(masked, alone, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(masked, unmasked)


@pytest.mark.parametrize("name", METHODS)
def test_the_global_generator_is_reseeded_at_every_call(name: str) -> None:
    """Two calls without a generator go on in the global sequence: they neither repeat it nor restart it."""
    q, k, v = inputs_for(name, 1, 2, 20)
    module = VARIANTS[name].build(budget=4)
    torch.manual_seed(1)
    first = torch.rand(3)
    module(q, k, v)
    second = torch.rand(3)
    torch.manual_seed(2)
    torch.rand(3)
    module(q, k, v)
    third = torch.rand(3)
    assert not torch.equal(first, second)
    assert not torch.equal(second, third)


def test_a_comparison_that_no_test_asserts() -> None:
    """No test of the package calls allclose, equal or the like as a statement, whose result nobody reads."""
    silent = {"allclose", "equal", "isclose", "is_close"}
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                called = node.value.func
                name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
                if name in silent:
                    found.append(f"{path.name}:{node.lineno}")
    assert found == []
